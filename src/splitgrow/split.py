"""Split: divide the chosen neurons in place (step 4 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.distributed import team_of
from splitgrow.errors import InputError, LossError, PlanError, SplitRefused
from splitgrow.optimizer import carry_state, check_optimizer
from splitgrow.parting import Objective, Parting
from splitgrow.plan import Entry, SplitPlan
from splitgrow.select import is_number
from splitgrow.state import Undo
from splitgrow.surgery import Regrowth, plan_regrowth, regrow
from splitgrow.tap import LossFn
from splitgrow.team import APART, Team
from splitgrow.trial import largest_change, run, tolerance
from splitgrow.units import named_tensors
from splitgrow.view import check_batches, check_loss_fn, mean_loss
from splitgrow.wrapped import bare, retire

# Steps are searched among 10 ** (i / 4), as a fraction of each neuron's own length: from the
# first i on, by two at a time, between the smallest and the largest.
FIRST, SMALLEST, LARGEST = -8, -24, 0

Columns = Literal["halved", "parted"]  # what reads a neuron, and then its offspring


@dataclass(frozen=True)
class Relative:
    """A step that is this fraction of each neuron's own length."""

    fraction: float

    def __post_init__(self) -> None:
        if not _is_positive(self.fraction):
            raise InputError(f"Relative: expected a positive number, got {self.fraction!r}.")


@dataclass(frozen=True)
class Offspring:
    """One neuron that became two: ``neuron`` (theta + step v) and ``twin`` (theta - step v).

    ``slope`` is the change of the loss by the step, at 0: 0 where both are read alike, else
    negative for a positive step and positive for a negative one.
    """

    unit: str
    neuron: int
    twin: int
    lambda_: float
    step: float
    slope: float = 0.0

    @property
    def predicted(self) -> float:
        """The change of the loss that theory expects.

        To first order where columns are parted: the second has the curvature of the loss by the
        outputs, which then change at first order too, and lambda knows nothing of it.
        """
        return self.step * self.slope if self.slope else self.step**2 * self.lambda_ / 2


@dataclass(frozen=True)
class Receipt:
    """What a split did.

    Attributes:
        parity: largest change of an output at step 0, before the offspring part: rounding.
        step: the step taken: absolute if a number was given, else a part of each neuron's length.
        predicted: sum of step_k^2 lambda_k / 2 over the neurons that were split; of those with
            parted columns, step_k slope_k.
        measured: change of the mean loss over the batches; None where none were given.
        loss: mean loss before the split; None where no batches were given.
        offspring: what was split into what, with each neuron's own step.
        widths: unit -> (neurons before, neurons after).
        params: (parameters before, parameters after).
        searched: steps that were tried, with the change of loss of each.
        relative: is the step a part of each neuron's length?
    """

    parity: float
    step: float
    predicted: float
    measured: float | None
    loss: float | None
    offspring: tuple[Offspring, ...]
    widths: dict[str, tuple[int, int]]
    params: tuple[int, int]
    searched: tuple[tuple[float, float], ...] = ()
    relative: bool = False

    def __str__(self) -> str:
        from splitgrow.show import receipt_table

        return receipt_table(self)


def split(
    model: nn.Module,
    plan: SplitPlan,
    *,
    step: float | Relative | None = None,
    columns: Columns = "halved",
    optimizer: Optimizer | None = None,
    loss_fn: LossFn | None = None,
    batches: Iterable[Any] | None = None,
) -> Receipt:
    """Divide the neurons of a plan into two offspring each, theta +- step v, in place.

    Without ``step`` the step is searched on the batches, relative to each neuron's length, and
    the best one is kept; where none lowers the loss, the split is refused. Whatever fails, model
    and optimizer are left exactly as they were. Parameters stay the same objects; the ``.grad``
    of those that are resized is dropped.

    Args:
        model: the model that the plan was made for.
        plan: what ``select`` returned.
        step: the paper's epsilon, absolute and the same for every neuron; or ``Relative(0.3)``, a
            part of each neuron's length. Nothing is searched, and the loss may rise.
        columns: ``"halved"``, the paper's: both offspring are read by half of each weight that read
            the neuron. ``"parted"``: by w/2 + e and w/2 - e. At step 0 the model computes the same;
            but the two are trained differently from the first step on, where else they part slowly,
            and e is what they part fastest with. It takes five gradients on the batches, and the
            loss may fall at first order: each neuron's step is along or against v, as that says.
        optimizer: its state follows the neurons; parameter groups and schedulers stay valid. One
            that is not given here, and has state, fails at its next step.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        batches: data to search the step on, and to measure the change of loss. On several
            processes, this one's part: ``splitgrow.Shard(batches)``. Plans and split models are
            then compared across them, and nothing is changed where they differ.
    """
    team = team_of(batches)
    # Tensors made in inference mode could never be trained.
    with team.guard("split"), torch.inference_mode(False), torch.no_grad(), Undo() as undo:
        _check_plan(model, plan)
        check_step(step)
        check_columns(columns)
        _check_data(step, columns, loss_fn, batches)
        inner = bare(model)
        _check_alike(inner, plan, {"step": repr(step), "columns": columns}, team, undo)
        operation = _Operation(inner, plan, step)
        if optimizer is not None:
            check_optimizer(optimizer, operation.parameters, operation.plans)
        objective = None if loss_fn is None or batches is None else Objective(loss_fn, batches)
        receipt = operation.perform(step, columns, optimizer, objective, team)
        retire(model)
        return receipt


