"""Split: divide the chosen neurons in place (step 4 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.errors import InputError, PlanError, SplitRefused
from splitgrow.optimizer import carry_state, check_owner
from splitgrow.plan import Entry, SplitPlan
from splitgrow.state import Undo
from splitgrow.surgery import Regrowth, plan_regrowth, regrow
from splitgrow.tap import LossFn
from splitgrow.trial import largest_change, run, tolerance
from splitgrow.units import named_tensors
from splitgrow.view import check_batches, mean_loss

# The search for a step starts here, as a fraction of each neuron's own length, ...
FIRST_STEP = 1e-2
# ... and stays between these.
SMALLEST_STEP, LARGEST_STEP = 1e-6, 1.0


@dataclass(frozen=True)
class Offspring:
    """One neuron that became two: ``neuron`` (theta + step v) and ``twin`` (theta - step v)."""

    unit: str
    neuron: int
    twin: int
    lambda_: float
    step: float


@dataclass(frozen=True)
class Receipt:
    """What a split did.

    Attributes:
        parity: largest change of an output at step 0, before the offspring part: rounding.
        step: the step taken: absolute if it was given, else relative to each neuron's length.
        predicted: sum of step_k^2 lambda_k / 2 over the neurons that were split.
        measured: change of the mean loss over the batches; None where none were given.
        loss: mean loss before the split; None where no batches were given.
        offspring: what was split into what, with each neuron's own step.
        widths: unit -> (neurons before, neurons after).
        params: (parameters before, parameters after).
        searched: steps that were tried, with the change of loss of each.
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

    def __str__(self) -> str:
        from splitgrow.show import receipt_table

        return receipt_table(self)


def split(
    model: nn.Module,
    plan: SplitPlan,
    *,
    step: float | None = None,
    optimizer: Optimizer | None = None,
    loss_fn: LossFn | None = None,
    batches: Iterable[Any] | None = None,
) -> Receipt:
    """Divide the neurons of a plan into two offspring each, theta +- step v, in place.

    Without ``step`` the step is searched on the batches, relative to each neuron's length, and
    the best one is kept; where none lowers the loss, the split is refused. Whatever fails, model
    and optimizer are left exactly as they were.

    Args:
        model: the model that the plan was made for.
        plan: what ``select`` returned.
        step: the paper's epsilon, absolute and the same for every neuron. Nothing is searched.
        optimizer: its state follows the neurons; parameter groups and schedulers stay valid.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch.
        batches: data to search the step on, and to measure the change of loss.
    """
    _check(plan, step, loss_fn, batches)
    plan.units.check(model)
    tensors = named_tensors(model)
    parameters = dict(model.named_parameters())
    plans = plan_regrowth(plan.units, plan.chosen)
    if optimizer is not None:
        check_owner(optimizer, parameters, plans)
    shapes = {name: tensors[name].shape for name in plans}
    before = run(model, plan.units.graph.example)
    loss = None if batches is None else mean_loss(model, loss_fn, batches)
    count = sum(p.numel() for p in parameters.values())
    steps = _relative_steps(plan) if step is None else dict.fromkeys(range(len(plan)), 1.0)
    offsets = _offsets(plan, plans, tensors, steps)
    with Undo() as undo:
        regrow(model, plan.units, plans, undo)
        parity = _parity(model, plan, before)
        mover = _Mover(tensors, offsets)
        if step is None:
            assert loss is not None
            chosen, tried = _search(model, mover, loss_fn, batches, loss)
        else:
            chosen, tried = step, ()
        mover.move(chosen)
        measured = None
        if loss is not None:
            changes = dict(tried)
            again = changes.get(chosen)
            measured = mean_loss(model, loss_fn, batches) - loss if again is None else again
        if optimizer is not None:
            carry_state(optimizer, shapes, parameters, plans, undo)
    return _receipt(plan, parity, chosen, steps, measured, loss, count, parameters, tried)


def _check(
    plan: SplitPlan, step: float | None, loss_fn: LossFn | None, batches: Iterable[Any] | None
) -> None:
    if not isinstance(plan, SplitPlan):
        raise InputError(f"plan: expected what select() returned, got {type(plan).__name__}.")
    if step is not None and not (step > 0 and step < float("inf")):
        raise InputError(f"step: expected a positive number, got {step}.")
    if (loss_fn is None) != (batches is None):
        raise InputError("give loss_fn and batches together, or neither.")
    if step is None and batches is None:
        raise InputError(
            "to search the step, give loss_fn= and batches=; or set it yourself with step=."
        )
    if batches is not None:
        check_batches(batches)
    if not len(plan):
        raise PlanError(
            "the plan is empty: no neuron has a negative splitting index within the limits. The "
            "model is splitting stable; train on, or widen the limits of select()."
        )
    seen = {(e.unit, e.neuron) for e in plan}
    if len(seen) < len(plan):
        raise PlanError("the plan lists a neuron twice.")


