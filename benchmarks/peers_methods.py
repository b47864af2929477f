"""Three ways to the smallest eigenpair of every neuron's splitting matrix, on the same batches.

    ours      batched Lanczos on products with S (`splitgrow.score`)
    dense     S itself, built from second derivatives as the definition reads, then `eigh`
    rayleigh  stochastic descent of the Rayleigh quotient v'Sv / v'v, all neurons together
              (Wang et al. 2020, written from the paper and the settings that it was published with)

All three mean the same S: the same neurons, losses and stand-in curvature of ReLU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from peers_bench import Bench, loss_fn
from peers_quality import Answer
from torch import Tensor, fx

import splitgrow as sg
from splitgrow.curvature import Softplus
from splitgrow.execute import name_of, run_node
from splitgrow.matrix import SplittingMatrix, arranged
from splitgrow.tap import Evidence, collect
from splitgrow.units import Unit, named_tensors

STAND_IN = Softplus()
NUMBERS = 2**26  # of the largest temporary tensor of the dense method


class DoesNotFit(Exception):
    """The method cannot be run here; the message has the arithmetic."""


@dataclass(frozen=True)
class Outcome:
    """What a method found.

    Attributes:
        answer: lambda and v; None where the method answers another question.
        fixed: seconds that do not grow with the number of images.
        passes: how often every image was used.
        more: anything else worth keeping.
    """

    answer: Answer | None
    fixed: float = 0.0
    passes: int = 1
    more: dict[str, Any] | None = None


def ours(bench: Bench, steps: int | None) -> Outcome:
    """The library's own."""
    scores = sg.score(bench.model, loss_fn, bench.batches, units=bench.units, steps=steps)
    return Outcome(Answer.of(scores))


# ---- the definition, literally ---------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Of the dense method: bytes of one unit's matrices, and multiplications in all."""

    numbers: float
    work: float
    seconds: float


def dense(bench: Bench, limits: Limits) -> Outcome:
    """S = E[ dL/dsigma * d2sigma/dtheta2 ], (n, d, d) for each unit, and its eigenvectors.

    One pass over the batches for each unit, as in the code of the 2019 paper: only one unit's
    matrices are held at a time.
    """
    check_fits(bench, limits)
    values, vectors, fixed, start = {}, {}, 0.0, time.perf_counter()
    work, done = {unit.name: _work(bench, unit) for unit in bench.units}, 0.0
    for unit in sorted(bench.units, key=lambda u: -u.size):
        matrix = _matrices(bench, unit)
        bench.wait()
        before = time.perf_counter()
        found = torch.linalg.eigh(matrix.double())
        values[unit.name] = found.eigenvalues[:, 0].to(matrix.dtype)
        vectors[unit.name] = found.eigenvectors[:, :, 0].to(matrix.dtype)
        bench.wait()
        fixed += time.perf_counter() - before
        done += work[unit.name]
        spent = time.perf_counter() - start
        if spent > limits.seconds:
            raise DoesNotFit(
                f"stopped after {spent:.0f} s with {done / sum(work.values()):.0%} of "
                f"{sum(work.values()):.1e} multiplications done"
            )
    return Outcome(Answer(values, vectors), fixed)


def check_fits(bench: Bench, limits: Limits) -> None:
    """Refuse what would not end well, with the arithmetic."""
    largest = max(bench.units, key=lambda u: u.width * u.size**2)
    numbers = largest.width * largest.size**2
    work = sum(_work(bench, unit) for unit in bench.units)
    if numbers > limits.numbers or work > limits.work:
        raise DoesNotFit(
            f"{largest.name} alone: {largest.width} matrices of {largest.size} x {largest.size} "
            f"float32 = {4 * numbers / 1e9:.1f} GB; all layers: {work:.1e} multiplications"
        )


def _work(bench: Bench, unit: Unit) -> float:
    """Multiplications: n d^2 for each place of each image, and 10 n d^3 for the eigenvectors."""
    node = unit.subgraph.edges[0][1]
    shape = [s for s in node.meta["val"].shape[1:] if isinstance(s, int)]
    places = max(prod(shape) / unit.width, 1)
    return unit.width * unit.size**2 * (places * bench.images + 10.0 * unit.size)