def _check_alike(
    model: nn.Module, plan: SplitPlan, settings: Mapping[str, str], team: Team, undo: Undo
) -> None:
    """All ranks are to do the same to the same model, with rank 0's buffers."""
    if team.size == 1:
        return
    way_out = "Select from the scores that all ranks got together, in the same way on every rank."
    team.same("plan", {"neurons": plan.digest(), **settings}, way_out)
    team.share_buffers(model, undo)
    team.same_model("model", model, APART)


def rehearse(
    model: nn.Module,
    plan: SplitPlan,
    steps: Iterable[float],
    loss_fn: LossFn,
    batches: Iterable[Any],
) -> list[float]:
    """The change of the mean loss that each of some relative steps would bring; nothing is kept."""
    team = team_of(batches)
    with team.guard("rehearse"), torch.inference_mode(False), torch.no_grad():
        _check_plan(model, plan)
        operation, meter = _Operation(model, plan, None), _Meter(model, Objective(loss_fn, batches))
        with Undo() as undo:
            try:
                operation.regrow(undo)
                mover = operation.mover()
                changes = []
                for step in steps:
                    mover.move(step)
                    changes.append(meter.change_or_infinity())
                return changes
            finally:
                undo.rollback()


def _check_plan(model: nn.Module, plan: SplitPlan) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(plan, SplitPlan):
        raise InputError(f"plan: expected what select() returned, got {type(plan).__name__}.")
    if not len(plan):
        raise PlanError(
            "the plan is empty: no neuron has a negative splitting index within the limits. The "
            "model is splitting stable; train on, or widen the limits of select()."
        )
    plan.units.check(bare(model))


def check_step(step: Any) -> None:
    """A positive number, a part of each neuron's length, or none at all."""
    if step is not None and not isinstance(step, Relative) and not _is_positive(step):
        raise InputError(
            f"step: expected a positive number, got {step!r}. A part of each neuron's length is "
            "splitgrow.Relative(0.3)."
        )


def check_columns(columns: Any) -> None:
    """One of the ways to share them."""
    if columns not in get_args(Columns):
        raise InputError(f"columns: expected one of {get_args(Columns)}, got {columns!r}.")


def is_relative(step: float | Relative | None) -> bool:
    """Is it in parts of each neuron's length, as a searched one is?"""
    return step is None or isinstance(step, Relative)


def _is_positive(number: Any) -> bool:
    return is_number(number) and 0 < number < inf


def _check_data(
    step: float | Relative | None,
    columns: Columns,
    loss_fn: LossFn | None,
    batches: Iterable[Any] | None,
) -> None:
    if (loss_fn is None) != (batches is None):
        raise InputError("give loss_fn= and batches= together, or neither.")
    if step is None and batches is None:
        raise InputError(
            "to search the step, give loss_fn= and batches=; or set it yourself with step=."
        )
    if columns == "parted" and batches is None:
        raise InputError(
            'columns: "parted" asks the loss what to part them by. Give loss_fn= and batches=.'
        )
    if loss_fn is not None:
        check_loss_fn(loss_fn)
    if batches is not None:
        check_batches(batches)


