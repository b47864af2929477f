"""Columns that read the two offspring of a neuron unequally, so that training tells them apart.

Columns w of neuron k become w/2 + e and w/2 - e. While the offspring are alike, the model computes
what it did. Once they are at theta +- d, its loss has changed, to second order in (d, e), by

    sum_k  d_k^T S_k d_k / 2 + 2 d_k^T M_k e_k,    M_k = E[ (d sigma_k / d theta_k) (dL / d out)^T ]

where M_k (size, columns) tells how theta_k acts on the loss by way of each column. Training makes
M_k w_k = 0, so that with equal columns, e = 0, offspring that are alike stay alike. M_k itself is
not 0: with other columns they part in the first step of training. They part fastest where e is the
first right singular vector of M_k, which a few power iterations find. M_k is never built: each of
its products is a gradient of the grown model, for all neurons at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from splitgrow.capture import Call
from splitgrow.distributed import team_of
from splitgrow.state import eval_mode
from splitgrow.surgery import Regrowth, scaled
from splitgrow.tap import LossFn
from splitgrow.units import Slot, Unit, named_tensors
from splitgrow.view import ModelView, check_loss, passes

ROUNDS = 2  # of the power iteration, two gradients each
SHARE = 0.5  # length of e, as a part of that of the columns w
NEAR = 1e-2  # length of d while e is sought, as a part of that of theta

Rows = dict[str, Tensor]  # by unit, (width, numbers)


@dataclass(frozen=True)
class Objective:
    """What a loss is measured with."""

    loss_fn: LossFn
    batches: Iterable[Any]


class _Replaced(ModelView):
    """Behaves like the model with other values of some tensors."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        self._tensors = dict(tensors)

    def run(self, call: Call) -> Any:
        """The model's output."""
        return functional_call(self._model, self._tensors, call.args, call.kwargs)


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
        parameters = {n: t for n, t in named_tensors(model).items() if isinstance(t, nn.Parameter)}
        self._wide = {n: parameters[n].detach() for n in plans if n in parameters}
        # A buffer is not trained: nothing would be gained by reading offspring unequally.
        self._read_by = {
            u.name: [slot for slot in u.consumers if slot.name in self._wide] for u in units
        }

    def part(self) -> Rows:
        """Give every pair of offspring its columns, in place; 2 M_k e_k, the loss by d_k at 0."""
        theta = {unit.name: unit.vectors(dict(self._old)) for unit in self._units}
        near = {name: NEAR * rows for name, rows in theta.items()}
        columns = {n: self._columns(slots) for n, slots in self._read_by.items() if slots}
        half, e = {n: SHARE * rows for n, rows in columns.items()}, _by_chance(columns)
        for _ in range(ROUNDS):
            d = _down(self._slopes(e), near, near)
            e = _down(self._gains(d), half, e)
        for name, shift in self._read_apart(e).items():
            self._wide[name] += shift
        found = self._slopes({})  # where both are read alike, any slope is rounding
        return {n: rows if n in columns else torch.zeros_like(rows) for n, rows in found.items()}

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
        leaves = {n: (t + shifts[n] if n in shifts else t.clone()).requires_grad_()
                  for n, t in self._wide.items()}  # fmt: skip
        total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        with team.guard("the columns"), eval_mode(self._model):
            for index, batch in enumerate(passes(self._objective.batches)):
                view = _Replaced(self._model, leaves)
                with torch.enable_grad():
                    loss = check_loss(self._objective.loss_fn(view, batch), index)
                    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                samples += view.samples
                for sums, gradient in zip(total.values(), found, strict=True):
                    if gradient is not None:
                        sums.add_(gradient, alpha=view.samples)
        count = team.sum(samples, "the number of samples")
        return {n: team.add_(sums, "the columns").div_(count) for n, sums in total.items()}

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


def _by_chance(columns: Rows) -> Rows:
    """Each number of the columns goes to one of the two: the same one on all ranks."""
    generator = torch.Generator().manual_seed(0)
    coins = {n: torch.randint(2, w.shape, generator=generator) for n, w in columns.items()}
    return {n: SHARE * w * (2 * coins[n] - 1).to(w) for n, w in columns.items()}


def _down(slopes: Rows, long: Rows, level: Rows) -> Rows:
    """Down each neuron's slope, as far as ``long`` is long; where there is none, ``level``."""
    found: Rows = {}
    for name, rows in long.items():
        length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        steepness = torch.linalg.vector_norm(slopes[name], dim=1, keepdim=True)
        down = -slopes[name] * (length / steepness.where(steepness > 0, 1.0))
        found[name] = down.where(steepness > 0, level[name])
    return found


def _sign(marks: Sequence[tuple[Unit, Slot, Tensor]], unit: Unit, slot: Slot) -> Tensor:
    """Which of the new entries are first offspring of this unit, and which twins."""
    return next(sign for of, at, sign in marks if of is unit and at is slot)