def _relative_steps(plan: SplitPlan) -> dict[int, float]:
    """Each neuron's own length; that of its unit's neurons on average where it is 0."""
    lengths = [entry.scale for entry in plan]
    typical = sum(lengths) / len(lengths) or 1.0
    return {i: length or typical for i, length in enumerate(lengths)}


def _offsets(
    plan: SplitPlan,
    plans: Mapping[str, Regrowth],
    tensors: Mapping[str, Tensor],
    steps: Mapping[int, float],
) -> dict[str, Tensor]:
    """By tensor, what a step of 1 adds."""
    moves: dict[str, Tensor] = {}
    for name in plan.chosen:
        unit = plan.units[name]
        moves[name] = torch.zeros(unit.width, unit.size, dtype=torch.float64)
    for i, entry in enumerate(plan):
        moves[entry.unit][entry.neuron] = steps[i] * entry.direction.double()
    found = {n: regrowth.offset(tensors[n].detach(), moves) for n, regrowth in plans.items()}
    return {name: offset for name, offset in found.items() if offset is not None}


class _Mover:
    """Sets the offspring at any distance from their parent, always from the same start."""

    def __init__(self, tensors: Mapping[str, Tensor], offsets: Mapping[str, Tensor]) -> None:
        self._parts = [(tensors[n], tensors[n].detach().clone(), o) for n, o in offsets.items()]

    def move(self, step: float) -> None:
        with torch.no_grad():
            for tensor, start, offset in self._parts:
                torch.add(start, offset.to(start), alpha=step, out=tensor.data)


def _parity(model: nn.Module, plan: SplitPlan, before: list[Tensor]) -> float:
    try:
        parity = largest_change(before, run(model, plan.units.graph.example))
    except Exception as error:
        raise SplitRefused(
            f"the model's forward does not run once it is wider ({type(error).__name__}: {error}). "
            "Nothing was changed. Does forward fix a width in its code?"
        ) from error
    if not parity <= tolerance(before):
        raise SplitRefused(
            f"the wider model's outputs differ by {parity:.1e} before its neurons part, more than "
            "rounding can explain. Nothing was changed. Split fewer units at a time, and report "
            "this model."
        )
    return parity


def _search(
    model: nn.Module, mover: _Mover, loss_fn: LossFn | None, batches: Iterable[Any] | None, loss: float
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """The relative step with the lowest loss, among a handful.

    Up or down from the first guess by factors of sqrt(10) until the loss gets no better, then
    once more on either side of the best.
    """
    tried: dict[float, float] = {}

    def change(step: float) -> float:
        if step not in tried:
            mover.move(step)
            tried[step] = mean_loss_or_infinity(model, loss_fn, batches) - loss
        return tried[step]

    factor = 10**0.5
    step = FIRST_STEP
    while change(step) >= 0 and step > SMALLEST_STEP:
        step /= factor
    while step * factor <= LARGEST_STEP and change(step * factor) < change(step):
        step *= factor
    for side in (step * factor**0.5, step / factor**0.5):
        if change(step) < 0:
            change(side)
    best = min(tried, key=lambda s: tried[s])
    if not tried[best] < 0:
        raise SplitRefused(
            f"no step between {min(tried):.0e} and {max(tried):.0e} of the neurons' length lowers "
            f"the loss of {loss:.6g} on these batches. Nothing was changed. Train on before the "
            "next split, score on more data, or select fewer neurons."
        )
    return best, tuple(sorted(tried.items()))


def mean_loss_or_infinity(model: nn.Module, loss_fn: Any, batches: Any) -> float:
    """The mean loss, where a step so large that it overflows counts as infinitely bad."""
    from splitgrow.errors import LossError

    try:
        return mean_loss(model, loss_fn, batches)
    except LossError:
        return float("inf")


def _receipt(
    plan: SplitPlan,
    parity: float,
    step: float,
    steps: Mapping[int, float],
    measured: float | None,
    loss: float | None,
    count: int,
    parameters: Mapping[str, nn.Parameter],
    tried: tuple[tuple[float, float], ...],
) -> Receipt:
    twins = {name: {k: plan.units[name].width + i for i, k in enumerate(neurons)}
             for name, neurons in plan.chosen.items()}  # fmt: skip

    def offspring(i: int, e: Entry) -> Offspring:
        return Offspring(e.unit, e.neuron, twins[e.unit][e.neuron], e.lambda_, step * steps[i])

    listed = tuple(offspring(i, entry) for i, entry in enumerate(plan))
    return Receipt(
        parity=parity,
        step=step,
        predicted=sum(o.step**2 * o.lambda_ / 2 for o in listed),
        measured=measured,
        loss=loss,
        offspring=listed,
        widths={n: (plan.units[n].width, plan.units[n].width + len(k))
                for n, k in plan.chosen.items()},
        params=(count, sum(p.numel() for p in parameters.values())),
        searched=tried,
    )  # fmt: skip