class _Meter:
    """The change of the mean loss on the batches since the meter was made."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self._measure = partial(mean_loss, model, objective.loss_fn, objective.batches)
        self.loss = self._measure()

    def change(self) -> float:
        """The loss now, less the loss at the start."""
        return self._measure() - self.loss

    def change_or_infinity(self) -> float:
        """The same, where a step so large that the loss overflows is infinitely bad."""
        try:
            return self.change()
        except LossError:
            return inf


@dataclass(frozen=True)
class _Step:
    """The step that was taken, and what is known of it."""

    size: float
    measured: float | None
    searched: tuple[tuple[float, float], ...] = ()


class _Operation:
    """One split of one model: what must be known beforehand, and how it is done."""

    def __init__(self, model: nn.Module, plan: SplitPlan, step: float | Relative | None) -> None:
        self.model = model
        self.plan = plan
        self.plans = plan_regrowth(plan.units, plan.chosen)
        self.tensors = named_tensors(model)
        self.parameters = {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter)}
        self.old = {name: self.tensors[name].detach() for name in self.plans}
        self.size = self._count()
        # A searched step is relative to each neuron's length, a number that is given is absolute.
        self.relative = is_relative(step)
        self.unit_steps = _lengths(plan) if self.relative else [1.0] * len(plan)
        self.slopes = [0.0] * len(plan)  # of the loss, by v
        self.outputs = self._run_example()

    def perform(
        self,
        step: float | Relative | None,
        columns: Columns,
        optimizer: Optimizer | None,
        objective: Objective | None,
        team: Team,
    ) -> Receipt:
        """Resize, find the step, move the offspring apart, carry the optimizer's state."""
        meter = None if objective is None else _Meter(self.model, objective)
        with Undo() as undo, team.guard("the surgery"):
            self.regrow(undo)
            if columns == "parted" and objective is not None:
                self._part(objective)
            parity = team.largest(self._parity(), "parity")
            taken = self._move(step, meter)
            if optimizer is not None:
                shapes = {name: tensor.shape for name, tensor in self.old.items()}
                carry_state(optimizer, shapes, self.parameters, self.plans, undo)
            team.same_model("the split model", self.model, "Nothing was changed.")
            return self._receipt(parity, taken, None if meter is None else meter.loss)

    def regrow(self, undo: Undo) -> None:
        """Resize the model, at step 0."""
        regrow(self.model, self.plan.units, self.plans, undo)

    def mover(self) -> _Mover:
        """Of the model as it is at step 0."""
        return _Mover(self.tensors, _offsets(self.plan, self.plans, self.old, self.unit_steps))

    def _part(self, objective: Objective) -> None:
        """Share columns unequally, and turn to where the loss falls."""
        units = [self.plan.units[name] for name in self.plan.chosen]
        slopes = Parting(self.model, units, self.plans, self.old, objective).part()
        self.slopes = [float(slopes[e.unit][e.neuron] @ e.direction.to(slopes[e.unit]))
                       for e in self.plan]  # fmt: skip
        signs = [-1.0 if slope > 0 else 1.0 for slope in self.slopes]
        self.unit_steps = [s * sign for s, sign in zip(self.unit_steps, signs, strict=True)]

    def _move(self, step: float | Relative | None, meter: _Meter | None) -> _Step:
        mover = self.mover()
        if step is not None:
            size = step.fraction if isinstance(step, Relative) else step
            mover.move(size)
            return _Step(size, None if meter is None else meter.change())
        assert meter is not None
        found = _search(mover, meter, self._rounding(meter.loss))
        mover.move(found.size)
        return found

    def _count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def _run_example(self) -> list[Tensor]:
        try:
            return run(self.model, self.plan.units.graph.example)
        except Exception as error:
            raise PlanError(
                "the model does not run on the example that find_units was given "
                f"({type(error).__name__}: {error}). Was it converted since? Call find_units again."
            ) from error

    def _parity(self) -> float:
        try:
            parity = largest_change(self.outputs, run(self.model, self.plan.units.graph.example))
        except Exception as error:
            raise SplitRefused(
                f"the model's forward does not run once it is wider ({type(error).__name__}: "
                f"{error}). Nothing was changed. Does forward fix a width in its code?"
            ) from error
        if not parity <= tolerance(self.model, self.outputs):
            raise SplitRefused(
                f"the wider model's outputs differ by {parity:.1e} before its neurons part, more "
                "than rounding can explain. Nothing was changed. Split fewer units at a time, and "
                "report this model."
            )
        return parity

    def _rounding(self, loss: float) -> float:
        """What a loss of this size may change by rounding, a few units in the last place."""
        kinds = {p.dtype for p in self.parameters.values() if p.is_floating_point()}
        return 4 * max(torch.finfo(kind).eps for kind in kinds) * abs(loss)

    def _receipt(self, parity: float, taken: _Step, loss: float | None) -> Receipt:
        chosen, width = self.plan.chosen, {unit.name: unit.width for unit in self.plan.units}

        def offspring(entry: Entry, unit_step: float, slope: float) -> Offspring:
            twin = width[entry.unit] + chosen[entry.unit].index(entry.neuron)
            step = taken.size * unit_step
            return Offspring(entry.unit, entry.neuron, twin, entry.lambda_, step, slope)

        facts = zip(self.plan, self.unit_steps, self.slopes, strict=True)
        listed = tuple(offspring(*each) for each in facts)
        return Receipt(
            parity=parity,
            step=taken.size,
            predicted=sum(o.predicted for o in listed),
            measured=taken.measured,
            loss=loss,
            offspring=listed,
            widths={n: (width[n], width[n] + len(neurons)) for n, neurons in chosen.items()},
            params=(self.size, self._count()),
            searched=taken.searched,
            relative=self.relative,
        )


