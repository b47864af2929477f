r"""The splitting matrices of a unit, applied but never built.

    S_k = Hessian over theta_k of  F(theta) = sum_x < g(x), sigma(theta; h(x)) >,

with g and h held constant (Eq. 8 of Liu et al. 2019, for any sigma). F is a sum over neurons, so
its Hessian is block diagonal and one product with it applies the S_k of *all* neurons of the unit
to one vector each.

With sigma = body(head(theta)) and a head that is linear in theta,

    S v = head^T  H_body  head v.

H_body is diagonal where the body is an activation followed by linear maps (closed form: one
product with a stored tensor C); elsewhere it is applied by differentiating a retained graph of
the body's gradient, which costs no further forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from splitgrow.curvature import Quadratic, Softplus, kink_curvature
from splitgrow.execute import REPLACED, run_node, run_nodes
from splitgrow.rules import Trait, find_rule
from splitgrow.subgraph import Head
from splitgrow.tap import Evidence
from splitgrow.units import Unit


class SplittingMatrix:
    """S of every neuron of a unit on one batch: maps (width, size) to (width, size)."""

    def __init__(
        self,
        unit: Unit,
        evidence: Evidence,
        constants: dict[fx.Node, Tensor],  # the model's tensors, by placeholder
        stand_in: Softplus | None,
        closed_form: bool = True,
    ) -> None:
        self._unit = unit
        self._constants = constants | evidence.inputs
        graph = unit.subgraph
        with torch.enable_grad():
            self._theta = {p: constants[p].detach().requires_grad_() for p in graph.theta}
            self._heads = [(head, self._run_head(head, self._theta)) for head in graph.heads]
            leaves = {head.node: z.detach().requires_grad_() for head, z in self._heads}
            leaves |= {p: self._theta[p] for p in graph.direct}
            body = Body(unit, self._constants, evidence, stand_in)
            self._variables = tuple(leaves.values())
            self._gradient = body.gradient(leaves)
            self._diagonal: Tensor | None = None
            if graph.diagonal and closed_form:
                self._diagonal = self._curvature()
                self._gradient = ()  # frees the body's graph

    @property
    def work(self) -> int:
        """Multiplications of one product, roughly: parameters times the places they are used."""
        places = max((v.numel() // v.shape[-1] for v in self._variables if v.ndim), default=1)
        return self._unit.width * self._unit.size * max(places // self._unit.width, 1)

    @property
    def is_zero(self) -> bool:
        """Is sigma affine in theta, so that no split can help?"""
        return self._diagonal is None and not any(g.requires_grad for g in self._gradient)

    def __call__(self, vectors: Tensor) -> Tensor:
        """S_k v_k for every neuron k; ``vectors`` is (width, size)."""
        if self.is_zero:
            return torch.zeros_like(vectors)
        tangents = self._split(vectors)
        with torch.no_grad():
            moved = [self._run_head(head, tangents) for head, _ in self._heads]
            direct = [tangents[p] for p in self._unit.subgraph.direct]
        if self._diagonal is not None:
            pushed: Sequence[Tensor | None] = [self._diagonal.mul(moved[0])]
        else:
            pushed = self._hessian([*moved, *direct])
        return self._join(self._pull(pushed))

    def _curvature(self) -> Tensor | None:
        """C = the body's diagonal Hessian: its product with a vector of ones."""
        if not any(g.requires_grad for g in self._gradient):
            return None
        (z,) = self._variables
        return torch.autograd.grad(self._gradient, z, torch.ones_like(z), allow_unused=True)[0]

    def _hessian(self, tangents: list[Tensor]) -> Sequence[Tensor | None]:
        pairs = [(g, t) for g, t in zip(self._gradient, tangents, strict=True) if g.requires_grad]
        return torch.autograd.grad(
            [g for g, _ in pairs],
            self._variables,
            [t for _, t in pairs],
            retain_graph=True,
            allow_unused=True,
        )

    def _pull(self, pushed: Sequence[Tensor | None]) -> dict[fx.Node, Tensor | None]:
        """Back through the heads to the parameters."""
        out: dict[fx.Node, Tensor | None] = {}
        for (head, z), cotangent in zip(self._heads, pushed, strict=False):
            leaves = [self._theta[p] for p in head.parameters]
            if cotangent is None:
                out |= dict.fromkeys(head.parameters)
            else:
                found = torch.autograd.grad(z, leaves, cotangent, retain_graph=True)
                out |= dict(zip(head.parameters, found, strict=True))
        direct = self._unit.subgraph.direct
        return out | dict(zip(direct, pushed[len(self._heads) :], strict=True))

    def _run_head(self, head: Head, parameters: dict[fx.Node, Tensor]) -> Tensor:
        """The head as a linear map of its own parameters; any other bias is left out."""
        mine = set(head.parameters) | set(head.prelude)
        values = run_nodes(head.prelude, self._constants | parameters)
        is_value = parameters is self._theta

        def lookup(n: fx.Node) -> Any:
            bias = len(head.node.args) > 2 and head.node.args[2] is n
            if bias and n not in mine and not is_value:
                return None
            return values[n] if n in mine else self._constants[n]

        result: Tensor = run_node(head.node, lookup)
        return result

    def _split(self, vectors: Tensor) -> dict[fx.Node, Tensor]:
        """Rows of (width, size) as tensors of the parameters' shapes."""
        out, start = {}, 0
        for placeholder, slot in zip(self._unit.subgraph.theta, self._unit.theta, strict=True):
            shape = self._theta[placeholder].shape
            size = shape.numel() // shape[slot.dim] * slot.positions.shape[1]
            out[placeholder] = slot.place(vectors[:, start : start + size], shape)
            start += size
        return out

    def _join(self, tensors: dict[fx.Node, Tensor | None]) -> Tensor:
        rows = []
        for placeholder, slot in zip(self._unit.subgraph.theta, self._unit.theta, strict=True):
            found = tensors[placeholder]
            if found is None:
                found = torch.zeros_like(self._theta[placeholder])
            rows.append(slot.rows(found))
        return torch.cat(rows, dim=1).detach()


