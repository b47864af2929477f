"""Units: the families of neurons that a model has, and what each is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, fx, nn

from splitgrow.analysis import Analysis, analyse
from splitgrow.capture import Call, ExampleInputs, Graph, capture, named_tensors
from splitgrow.errors import InputError, PlanError
from splitgrow.layout import Axis, Layout, leaves, owners, repeated, resolve
from splitgrow.subgraph import Subgraph, trace_subgraph
from splitgrow.wrapped import bare


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one tensor of the model meets a unit: dimension ``dim`` of ``name``."""

    name: str
    dim: int
    positions: Tensor  # (width, m)  the entries of that dimension that belong to each neuron

    def rows(self, tensor: Tensor) -> Tensor:
        """The neurons' slices of the tensor, (width, ...): one row per neuron."""
        moved = tensor.movedim(self.dim, 0)
        if not self.is_whole(moved.shape[0]):
            moved = moved[self.positions.reshape(-1).to(tensor.device)]
        return moved.reshape(len(self.positions), -1)

    def place(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of ``shape`` with ``rows`` at the neurons' entries and zeros elsewhere."""
        moved = [shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :]]
        if self.is_whole(moved[0]):
            return rows.reshape(moved).movedim(0, self.dim)
        out = rows.new_zeros(moved)
        index = self.positions.reshape(-1).to(rows.device)
        out[index] = rows.reshape(len(index), *moved[1:])
        return out.movedim(0, self.dim)

    def is_whole(self, size: int) -> bool:
        """Do the neurons take up the whole dimension, in order?"""
        return self._ordered and self.positions.numel() == size

    @cached_property
    def _ordered(self) -> bool:
        flat = self.positions.reshape(-1)
        return bool((flat == torch.arange(len(flat))).all())


