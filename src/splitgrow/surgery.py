"""Resize a model's tensors so that chosen neurons become two.

Offspring of neuron k: k itself and a new neuron behind the last one of its unit. With all steps
at 0 the model computes what it did before, because the columns that read the two are halved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from splitgrow.attributes import fix_attributes, set_size
from splitgrow.layout import Axis, Layout, size_of, sources, spread
from splitgrow.state import Undo
from splitgrow.units import Slot, Unit, Units, named_tensors

Neurons = NDArray[np.int64]  # for each neuron of a grown unit, the old one it descends from


@dataclass
class Regrowth:
    """What happens to one tensor.

    Attributes:
        gather: dimension -> for each new entry, the old one that it copies.
        halved: (dimension of columns, factor of each new entry, 1 or 1/2).
        offspring: (dimension of neurons, factor of each new entry's gradient, 1 or 1/2).
        moves: (unit, slot, sign of each new entry) where offspring part along theta.
        readers: (unit, slot, sign of each new entry) of columns that read offspring.
    """

    gather: dict[int, Tensor] = field(default_factory=dict)
    halved: list[tuple[int, Tensor]] = field(default_factory=list)
    offspring: list[tuple[int, Tensor]] = field(default_factory=list)
    moves: list[tuple[Unit, Slot, Tensor]] = field(default_factory=list)
    readers: list[tuple[Unit, Slot, Tensor]] = field(default_factory=list)

    def copy(self, tensor: Tensor) -> Tensor:
        """Entries duplicated, nothing scaled."""
        for dim, index in self.gather.items():
            tensor = tensor.index_select(dim, index.to(tensor.device))
        return tensor

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor at step 0, in the old one's memory format: duplicated, columns halved."""
        return _like(scaled(self.copy(tensor), self.halved), tensor)

    def offset(self, tensor: Tensor, steps: Mapping[str, Tensor]) -> Tensor | None:
        """What +-steps add to the value; ``steps[unit]`` is (width, size), 0 where not split.

        Rows move before columns are duplicated and halved, so that neighbouring units can be
        split together.
        """
        total = None
        for unit, slot, sign in self.moves:
            rows = rows_of(unit, slot, steps[unit.name]).to(tensor)
            moved = self.apart(slot, sign, rows, tensor.shape)
            total = moved if total is None else total + moved
        return None if total is None else scaled(total, self.halved)

    def apart(self, slot: Slot, sign: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """+rows (width, m) at the first offspring's entries and -rows at its twin's.

        ``shape`` is the tensor's before it grew.
        """
        placed = self.copy(slot.place(rows, shape))
        return placed * along(sign, slot.dim, placed)

    def difference(self, slot: Slot, sign: Tensor, wide: Tensor) -> Tensor:
        """The transpose of ``apart``: (width, m), the first offspring's entries less its twin's."""
        signed = wide * along(sign, slot.dim, wide)
        for dim, index in self.gather.items():
            shape = list(signed.shape)
            shape[dim] = int(index.max()) + 1
            signed = signed.new_zeros(shape).index_add_(dim, index.to(wide.device), signed)
        return slot.rows(signed)

    def gradient_like(self, tensor: Tensor, degree: float) -> Tensor:
        """A tensor that scales as the gradient to the power ``degree``, such as momentum (1).

        An offspring's gradient is half its parent's, a column's is its parent's.
        """
        factors = [(dim, factor**degree) for dim, factor in self.offspring]
        return _like(scaled(self.copy(tensor), factors), tensor)


def scaled(tensor: Tensor, factors: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Each entry of a dimension times its factor, for some dimensions."""
    for dim, factor in factors:
        tensor = tensor * along(factor, dim, tensor)
    return tensor


def along(vector: Tensor, dim: int, like: Tensor) -> Tensor:
    shape = [1] * like.ndim
    shape[dim] = -1
    return vector.to(like.device, like.dtype).reshape(shape)


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    """In the memory format of the old one; strides the same for a parameter and its state."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.ndim)
    if last is not None and old.is_contiguous(memory_format=last) and not old.is_contiguous():
        return tensor.clone(memory_format=last)
    return tensor.clone(memory_format=torch.contiguous_format)


def rows_of(unit: Unit, slot: Slot, vectors: Tensor) -> Tensor:
    """The columns of (width, size) that belong to one of the unit's parameters."""
    before = unit.theta[: unit.theta.index(slot)]
    start = sum(unit.slot_size(other) for other in before)
    return vectors[:, start : start + unit.slot_size(slot)]


def plan_regrowth(units: Units, chosen: Mapping[str, Sequence[int]]) -> dict[str, Regrowth]:
    """For every tensor that changes, how; ``chosen`` lists the neurons of each unit to split."""
    parents: dict[Axis, Neurons] = {}
    for name, neurons in chosen.items():
        axis = units[name].axis
        parents[axis] = np.concatenate([np.arange(axis.size), np.asarray(neurons, dtype=np.int64)])
    widths = {axis: len(listed) for axis, listed in parents.items()}
    plans: dict[str, Regrowth] = {}
    for name, layouts in units.layouts.items():
        for dim, layout in enumerate(layouts):
            if size_of(layout, widths) != size_of(layout):
                index = torch.from_numpy(sources(layout, parents))
                plans.setdefault(name, Regrowth()).gather[dim] = index
    for name in chosen:
        _mark(units, units[name], parents, plans)
    return plans


def _mark(
    units: Units, unit: Unit, parents: Mapping[Axis, Neurons], plans: Mapping[str, Regrowth]
) -> None:
    """Note on each tensor of a unit which of its entries are halved, and which move where."""

    def signs(slot: Slot) -> Tensor:
        return _signs(units.layouts[slot.name][slot.dim], unit.axis, parents)

    for slot in unit.consumers:
        plans[slot.name].halved.append((slot.dim, _half_where_split(signs(slot))))
        plans[slot.name].readers.append((unit, slot, signs(slot)))
    for slot in (*unit.theta, *unit.copies):
        plans[slot.name].offspring.append((slot.dim, _half_where_split(signs(slot))))
    for slot in unit.theta:
        plans[slot.name].moves.append((unit, slot, signs(slot)))


def _signs(layout: Layout, axis: Axis, parents: Mapping[Axis, Neurons]) -> Tensor:
    """For each new entry of a dimension: +1 of a first offspring, -1 of its twin, 0 of others."""
    signs = np.zeros(len(parents[axis]), dtype=np.int64)
    signs[parents[axis][axis.size :]] = 1
    signs[axis.size :] = -1
    # Other units may grow in the same dimension. Shifted by 2, because spread() keeps the larger.
    values = {other: np.zeros(len(listed), dtype=np.int64) for other, listed in parents.items()}
    laid = spread(layout, values | {axis: signs + 2}, fill=0)
    return torch.from_numpy(np.where(laid == 0, 0, laid - 2))


def _half_where_split(signs: Tensor) -> Tensor:
    return torch.where(signs == 0, 1.0, 0.5)


def regrow(model: nn.Module, units: Units, plans: Mapping[str, Regrowth], undo: Undo) -> None:
    """Resize the model's tensors at step 0, and the module attributes that tell their sizes."""
    tensors = named_tensors(model)
    for name, plan in plans.items():
        old = tensors[name]
        undo.set_data(old, plan.value(old.detach()))
    changed = {id(tensors[name]) for name in plans}
    names = [name for name, tensor in tensors.items() if id(tensor) in changed]
    _announce(model, names, undo)
    fix_attributes(model, names, undo)
    widths = _new_widths(plans)
    for path, layout in units.analysis.channels:
        module = model.get_submodule(path)
        if isinstance(module, _NormBase):  # without affine and statistics no tensor tells
            set_size(module, "num_features", size_of(layout, widths), undo)


def _announce(model: nn.Module, names: Sequence[str], undo: Undo) -> None:
    """Make code that ``torch.compile`` made before look at these tensors again."""
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = model.get_submodule(path)
        for held in (module._parameters, module._buffers):
            undo.later(partial(_touch, held))
            _touch(held)


def _touch(held: dict[str, Any]) -> None:
    """Change a dict and change it back: guards skip what is in one that has not changed."""
    held[""] = None
    del held[""]


def _new_widths(plans: Mapping[str, Regrowth]) -> dict[Axis, int]:
    """The new width of every unit that grows."""
    widths: dict[Axis, int] = {}
    for plan in plans.values():
        for unit, slot, signs in plan.moves:
            twins = int((signs == -1).sum()) // slot.positions.shape[1]
            widths[unit.axis] = unit.width + twins
    return widths


__all__ = ["Regrowth", "plan_regrowth", "regrow", "rows_of", "scaled"]
