"""Are the two offspring of an only neuron on their own once they part?

Code that picks out ``x[:, :1]`` cannot be told from code that reads the whole of a unit as long as
the unit has one neuron, and what it picks is broadcast to the second neuron without an error. So
each offspring in turn is read with its parent's full weight and the other with none: whatever
becomes of the other, the outputs must stay what they were. Wider units need no such trial, because
sizes other than 1 are never broadcast.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from splitgrow.layout import spread
from splitgrow.state import Undo
from splitgrow.surgery import plan_regrowth, regrow
from splitgrow.trial import largest_change, run, tolerance
from splitgrow.units import Skipped, Slot, Unit, Units, named_tensors

REASON = "two neurons do not act on their own; does forward pick out the only one by number?"


def try_only_neurons(model: nn.Module, units: Units) -> Units:
    """The units but those of one neuron whose offspring would depend on each other."""
    only = [unit for unit in units if unit.width == 1]
    if not only:
        return units
    try:
        trial = copy.deepcopy(model)
    except Exception:  # noqa: BLE001  (whatever a user's class raises: nothing was tried before)
        return units
    before = run(trial, units.graph.example)
    bad = [unit for unit in only if not _is_free(trial, units, unit, before)]
    names = {unit.name for unit in bad}
    kept = [unit for unit in units if unit.name not in names]
    return Units(kept, [*units.skipped, *(Skipped(u.name, REASON) for u in bad)], units.analysis)


def _is_free(model: nn.Module, units: Units, unit: Unit, before: list[Tensor]) -> bool:
    """Do the outputs stay the same whatever becomes of an offspring that is not read?"""
    with Undo() as undo:
        try:
            regrow(model, units, plan_regrowth(units, {unit.name: [0]}), undo)
            return all(
                largest_change(before, _run_with(model, units, unit, moved))
                <= tolerance(model, before)
                for moved in (0, 1)
            )
        finally:
            undo.rollback()


def _run_with(model: nn.Module, units: Units, unit: Unit, moved: int) -> list[Tensor]:
    """The outputs with one offspring moved and not read, the other read in full."""
    tensors = named_tensors(model)
    kept = {slot.name: tensors[slot.name].detach().clone()
            for slot in (*unit.theta, *unit.consumers)}  # fmt: skip
    with torch.no_grad():
        for slot in unit.consumers:
            mine = _entries(units, unit, slot, moved, tensors[slot.name])
            tensors[slot.name].mul_(torch.where(mine, 0.0, 1.0).to(tensors[slot.name]))
            other = _entries(units, unit, slot, 1 - moved, tensors[slot.name])
            tensors[slot.name].mul_(torch.where(other, 2.0, 1.0).to(tensors[slot.name]))
        for slot in unit.theta:
            mine = _entries(units, unit, slot, moved, tensors[slot.name])
            tensors[slot.name].add_(mine.to(tensors[slot.name]), alpha=0.25)
        try:
            return run(model, units.graph.example)
        finally:
            for name, value in kept.items():
                tensors[name].copy_(value)


def _entries(units: Units, unit: Unit, slot: Slot, neuron: int, tensor: Tensor) -> Tensor:
    """Which entries of a resized dimension are those of one offspring, shaped to broadcast."""
    layout = units.layouts[slot.name][slot.dim]
    owner = torch.from_numpy(spread(layout, {unit.axis: np.arange(2)}, fill=-1))
    shape = [1] * tensor.ndim
    shape[slot.dim] = -1
    return (owner == neuron).reshape(shape).to(tensor.device)