@dataclass(frozen=True, eq=False)
class Unit:
    """A family of ``width`` interchangeable neurons with ``size`` parameters each.

    Attributes:
        name: path of the module of the first parameter, e.g. ``features.3``.
        width: number of neurons (the paper's n).
        theta: the parameters that make up a neuron, in the order of its vector.
        copies: tensors copied to the offspring: normalisation affines, running statistics.
        consumers: the weights whose columns read the neuron, and are halved in a split.
        sizes: for each tensor of ``theta``, how many of its entries one neuron has.
    """

    name: str
    width: int
    theta: tuple[Slot, ...]
    copies: tuple[Slot, ...]
    consumers: tuple[Slot, ...]
    sizes: tuple[int, ...]
    axis: Axis = field(repr=False)
    subgraph: Subgraph = field(repr=False)

    @property
    def size(self) -> int:
        """Parameters per neuron (d), normalisation affines not counted."""
        return sum(self.sizes)

    def slot_size(self, slot: Slot) -> int:
        """How many of a neuron's parameters are in one of its tensors."""
        return self.sizes[self.theta.index(slot)]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters of a neuron, in the order of its vector."""
        return tuple(slot.name for slot in self.theta)

    def vectors(self, tensors: dict[str, Tensor]) -> Tensor:
        """theta of every neuron, (width, size)."""
        return torch.cat([slot.rows(tensors[slot.name]) for slot in self.theta], dim=1)


@dataclass(frozen=True)
class Skipped:
    """A family of neurons that cannot be split, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Units(Sequence[Unit]):
    """The units of a model, in order of execution; printed, a table.

    Attributes:
        skipped: what cannot be split, each with ``name`` and ``reason``.
    """

    def __init__(
        self, units: Iterable[Unit], skipped: Iterable[Skipped], analysis: Analysis
    ) -> None:
        self._units = tuple(units)
        self.skipped = tuple(skipped)
        self.analysis = analysis

    @overload
    def __getitem__(self, key: int | str) -> Unit: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Unit]: ...
    def __getitem__(self, key: int | str | slice) -> Unit | Sequence[Unit]:
        """By number, or by name."""
        if not isinstance(key, str):
            return self._units[key]
        for unit in self._units:
            if unit.name == key:
                return unit
        raise KeyError(f"no unit {key!r}; there are: {', '.join(u.name for u in self._units)}")

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    @property
    def graph(self) -> Graph:
        """The traced model."""
        return self.analysis.graph

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter and buffer when the units were found."""
        shape = self.analysis.shape
        return {name: shape(node) for node, name in self.graph.tensors.items()}

    @cached_property
    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """The layout of each dimension of every parameter and buffer."""
        dims = self.analysis.dims
        return {n: tuple(resolve(d) for d in dims[p]) for p, n in self.graph.tensors.items()}

    def check(self, model: nn.Module) -> None:
        """Raise unless the model still has the shapes that these units were found in."""
        found = {name: tuple(t.shape) for name, t in named_tensors(model).items()}
        for name, shape in self.shapes.items():
            if found.get(name) != shape:
                now = f"has shape {found[name]}" if name in found else "is missing"
                raise PlanError(
                    f"{name} had shape {shape} when the units were found and now {now}: the model "
                    "is another one, or it has been split since. Call find_units again."
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Units:
        """Units are never changed, so a copy is the same."""
        return self

    def __str__(self) -> str:
        from splitgrow.show import units_table

        return units_table(self)

    __repr__ = __str__


def find_units(
    model: nn.Module, example_inputs: ExampleInputs | Call, *, exclude: Iterable[str] = ()
) -> Units:
    """Find what can be split in a model.

    The model is traced in eval mode and each index is followed from the parameters that make it
    to the weights that consume it. Each unit found is then tried: one neuron is duplicated on a
    copy of the model, which must compute the same outputs, or the unit is skipped.

    Args:
        model: any module that ``torch.export`` can trace; it is left as it was.
        example_inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        exclude: names of units to leave alone.
    """
    from splitgrow.independence import try_only_neurons
    from splitgrow.trial import try_units

    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model: a scripted model is no longer Python. Give the one it came from.")
    model = bare(model)
    graph = capture(model, Call.from_example(example_inputs))
    analysis = analyse(graph, model)
    units, skipped = _collect(analysis, model)
    found = Units(units, skipped, analysis)
    kept = try_only_neurons(model, try_units(model, _without(found, exclude)))
    return _with_partners(found, kept)


def _with_partners(found: Units, kept: Units) -> Units:
    """Name the other modules, too, of units that were found and not kept."""
    told = {_path(slot.name) for unit in kept for slot in unit.theta}
    told |= {skipped.name for skipped in kept.skipped}
    names = {unit.name for unit in kept}
    partners: dict[str, str] = {}
    for unit in found:
        if unit.name not in names:
            paths = {_path(slot.name): None for slot in unit.theta[1:]}
            partners |= {path: f"is one unit with {unit.name}" for path in paths
                         if path not in told and path != _path(unit.theta[0].name)}  # fmt: skip
    more = [Skipped(path, reason) for path, reason in partners.items()]
    return Units(kept, [*kept.skipped, *more], kept.analysis)


def _without(units: Units, exclude: Iterable[str]) -> Units:
    names = [exclude] if isinstance(exclude, str) else list(exclude)
    known = {unit.name for unit in units} | {s.name for s in units.skipped}
    for name in names:
        if name not in known:
            raise InputError(f"exclude: no unit is called {name!r}; there are {sorted(known)}.")
    kept = [unit for unit in units if unit.name not in names]
    left_out = [Skipped(u.name, "left out by exclude=") for u in units if u.name in names]
    return Units(kept, [*left_out, *units.skipped], units.analysis)


# ---- from layouts to units -------------------------------------------------------------------


@dataclass
class _Parts:
    """The slots of one axis while they are collected."""

    theta: list[tuple[fx.Node, Slot]] = field(default_factory=list)
    frozen: list[Slot] = field(default_factory=list)
    copies: list[Slot] = field(default_factory=list)
    consumers: list[Slot] = field(default_factory=list)

    @property
    def own(self) -> list[Slot]:
        """The parameters that make up a neuron, trainable or not."""
        return [*(slot for _, slot in self.theta), *self.frozen]


@dataclass(frozen=True)
class _Refusal:
    """Why the neurons in ``slots`` cannot be split; ``weak``: perhaps they are not neurons."""

    slots: list[Slot]
    reason: str
    weak: bool


def _collect(analysis: Analysis, model: nn.Module) -> tuple[list[Unit], list[Skipped]]:
    carried = _carried(analysis)
    units: list[Unit] = []
    refusals: list[_Refusal] = []
    for axis, parts in _parts_by_axis(analysis, model).items():
        if not parts.own or not (axis in carried or (axis.blocks and axis.size > 1)):
            continue
        found = _make_unit(analysis, axis, parts)
        if isinstance(found, Unit):
            units.append(found)
        else:
            weak = any(reason.position for reason in axis.blocks)
            refusals.append(_Refusal(parts.own, found, weak))
    named = _with_names(units)
    refusals.sort(key=lambda refusal: refusal.weak)  # the better reason comes first
    return named, _skipped(named, refusals)


def _carried(analysis: Analysis) -> set[Axis]:
    """The axes that some activation has: the others are inside of parameters."""
    return {
        axis
        for node in analysis.graph.nodes
        if node not in analysis.weights
        for dims in analysis.results(node)
        for layout in dims
        for axis in leaves(layout)
    }


def _parts_by_axis(analysis: Analysis, model: nn.Module) -> dict[Axis, _Parts]:
    """For each axis the tensors that meet it, in order of execution."""
    tensors = named_tensors(model)
    order = {node: i for i, node in enumerate(_by_use(analysis.graph))}
    found: dict[Axis, _Parts] = {}
    for node in order:
        name = analysis.graph.tensors[node]
        for dim, layout in enumerate(analysis.dims[node]):
            for axis in dict.fromkeys(leaves(layout)):
                if axis in repeated((layout,)) or not axis.size:  # (where it came from is blocked)
                    continue
                slot = Slot(name, dim, _positions(layout, axis))
                parts = found.setdefault(axis, _Parts())
                if (node, dim) in analysis.consumed:
                    parts.consumers.append(slot)
                elif node in analysis.affine or not isinstance(tensors[name], nn.Parameter):
                    parts.copies.append(slot)
                elif not tensors[name].requires_grad:
                    parts.frozen.append(slot)
                else:
                    parts.theta.append((node, slot))
    return dict(
        sorted(found.items(), key=lambda item: min((order[n] for n, _ in item[1].theta), default=0))
    )


def _by_use(graph: Graph) -> list[fx.Node]:
    """Parameters and buffers in the order in which the forward pass first uses them."""
    order: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used in graph.tensors:
                order.setdefault(used)
    return list(order)


def _positions(layout: Layout, axis: Axis) -> Tensor:
    """The entries of a dimension that belong to each value of the axis, (axis.size, m)."""
    belongs = owners(layout, axis)
    order = np.argsort(belongs, kind="stable")[int((belongs < 0).sum()) :]
    return torch.from_numpy(order.reshape(axis.size, -1))


def _make_unit(analysis: Analysis, axis: Axis, parts: _Parts) -> Unit | str:
    """A unit, named after its first parameter, or the reason why there is none."""
    if axis.blocks:
        return str(min(axis.blocks, key=lambda reason: reason.position))
    if not parts.theta:
        return "its parameters are frozen (requires_grad=False)"
    theta = tuple(slot for _, slot in parts.theta)
    if len({slot.name for slot in theta}) < len(theta):
        return "two dimensions of one parameter carry the same neurons"
    subgraph = trace_subgraph(analysis, axis, tuple(node for node, _ in parts.theta))
    if isinstance(subgraph, str):
        return subgraph
    shapes = {name: analysis.shape(node) for node, name in analysis.graph.tensors.items()}
    each = [prod(shapes[s.name]) // shapes[s.name][s.dim] * s.positions.shape[1] for s in theta]
    return Unit(
        name=theta[0].name,
        width=axis.size,
        theta=theta,
        copies=(*parts.frozen, *parts.copies),
        consumers=tuple(parts.consumers),
        sizes=tuple(each),
        axis=axis,
        subgraph=subgraph,
    )


# ---- names -----------------------------------------------------------------------------------


def _path(tensor: str) -> str:
    """The module that a tensor belongs to, or its own name at the root of the model."""
    return tensor.rpartition(".")[0] or tensor


def _range(slot: Slot) -> str:
    flat = slot.positions.reshape(-1)
    return f"[{int(flat.min())}:{int(flat.max()) + 1}]"


def _with_names(units: list[Unit]) -> list[Unit]:
    """Units named as shortly as tells them apart.

    ``block``: the module of the first parameter. ``block.w1`` where several units begin in one
    module, ``block[8:16]`` where they begin in one parameter, ``block[0:16:4]`` where they share
    its entries, as heads and the channels of a head do (neuron 0 has every fourth entry).
    """
    levels: list[Callable[[Slot], str]] = [
        lambda slot: _path(slot.name),
        lambda slot: slot.name,
        lambda slot: _path(slot.name) + _range(slot),
        lambda slot: slot.name + _range(slot),
        lambda slot: f"{slot.name}{_range(slot)[:-1]}:{_stride(slot)}]",
    ]
    firsts = [unit.theta[0] for unit in units]
    named = [""] * len(units)
    for name in levels:
        counts = Counter(map(name, firsts))
        named = [old or (name(s) if counts[name(s)] == 1 else "")
                 for old, s in zip(named, firsts, strict=True)]  # fmt: skip
    named = [
        name or f"{slot.name}#{i}" for i, (name, slot) in enumerate(zip(named, firsts, strict=True))
    ]
    return [replace(unit, name=name) for unit, name in zip(units, named, strict=True)]


def _stride(slot: Slot) -> int:
    """The distance between a neuron's first two entries."""
    first = slot.positions[0].tolist()
    return first[1] - first[0] if len(first) > 1 else 1