def _matrices(bench: Bench, unit: Unit) -> Tensor:
    """S of all neurons of a unit, (n, d, d)."""
    total: Tensor | None = None
    for loss, count, evidence in collect(bench.model, bench.units, [unit], loss_fn, bench.batches):
        del loss
        for piece in evidence[unit.name]:
            part = _matrices_of(bench, unit, piece)
            weight = count / bench.images
            total = part.mul_(weight) if total is None else total.add_(part, alpha=weight)
    assert total is not None
    return (total + total.mT) / 2


def _matrices_of(bench: Bench, unit: Unit, evidence: Evidence) -> Tensor:
    sigma = Sigma(bench, unit, evidence)
    graph = unit.subgraph
    plain = graph.diagonal and not graph.heads[0].prelude
    return _by_outer_products(sigma) if plain else _by_columns(sigma)


class Sigma:
    """F(theta) = sum_x < g(x), sigma(theta; h(x)) > of a unit, for autograd to differentiate."""

    def __init__(self, bench: Bench, unit: Unit, evidence: Evidence) -> None:
        tensors = named_tensors(bench.model)
        self.unit, self.evidence = unit, evidence
        self.fixed = {n: tensors[name].detach() for n, name in bench.units.graph.tensors.items()}
        for node, value in bench.units.graph.constants.items():
            self.fixed[node] = value.to(bench.device) if isinstance(value, Tensor) else value
        self.fixed |= evidence.inputs
        graph = unit.subgraph
        inside = {*graph.body, *(n for h in graph.heads for n in (h.node, *h.prelude))}
        self.nodes = [n for n in bench.units.graph.nodes if n in inside]
        self._edges = set(graph.edges)

    def __call__(self, leaves: dict[fx.Node, Tensor]) -> Tensor:
        """F with some nodes' values replaced."""
        live: dict[fx.Node, Any] = dict(leaves)

        def read(node: fx.Node, n: fx.Node) -> Any:
            return live[n] if n in live and (node, n) not in self._edges else self.fixed[n]

        for node in self.nodes:
            if node not in leaves:
                live[node] = _run(node, partial(read, node))
        ends = zip(self.unit.subgraph.edges, self.evidence.gradients, strict=True)
        return sum((live[data] * g).sum() for (_, data), g in ends if g is not None)  # type: ignore[return-value]


def _run(node: fx.Node, read: Any) -> Any:
    """A node; ReLU with the slope it has and the curvature of the stand-in."""
    if name_of(node) != "aten::relu":
        return run_node(node, read)
    x = read(node.args[0])
    at = x.detach()
    moved = x - at  # zero, but for its derivatives
    return at.relu() + (at > 0) * moved + STAND_IN(at) / 2 * moved * moved


def _by_outer_products(sigma: Sigma) -> Tensor:
    """Where sigma is one layer and a function of each of its outputs z: S = E[ C x x' ].

    x is what the layer reads at one place, and C = d2F/dz2 there.
    """
    (head,) = sigma.unit.subgraph.heads
    z = run_node(head.node, sigma.fixed.__getitem__).detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(sigma({head.node: z}), z, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), z)
    read, weight = (sigma.fixed[n] for n in head.node.args[:2])  # type: ignore[index]
    if weight.ndim == 2:
        x, c = read.flatten(0, -2), curvature.flatten(0, -2).T
    else:
        names = ("stride", "padding", "dilation")
        given = dict(zip(names, head.node.args[3:6], strict=False))
        x = F.unfold(read, weight.shape[2:], **given).mT.flatten(0, 1)
        c = curvature.movedim(1, 0).flatten(1)
    if len(sigma.unit.theta) == 2:  # a bias reads 1 everywhere
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    size = max(NUMBERS // x.numel(), 1)
    parts = [(rows[:, :, None] * x).mT @ x for rows in c.split(size)]
    return torch.cat(parts)


def _by_columns(sigma: Sigma) -> Tensor:
    """In any case: the gradient's derivative by each parameter, of all neurons at once."""
    unit, graph = sigma.unit, sigma.unit.subgraph
    with torch.enable_grad():
        leaves = {p: sigma.fixed[p].detach().requires_grad_() for p in graph.theta}
        slopes = torch.autograd.grad(
            sigma(leaves), list(leaves.values()), create_graph=True, allow_unused=True
        )
        pairs = zip(unit.theta, leaves.values(), slopes, strict=True)
        rows = torch.cat([s.rows(torch.zeros_like(p) if g is None else g) for s, p, g in pairs], 1)
        if not rows.requires_grad:  # sigma is linear
            return rows.new_zeros(*rows.shape, unit.size)
        columns = []
        for j in range(unit.size):
            found = torch.autograd.grad(
                rows[:, j].sum(), list(leaves.values()), retain_graph=True, allow_unused=True
            )
            both = zip(unit.theta, leaves.values(), found, strict=True)
            columns.append(
                torch.cat([s.rows(torch.zeros_like(p) if g is None else g) for s, p, g in both], 1)
            )
    return torch.stack(columns, dim=-1)


# ---- descent of the Rayleigh quotient --------------------------------------------------------


@dataclass(frozen=True)
class Descent:
    """RMSprop as published; the rate falls to a fifth after 10, 30, 50, 70 and 90% of the passes.

    Published: a rate of 0.001 with ten passes over the whole training set, 7,000 updates of 64
    images. A few hundred updates need a larger one.
    """

    passes: int = 10
    rate: float = 0.001
    momentum: float = 0.9
    alpha: float = 0.9
    fall: float = 0.2
    falls: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)

    def rate_at(self, index: int) -> float:
        """The rate of one pass."""
        return self.rate * self.fall ** sum(index >= share * self.passes for share in self.falls)


