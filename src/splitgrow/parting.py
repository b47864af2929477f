"""Columns that read the two offspring of a neuron unequally, so that training tells them apart.

Columns w of neuron k become w/2 + e and w/2 - e. While the offspring are alike, the model computes
what it did. Once they are at theta +- d, its loss has changed, to first order in d and in e, by

    sum_k  2 d_k^T M_k e_k,    M_k = E[ (d sigma_k / d theta_k) (dL / d out)^T ],

where M_k (size, columns) tells how theta_k acts on the loss by way of each column. Training makes
M_k w_k = 0, so that with equal columns, e = 0, offspring that are alike stay alike. M_k itself is
not 0: with other columns they part in the first step of training. They part fastest where e is the
first right singular vector of M_k, which a few power iterations find. M_k is never built: each of
its products is a gradient of the grown model, for all neurons at once.

Two things are asked of e besides. It is orthogonal to w: along w, one offspring would do what the
parent did and the other next to nothing, which is no split; where one number alone reads a neuron,
nothing is left of e, and columns are halved. And columns are measured by the typical size of what
they belong to, so that an output whose scale means nothing (batch norm follows) weighs no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from splitgrow.distributed import team_of
from splitgrow.errors import LossError
from splitgrow.state import eval_mode
from splitgrow.surgery import Regrowth, scaled
from splitgrow.tap import LossFn
from splitgrow.units import Slot, Unit, named_tensors
from splitgrow.view import ModelView, check_differentiable, check_loss, passes

ROUNDS = 2  # of the power iteration, two gradients each
SHARE = 0.5  # length of e, as a part of that of the columns w
NEAR = 1e-2  # length of d while e is sought, as a part of that of theta

Rows = dict[str, Tensor]  # by unit, (width, numbers)


@dataclass(frozen=True)
class Objective:
    """What a loss is measured with."""

    loss_fn: LossFn
    batches: Iterable[Any]


class Parting:
    """A model that was just grown, at step 0, and the columns of its offspring.

    Args:
        model: the grown model, whose columns are halved.
        units: those that grew.
        plans: how, by tensor.
        old: the tensors as they were before.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        plans: Mapping[str, Regrowth],
        old: Mapping[str, Tensor],
        objective: Objective,
    ) -> None:
        self._model, self._units, self._plans, self._old = model, units, plans, old
        self._objective = objective
        # What is not trained reads both alike: nothing would be gained by telling them apart.
        self._wide = {
            n: t for n, t in named_tensors(model).items()
            if n in plans and isinstance(t, nn.Parameter) and t.requires_grad
        }  # fmt: skip
        self._read_by = {
            u.name: [slot for slot in u.consumers if slot.name in self._wide] for u in units
        }

    def part(self) -> Rows:
        """Give every pair of offspring its columns, in place; 2 M_k e_k, the loss by d_k at 0."""
        near = {u.name: NEAR * u.vectors(dict(self._old)) for u in self._units}
        columns = {n: _Columns(self._columns(slots)) for n, slots in self._read_by.items() if slots}
        e = {n: each.by_chance() for n, each in columns.items()}
        for _ in range(ROUNDS):
            slopes = self._slopes(e)  # where both are read alike, they are rounding
            d = {n: _down(rows, near[n], near[n]) * _are_apart(e.get(n), rows)
                 for n, rows in slopes.items()}  # fmt: skip
            e = {n: columns[n].down(rows, e[n]) for n, rows in self._gains(d).items()}
        for name, shift in self._read_apart(e).items():
            self._wide[name].data += shift
        return {n: rows * _are_apart(e.get(n), rows) for n, rows in self._slopes({}).items()}

    # ---- products with M --------------------------------------------------------------------

    def _slopes(self, e: Rows) -> Rows:
        """2 M e of every neuron: the loss by d, where columns are e apart."""
        gradients = self._gradients(self._read_apart(e))

        def row(unit: Unit, slot: Slot) -> Tensor:
            plan = self._plans[slot.name]
            sign = _sign(plan.moves, unit, slot)
            return plan.difference(slot, sign, scaled(gradients[slot.name], plan.halved))

        return {u.name: torch.cat([row(u, slot) for slot in u.theta], dim=1) for u in self._units}

    def _gains(self, d: Rows) -> Rows:
        """2 M^T d of every neuron: the loss by e, where offspring are d apart."""
        shifts = {n: self._plans[n].offset(self._old[n], d) for n in self._wide}
        gradients = self._gradients({n: shift for n, shift in shifts.items() if shift is not None})

        def row(unit: Unit, slot: Slot) -> Tensor:
            plan = self._plans[slot.name]
            return plan.difference(slot, _sign(plan.readers, unit, slot), gradients[slot.name])

        return {
            u.name: torch.cat([row(u, slot) for slot in self._read_by[u.name]], dim=1)
            for u in self._units
            if self._read_by[u.name]
        }

    def _gradients(self, shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the mean loss by every parameter that grew, where some are shifted."""
        team, samples = team_of(self._objective.batches), 0
        total = {name: torch.zeros_like(t, requires_grad=False) for name, t in self._wide.items()}
        with team.guard("the columns"), eval_mode(self._model), self._shifted(shifts):
            for index, batch in enumerate(passes(self._objective.batches)):
                view = ModelView(self._model)
                with torch.enable_grad():
                    loss = check_loss(self._objective.loss_fn(view, batch), index)
                    check_differentiable(loss)
                    found = torch.autograd.grad(loss, list(self._wide.values()), allow_unused=True)
                samples += view.samples
                for sums, gradient in zip(total.values(), found, strict=True):
                    if gradient is not None:
                        sums.add_(gradient, alpha=view.samples)
        count = team.sum(samples, "the number of samples")
        mean = {n: team.add_(sums, "the columns").div_(count) for n, sums in total.items()}
        if wrong := [name for name, gradient in mean.items() if not gradient.isfinite().all()]:
            raise LossError(
                f"the gradient of the loss by {wrong[0]} is not finite, though the loss is. Look "
                "for a square root or a logarithm of 0 in the model or the loss."
            )
        return mean

    @contextmanager
    def _shifted(self, shifts: Mapping[str, Tensor]) -> Iterator[None]:
        """The parameters elsewhere inside, whatever reads them; where they were again outside."""
        kept = {name: self._wide[name].data for name in shifts}
        try:
            for name, data in kept.items():
                self._wide[name].data = data + shifts[name]
            yield
        finally:
            for name, data in kept.items():
                self._wide[name].data = data

    # ---- rows of neurons --------------------------------------------------------------------

    def _columns(self, slots: Sequence[Slot]) -> Tensor:
        """What reads each neuron, (width, numbers)."""
        return torch.cat([slot.rows(self._old[slot.name]) for slot in slots], dim=1)

    def _read_apart(self, e: Rows) -> dict[str, Tensor]:
        """What +-e adds to the tensors that read the neurons."""
        found: dict[str, Tensor] = {}
        for unit in self._units:
            if unit.name not in e:
                continue
            slots = self._read_by[unit.name]
            sizes = [slot.rows(self._old[slot.name]).shape[1] for slot in slots]
            for slot, rows in zip(slots, e[unit.name].split(sizes, dim=1), strict=True):
                plan, shape = self._plans[slot.name], self._old[slot.name].shape
                shift = plan.apart(slot, _sign(plan.readers, unit, slot), rows, shape)
                found[slot.name] = found[slot.name] + shift if slot.name in found else shift
        return found


class _Columns:
    """What reads the neurons of a unit, and how their offspring may be read unequally.

    ``scale`` (numbers,) is the typical size of each number over all neurons; lengths and angles
    are those of what is left when it is divided out.
    """

    def __init__(self, columns: Tensor) -> None:
        self.scale = columns.norm(dim=0) / len(columns) ** 0.5
        self.w = torch.where(self.scale > 0, columns / self.scale, 0.0)

    def by_chance(self) -> Tensor:
        """Any e across w, the same one on all ranks."""
        drawn = torch.randn(self.w.shape, generator=torch.Generator().manual_seed(0))
        return self._against(drawn.to(self.w))

    def down(self, gains: Tensor, level: Tensor) -> Tensor:
        """e where the loss falls fastest, (width, numbers); ``level`` where it does not change."""
        flat = (gains == 0).all(dim=1, keepdim=True)
        return torch.where(flat, level, self._against(gains * self.scale))

    def _against(self, rows: Tensor) -> Tensor:
        """e against the part of each row that is across w; 0 where there is none."""
        across = self._across(rows)
        return self.scale * _down(across, SHARE * self.w, across)

    def _across(self, rows: Tensor) -> Tensor:
        """Without their part along w; 0 where rounding alone is left."""
        lengths = self.w.square().sum(dim=1, keepdim=True)
        along = (rows * self.w).sum(dim=1, keepdim=True) / lengths.where(lengths > 0, 1.0)
        across = rows - along * self.w
        rounding = torch.finfo(rows.dtype).eps ** 0.5 * rows.norm(dim=1, keepdim=True)
        return across * (across.norm(dim=1, keepdim=True) > rounding)


def _down(slopes: Tensor, long: Tensor, level: Tensor) -> Tensor:
    """Down each row's slope, as far as ``long`` is long; where there is none, ``level``."""
    length, steepness = (rows.norm(dim=1, keepdim=True) for rows in (long, slopes))
    return (-slopes * (length / steepness.where(steepness > 0, 1.0))).where(steepness > 0, level)


def _are_apart(e: Tensor | None, like: Tensor) -> Tensor:
    """Which neurons' offspring are read unequally, (width, 1)."""
    return like.new_zeros(1, 1) if e is None else e.any(dim=1, keepdim=True)


def _sign(marks: Sequence[tuple[Unit, Slot, Tensor]], unit: Unit, slot: Slot) -> Tensor:
    """Which of the new entries are first offspring of this unit, and which twins."""
    return next(sign for of, at, sign in marks if of is unit and at is slot)