def _skipped(units: list[Unit], refusals: list[_Refusal]) -> list[Skipped]:
    """A line for each module, parameter or part of one whose neurons are in no unit."""
    covered: dict[tuple[str, int], set[int]] = {}
    for unit in units:
        for slot in unit.theta:
            entries = covered.setdefault((slot.name, slot.dim), set())
            entries.update(slot.positions.reshape(-1).tolist())
    found: dict[str, str] = {}
    for refusal in refusals:
        for slot in refusal.slots:
            name = _name_skipped(slot, covered, weak=refusal.weak)
            if name is not None:
                found.setdefault(name, _short(refusal.reason, _path(slot.name)))
    return [Skipped(name, reason) for name, reason in found.items()]


def _name_skipped(
    slot: Slot, covered: dict[tuple[str, int], set[int]], *, weak: bool
) -> str | None:
    """What to call neurons that cannot be split; None: another line tells of them already."""
    path = _path(slot.name)
    if path not in {_path(name) for name, _ in covered}:
        return path
    if weak:
        return None
    if (slot.name, slot.dim) in covered:  # other neurons of this parameter are in a unit
        entries = set(slot.positions.reshape(-1).tolist())
        return path + _range(slot) if entries.isdisjoint(covered[slot.name, slot.dim]) else None
    return slot.name if slot.name not in {name for name, _ in covered} else None


def _short(reason: str, path: str) -> str:
    """A reason without the place where that is the skipped module itself."""
    place, _, cause = reason.partition(": ")
    return cause if place.split(" (")[0] == path else reason


__all__ = ["Skipped", "Slot", "Unit", "Units", "find_units", "named_tensors"]
