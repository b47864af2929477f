"""Resize a model's tensors so that chosen neurons become two.

Offspring of neuron k: k itself and a new neuron at the end of its unit. With all steps at 0 the
model computes what it did before, because the columns that read the two are halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from splitgrow.attributes import fix_attributes
from splitgrow.layout import Axis, Layout, resolve, size_of, sources, spread
from splitgrow.state import Undo
from splitgrow.units import Slot, Unit, Units, named_tensors


@dataclass
class Regrowth:
    """What happens to one tensor.

    Attributes:
        gather: dimension -> for each new entry, the old one that it copies.
        halved: consumer dimensions -> factor of each new entry, 1 or 1/2.
        offspring: dimensions of neurons -> factor of their gradient, 1 or 1/2.
        moves: (unit, slot, sign of each new entry) where offspring part along theta.
    """

    gather: dict[int, Tensor] = field(default_factory=dict)
    halved: list[tuple[int, Tensor]] = field(default_factory=list)
    offspring: list[tuple[int, Tensor]] = field(default_factory=list)
    moves: list[tuple[Unit, Slot, Tensor]] = field(default_factory=list)

    def copy(self, tensor: Tensor) -> Tensor:
        """Entries duplicated, nothing scaled."""
        for dim, index in self.gather.items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor at step 0: entries duplicated, consumers halved."""
        return _scale(self.copy(tensor), self.halved)

    def offset(self, tensor: Tensor, steps: Mapping[str, Tensor]) -> Tensor | None:
        """What +-steps add to the value; ``steps[unit]`` is (width, size), 0 where not split.

        Rows move before columns are duplicated and halved, so that neighbouring units can be
        split together.
        """
        total = None
        for unit, slot, sign in self.moves:
            rows = _rows_of(unit, slot, steps[unit.name], tensor)
            moved = self.copy(slot.place(rows, tensor.shape)) * _along(sign, slot.dim, tensor)
            total = moved if total is None else total + moved
        return None if total is None else _scale(total, self.halved)

    def gradient_like(self, tensor: Tensor, degree: float) -> Tensor:
        """A tensor that scales as the gradient to the power ``degree``, such as momentum.

        An offspring's gradient is half its parent's, a consumer column's is its parent's.
        """
        return _scale(self.copy(tensor), [(d, f**degree) for d, f in self.offspring])


def _scale(tensor: Tensor, factors: Sequence[tuple[int, Tensor]]) -> Tensor:
    for dim, factor in factors:
        tensor = tensor * _along(factor, dim, tensor)
    return tensor


def _along(vector: Tensor, dim: int, like: Tensor) -> Tensor:
    shape = [1] * like.ndim
    shape[dim] = -1
    return vector.to(like.device, like.dtype).reshape(shape)


def _rows_of(unit: Unit, slot: Slot, vectors: Tensor, tensor: Tensor) -> Tensor:
    """The columns of (width, size) that belong to one of the unit's parameters."""
    start = 0
    for other in unit.theta:
        if other is slot:
            break
        start += unit.slot_size(other)
    return vectors[:, start : start + unit.slot_size(slot)].to(tensor)


def plan_regrowth(units: Units, chosen: Mapping[str, Sequence[int]]) -> dict[str, Regrowth]:
    """For every tensor that changes, how; ``chosen`` lists the neurons of each unit to split."""
    grown: dict[Axis, np.ndarray] = {}
    for name, neurons in chosen.items():
        axis = units[name].axis
        grown[axis] = np.concatenate([np.arange(axis.size), np.asarray(neurons, dtype=np.int64)])
    plans: dict[str, Regrowth] = {}
    for name, layouts in units.layouts.items():
        for dim, layout in enumerate(layouts):
            if size_of(layout, {a: len(s) for a, s in grown.items()}) != size_of(layout):
                index = torch.from_numpy(sources(layout, grown))
                plans.setdefault(name, Regrowth()).gather[dim] = index
    for name, neurons in chosen.items():
        _mark(units, units[name], neurons, plans)
    return plans


def _mark(
    units: Units, unit: Unit, neurons: Sequence[int], plans: dict[str, Regrowth]
) -> None:
    width, count = unit.width, len(neurons)
    sign = np.zeros(width + count, dtype=np.int64)
    sign[list(neurons)] = 1
    sign[width:] = -1

    def lay(slot: Slot) -> Tensor:
        # Shifted by 2, because spread() keeps the larger of two values.
        layout = units.layouts[slot.name][slot.dim]
        return torch.from_numpy(spread(layout, {unit.axis: sign + 2}, fill=0) - 2)

    def half(signs: Tensor) -> Tensor:
        return torch.where(signs.abs() == 1, 0.5, 1.0)

    for slot in unit.consumers:
        plans[slot.name].halved.append((slot.dim, half(lay(slot))))
    for slot in (*unit.theta, *unit.copies):
        plans[slot.name].offspring.append((slot.dim, half(lay(slot))))
    for slot in unit.theta:
        signs = lay(slot)
        moving = torch.where(signs.abs() == 1, signs, 0)
        plans[slot.name].moves.append((unit, slot, moving))


def regrow(model: nn.Module, units: Units, plans: Mapping[str, Regrowth], undo: Undo) -> None:
    """Resize the model's tensors at step 0, and the module attributes that tell their sizes."""
    tensors = named_tensors(model)
    for name, plan in plans.items():
        old = tensors[name]
        undo.set_data(old, _like(plan.value(old.detach()), old))
    fix_attributes(model, list(plans), undo)
    widths = _sizes(units, plans)
    for path, layout in units.analysis.channels:
        module = model.get_submodule(path)
        if isinstance(getattr(module, "num_features", None), int):
            undo.set_attribute(module, "num_features", size_of(layout, widths))


def _sizes(units: Units, plans: Mapping[str, Regrowth]) -> dict[Axis, int]:
    """The new width of every unit that some tensor of the plan carries."""
    widths: dict[Axis, int] = {}
    for unit in units:
        slot = unit.theta[0]
        plan = plans.get(slot.name)
        if plan is not None:
            signs = [s for u, _, s in plan.moves if u is unit]
            if signs:
                per_neuron = slot.positions.shape[1]
                widths[unit.axis] = unit.width + int((signs[0] == -1).sum()) // per_neuron
    return widths


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """In the memory format of the old one."""
    last = old.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last)
    if last and not old.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


__all__ = ["Layout", "Regrowth", "plan_regrowth", "regrow", "resolve"]