class Body:
    """F as a function of z and of the parameters that the body reads directly."""

    def __init__(
        self,
        unit: Unit,
        constants: dict[fx.Node, Any],
        evidence: Evidence,
        stand_in: Softplus | None,
    ) -> None:
        self._graph = unit.subgraph
        self._constants = constants
        self._evidence = evidence
        self._stand_in = stand_in
        self._edge_set = set(self._graph.edges)

    def gradient(self, leaves: dict[fx.Node, Tensor]) -> tuple[Tensor, ...]:
        """dF/dleaf for each leaf, itself differentiable."""
        live = dict(leaves)
        for chain in self._chains(live):
            live[chain[-1]] = self._run_chain(chain, live)
        terms = [
            (g * live[data]).sum()
            for (_, data), g in zip(self._graph.edges, self._evidence.gradients, strict=True)
            if g is not None
        ]
        if not terms:
            return tuple(torch.zeros_like(leaf) for leaf in leaves.values())
        total = torch.stack(terms).sum()
        found = torch.autograd.grad(
            total, list(leaves.values()), create_graph=True, allow_unused=True
        )
        pairs = zip(found, leaves.values(), strict=True)
        return tuple(torch.zeros_like(leaf) if g is None else g for g, leaf in pairs)

    def _chains(self, leaves: dict[fx.Node, Tensor]) -> list[list[fx.Node]]:
        """The body's nodes, with runs of unary pointwise functions put together."""
        seen = set(leaves)
        ends = {data for _, data in self._graph.edges}
        members = set(self._graph.body)
        chains: list[list[fx.Node]] = []
        for node in self._graph.body:
            before = [n for n in node.all_input_nodes
                      if n in seen and (node, n) not in self._edge_set]  # fmt: skip
            seen.add(node)
            last = chains[-1][-1] if chains else None
            joins = (
                last is not None
                and before == [last]
                and last not in ends
                and _is_pointwise(node)
                and _is_pointwise(last)
                and sum(user in members for user in last.users) == 1
            )
            if joins:
                chains[-1].append(node)
            else:
                chains.append([node])
        return chains

    def _run_chain(self, chain: list[fx.Node], live: dict[fx.Node, Any]) -> Any:
        """A unary pointwise function by its value, slope and curvature; anything else as it is."""
        source = self._only_input(chain[0], live)
        if source is None:
            return self._run_all(chain, live)
        x = live[source]
        at = x.detach().requires_grad_()
        y = self._run_all(chain, {source: at})
        if not isinstance(y, Tensor) or y.shape != x.shape:
            return self._run_all(chain, live)
        (d,) = torch.autograd.grad(y.sum(), at, create_graph=True)
        c = torch.autograd.grad(d.sum(), at, allow_unused=True)[0] if d.requires_grad else None
        if c is None:  # affine
            return self._run_all(chain, live)
        return Quadratic.apply(x, y.detach(), d.detach(), c)

    def _only_input(self, node: fx.Node, live: dict[fx.Node, Any]) -> fx.Node | None:
        """The live tensor that a unary pointwise operation works on."""
        inputs = [n for n in node.all_input_nodes if n in live and (node, n) not in self._edge_set]
        if len(inputs) == 1 and _is_pointwise(node) and isinstance(live[inputs[0]], Tensor):
            return inputs[0]
        return None

    def _run_all(self, chain: list[fx.Node], live: dict[fx.Node, Any]) -> Any:
        env = dict(live)
        for node in chain:
            env[node] = self._run(node, env)
        return env[chain[-1]]

    def _run(self, node: fx.Node, live: dict[fx.Node, Any]) -> Any:
        """A node's value, with the stand-in's curvature where it has a kink."""

        def lookup(n: fx.Node) -> Any:
            held = n not in live or (node, n) in self._edge_set
            return self._constants[n] if held else live[n]

        args = fx.map_arg(node.args, lookup)
        kwargs = fx.map_arg(node.kwargs, lookup)
        y = REPLACED.get(node.target, node.target)(*args, **kwargs)
        if not (isinstance(args[0], Tensor) and args[0].requires_grad):
            return y
        with torch.no_grad():
            bent = kink_curvature(node, args, self._stand_in)
        if bent is None:
            return y
        flat = torch.zeros_like(bent)
        return y + Quadratic.apply(args[0], flat, flat, bent)


def _is_pointwise(node: fx.Node) -> bool:
    found = find_rule(node)
    if found is None:
        return False
    return bool(found.traits & Trait.POINTWISE) or found.name == "aten::getitem"