def _lengths(plan: SplitPlan) -> list[float]:
    """Each neuron's own length; where that is 0, the mean of those in the plan."""
    lengths = [entry.scale for entry in plan]
    typical = sum(lengths) / len(lengths) or 1.0
    return [length or typical for length in lengths]


def _offsets(
    plan: SplitPlan,
    plans: Mapping[str, Regrowth],
    tensors: Mapping[str, Tensor],
    unit_steps: list[float],
) -> dict[str, Tensor]:
    """By tensor, what a step of 1 adds."""
    moves: dict[str, Tensor] = {}
    for name in plan.chosen:
        unit = plan.units[name]
        moves[name] = torch.zeros(unit.width, unit.size, dtype=torch.float64)
    for entry, unit_step in zip(plan, unit_steps, strict=True):
        moves[entry.unit][entry.neuron] = unit_step * entry.direction.double()
    found = {n: regrowth.offset(tensors[n].detach(), moves) for n, regrowth in plans.items()}
    return {name: offset for name, offset in found.items() if offset is not None}


class _Mover:
    """Sets the offspring at any distance from their parent, always from the same start."""

    def __init__(self, tensors: Mapping[str, Tensor], offsets: Mapping[str, Tensor]) -> None:
        self._parts = [(tensors[n], tensors[n].detach().clone(), o) for n, o in offsets.items()]

    def move(self, step: float) -> None:
        """Put every offspring at its parent's place +- step times its offset."""
        for tensor, start, offset in self._parts:
            torch.add(start, offset, alpha=step, out=tensor.data)


def _search(mover: _Mover, meter: _Meter, rounding: float) -> _Step:
    """The relative step with the lowest loss, among a handful.

    Down from the first guess until the loss no longer rises, up until it gets no better, then
    once more on either side of the best. A change within rounding is none.
    """
    tried: dict[float, float] = {}

    def change(i: int) -> float:
        step = 10 ** (i / 4)
        if step not in tried:
            mover.move(step)
            tried[step] = meter.change_or_infinity()
        return tried[step]

    noise = rounding + 2 * abs(meter.change())  # the offspring have not parted yet
    i = FIRST
    while change(i) > noise and i > SMALLEST:
        i -= 2
    while i < LARGEST and change(i + 2) < (change(i) if change(i) < -noise else noise):
        i += 2
    if change(i) < -noise:
        change(i - 1)
        change(min(i + 1, LARGEST))
    best = min(tried, key=lambda step: tried[step])
    if not tried[best] < -noise:
        raise SplitRefused(
            f"no step between {min(tried):.0e} and {max(tried):.0e} of the neurons' length lowers "
            f"the loss of {meter.loss:.6g} on these batches by more than rounding ({noise:.0e}). "
            "Nothing was changed. Train on before the next split, score on more data, or select "
            "fewer neurons."
        )
    return _Step(best, tried[best], tuple(sorted(tried.items())))
