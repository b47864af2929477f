"""Score: the splitting index and splitting gradient of every neuron (step 2 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitgrow import span
from splitgrow.analysis import Analysis
from splitgrow.chunks import pieces
from splitgrow.curvature import Softplus
from splitgrow.distributed import APART, Team, bare, team_of
from splitgrow.eigen import Eigenpairs, dense, from_dense, lanczos, random_vector
from splitgrow.errors import InputError
from splitgrow.matrix import SplittingMatrix, arranged
from splitgrow.state import Undo
from splitgrow.tap import Evidence, LossFn, collect
from splitgrow.units import Unit, Units, find_units, named_tensors
from splitgrow.view import check_batches, check_loss_fn, first_call

LANCZOS_STEPS = 8
# Activations of several batches may be kept up to this many bytes, however small one batch is; on
# a GPU, where another pass over the batches costs more than room does, this share of what is free.
KEEP_AT_LEAST = 256 * 2**20
GPU_SHARE = 1 / 16
# A unit is solved densely when building S takes at most this many multiplications ...
DENSE_WORK = 2e7
# ... and its matrices fit into this many numbers.
DENSE_NUMBERS = 2**26


@dataclass(frozen=True)
class UnitScores:
    """The splitting indexes and gradients of one unit.

    Attributes:
        values: (width,) lambda_min of each neuron's splitting matrix.
        vectors: (width, size) its unit eigenvector, in the order of the unit's parameters.
        residuals: (width,) || S v - lambda v ||, how far the eigenpair is from exact.
        scales: (width,) || theta ||, the neuron's own scale.
    """

    unit: Unit
    values: Tensor
    vectors: Tensor
    residuals: Tensor
    scales: Tensor
    method: str


class Scores(Mapping[str, UnitScores]):
    """Scores of a model's units by name; printed, the most promising neurons.

    Attributes:
        loss: mean loss of the scored batches.
        samples: how many samples were scored.
    """

    def __init__(
        self, units: Units, scores: Mapping[str, UnitScores], loss: float, samples: int
    ) -> None:
        self.units = units
        self._scores = dict(scores)
        self.loss = loss
        self.samples = samples

    def __getitem__(self, name: str) -> UnitScores:
        if name not in self._scores:
            raise KeyError(f"no unit {name!r}; there are: {', '.join(self._scores)}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def __str__(self) -> str:
        from splitgrow.show import scores_table

        return scores_table(self)

    __repr__ = __str__


def score(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    units: Units | None = None,
    steps: int | None = None,
    stand_in: Softplus | None = Softplus(),  # noqa: B008  (frozen)
    memory: int | None = None,
) -> Scores:
    """Compute lambda_min and v_min of every neuron.

    S of a neuron is the mean over the samples of the batches. The model is run in eval mode and
    with a fixed random state, so two calls give the same answer.

    Args:
        model: the model that ``units`` were found in; left as it was.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch. It is called with a
            stand-in that behaves like the model.
        batches: a list or a loader; it may be read several times. On several processes, this
            one's part of the data: ``splitgrow.Shard(batches)``.
        units: what ``find_units`` returned. Left out, they are found from the first batch.
        steps: Lanczos steps for every unit with more parameters per neuron than that. By default
            units are solved exactly where that is cheap, and with 8 steps elsewhere: close to
            exact for the neurons worth splitting.
        stand_in: curvature for ReLU and other activations with kinks; ``None`` for none at all.
        memory: bytes of activations that may be kept while a unit is solved; by default as much
            as one batch needs, or 256 MiB. With less, the batches are run again more often.
    """
    team = team_of(batches)
    with team.guard("score"):
        _check(model, loss_fn, units, steps)
        model = bare(model)
        check_batches(batches)
        if units is None:
            call = first_call(model, loss_fn, batches)
            units = find_units(model, call.args or call.bound_to(model).kwargs)
        units.check(model)
        with torch.inference_mode(False), _one_model(model, units, (steps, stand_in), team):
            return _score_all(model, loss_fn, batches, units, steps, stand_in, memory, team)


def _check(model: Any, loss_fn: Any, units: Any, steps: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_loss_fn(loss_fn)
    if units is not None and not isinstance(units, Units):
        raise InputError(f"units: expected what find_units() returned, got {type(units).__name__}.")
    if steps is not None and steps < 1:
        raise InputError(f"steps: expected at least 1, got {steps}.")


@contextmanager
def _one_model(model: nn.Module, units: Units, settings: object, team: Team) -> Iterator[None]:
    """Inside, all ranks have the same model: rank 0's buffers, and parameters that are checked."""
    if team.size == 1:
        yield
        return
    with Undo() as undo:
        try:
            found = {unit.name: f"{unit.width} x {unit.size}" for unit in units}
            same_call = "Call it with the same units and settings on every rank."
            team.same("score", found | {"settings": repr(settings)}, same_call)
            team.share_buffers(model, undo)
            team.same_model("model", model, APART)
            yield
        finally:
            undo.rollback()