def rayleigh(bench: Bench, descent: Descent) -> Outcome:
    """One direction per neuron; each batch gives all of them one step.

    As published: v is drawn from a uniform distribution, brought back to length 1 after each step,
    and both lambda and v are averages over the last pass. Products with S are ours, which go
    through depthwise layers and cost less than the published ones: only the descent is compared.
    """
    random, like = torch.Generator().manual_seed(0), next(bench.model.parameters())
    directions = {
        unit.name: (2 * torch.rand(unit.width, unit.size, generator=random) - 1).to(like)
        for unit in bench.units
    }
    directions = {
        name: torch.nn.Parameter(v / v.norm(dim=1, keepdim=True)) for name, v in directions.items()
    }
    optimizer = torch.optim.RMSprop(
        directions.values(), lr=descent.rate, alpha=descent.alpha, momentum=descent.momentum
    )
    values: dict[str, Tensor] = {}
    vectors: dict[str, Tensor] = {}
    for index in range(descent.passes):
        optimizer.param_groups[0]["lr"] = descent.rate_at(index)
        values = {name: v.new_zeros(len(v)) for name, v in directions.items()}
        vectors = {name: torch.zeros_like(v) for name, v in directions.items()}
        for batch in bench.batches:
            share = len(batch[1]) / bench.images
            for name, product in _products(bench, batch, directions):
                v = directions[name].detach()
                quotient = (v * product).sum(1, keepdim=True) / (v * v).sum(1, keepdim=True)
                directions[name].grad = 2 * (product - quotient * v) / (v * v).sum(1, keepdim=True)
                values[name].add_(quotient[:, 0], alpha=share)
                vectors[name].add_(v, alpha=share)
            optimizer.step()
            with torch.no_grad():
                for v in directions.values():
                    v.div_(v.norm(dim=1, keepdim=True))
    answer = Answer(values, {name: v.detach() for name, v in vectors.items()})
    updates = descent.passes * len(bench.batches)
    return Outcome(answer, 0.0, descent.passes, {"updates": updates, "rate": descent.rate})


def _products(
    bench: Bench, batch: Any, directions: dict[str, torch.nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """S v of every unit on one batch, from one forward and backward pass of the net."""
    tensors = named_tensors(bench.model)
    constants = {n: tensors[name].detach() for n, name in bench.units.graph.tensors.items()}
    for _, count, evidence in collect(
        bench.model, bench.units, list(bench.units), loss_fn, [batch]
    ):
        for unit in bench.units:
            v = directions[unit.name].detach()
            total = torch.zeros_like(v)
            for whole in evidence.pop(unit.name):
                matrix = SplittingMatrix(unit, arranged(whole, unit), constants, STAND_IN)
                total.add_(matrix(v), alpha=whole.samples / count)
            yield unit.name, total