def _score_all(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    units: Units,
    steps: int | None,
    stand_in: Softplus | None,
    memory: int | None,
    team: Team,
) -> Scores:
    """Pass over the batches until every unit has been solved."""
    placeholders = units.graph.tensors
    tensors = named_tensors(model)
    constants = {node: tensors[name].detach() for node, name in placeholders.items()}
    found: dict[str, UnitScores] = {}
    waiting: list[Unit] = list(units)
    loss, samples = 0.0, 0
    while True:
        kept, loss, samples = _gather(model, units, waiting, loss_fn, batches, memory, team)
        # From the last unit to the first: early layers have the largest images, and are solved
        # when the activations of the others are gone.
        for unit in reversed(waiting[: len(kept)]):
            evidence = kept.pop(unit.name)
            apply = _Operator(unit, evidence, units.analysis, constants, stand_in, samples, team)
            found[unit.name] = _solve(unit, apply, steps, tensors)
            del apply
        waiting = [unit for unit in waiting if unit.name not in found]
        if not waiting:
            return Scores(units, {u.name: found[u.name] for u in units}, loss, samples)


def _gather(
    model: nn.Module,
    units: Units,
    waiting: Sequence[Unit],
    loss_fn: LossFn,
    batches: Iterable[Any],
    memory: int | None,
    team: Team,
) -> tuple[dict[str, list[Evidence]], float, int]:
    """One pass over the batches; the evidence of as many units as the memory holds.

    The last units are dropped, to be scored in a later pass, when the activations of all the
    batches together grow beyond the limit. The first one is always kept. All ranks keep the same.
    """
    active = list(waiting)
    kept: dict[str, list[Evidence]] = {unit.name: [] for unit in active}
    total, samples, limit = 0.0, 0, memory
    for loss, count, evidence in collect(model, units, active, loss_fn, batches):
        total, samples = total + loss * count, samples + count
        for unit in active:
            kept[unit.name] += evidence[unit.name]
        if limit is None:
            limit = max(_held(kept), _spare(kept))
        while len(active) > 1 and _held(kept) > limit:
            kept.pop(active.pop().name)
    count = team.least(len(active), "units in a pass")
    for unit in active[count:]:
        del kept[unit.name]
    samples = team.sum(samples, "the number of samples")
    return kept, team.sum(total, "the loss") / samples, samples


def _spare(kept: Mapping[str, list[Evidence]]) -> int:
    """Bytes that activations may take in any case, where they are."""
    places = {t.device for e in chain(*kept.values()) for t in e.tensors()}
    share = [
        int(GPU_SHARE * torch.cuda.mem_get_info(place)[0])
        for place in places
        if place.type == "cuda"
    ]
    return max([KEEP_AT_LEAST, *share])


def _held(kept: Mapping[str, list[Evidence]]) -> int:
    """Bytes of distinct tensors: neighbours share the activations between them."""
    seen = {
        t.data_ptr(): t.numel() * t.element_size()
        for evidence in chain(*kept.values())
        for t in evidence.tensors()
    }
    return sum(seen.values())


class _Operator:
    """S of a unit over all batches of all ranks: the mean over samples."""

    def __init__(
        self,
        unit: Unit,
        evidence: list[Evidence],
        analysis: Analysis,
        constants: dict[fx.Node, Tensor],
        stand_in: Softplus | None,
        samples: int,
        team: Team,
    ) -> None:
        self.team = team
        self._product = f"a product of {unit.name}"
        self.terms = []
        for piece in pieces(evidence, unit, analysis):
            matrix = SplittingMatrix(unit, arranged(piece, unit), constants, stand_in)
            self.terms.append((piece.samples / samples, matrix))

    def is_zero(self) -> bool:
        return self.team.every(all(matrix.is_zero for _, matrix in self.terms), self._product)

    def __call__(self, vectors: Tensor) -> Tensor:
        weight, matrix = self.terms[0]
        total = matrix(vectors).mul_(weight)
        for weight, matrix in self.terms[1:]:
            total.add_(matrix(vectors), alpha=weight)
        return self.team.add_(total, self._product)


def _solve(
    unit: Unit, apply: _Operator, steps: int | None, tensors: dict[str, Tensor]
) -> UnitScores:
    theta = unit.vectors(tensors).detach()
    n, d = theta.shape
    if apply.is_zero():
        vectors = torch.zeros_like(theta)
        vectors[:, 0] = 1
        pairs, method = Eigenpairs(theta.new_zeros(n), vectors, theta.new_zeros(n)), "zero"
    elif d <= steps if steps is not None else _is_small(unit, apply, d):
        pairs, method = from_dense(dense(apply, n, d, theta)), "dense"
    elif span.pays(unit, apply.terms, steps or LANCZOS_STEPS, apply.team):
        within = span.Span(unit, apply.terms, apply.team)
        pairs, method = within.smallest(steps or LANCZOS_STEPS), "span"
    else:
        start = random_vector(d, seed=0).to(theta).expand(n, d)  # any one direction does for all
        pairs, method = lanczos(apply, start, steps or LANCZOS_STEPS), "lanczos"
    scales = theta.norm(dim=1)
    # The same S is everywhere; another machine may round its eigenvectors in another way.
    apply.team.first_((pairs.values, pairs.vectors, pairs.residuals, scales), unit.name)
    return UnitScores(unit, pairs.values, pairs.vectors, pairs.residuals, scales, method)


def _is_small(unit: Unit, apply: _Operator, d: int) -> bool:
    """Is building S no dearer than Lanczos, or cheap anyway?"""
    if d <= 2 * LANCZOS_STEPS:
        return True
    work = apply.team.sum(sum(matrix.work for _, matrix in apply.terms), f"work of {unit.name}") * d
    return work <= DENSE_WORK and unit.width * d * d <= DENSE_NUMBERS
