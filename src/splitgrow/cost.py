"""Parameters and multiply-accumulates as functions of the units' widths.

Convention: one MAC is one multiplication and addition in a linear layer, matrix product,
einsum or convolution, for one sample. Everything else (biases, normalisation, activations,
pooling) counts 0. FLOPs in ``torch.utils.flop_counter`` are twice this number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from splitgrow.layout import Axis, Layout, leaves, size_of
from splitgrow.units import Unit, Units


@dataclass(frozen=True)
class Cost:
    """Parameters and multiply-accumulates per sample."""

    params: int
    macs: int

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.params - other.params, self.macs - other.macs)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs)


class CostModel:
    """The cost of a model as its units grow."""

    def __init__(self, units: Units) -> None:
        self._batch = units.graph.batch
        self._tensors = [units.layouts[name] for name in units.graph.parameters]
        self._macs = [factors for _, factors in units.analysis.macs]
        self._touched: dict[Axis, tuple[list[int], list[int]]] = {}
        for unit in units:
            self._touched[unit.axis] = (
                [i for i, dims in enumerate(self._tensors) if _mentions(dims, unit.axis)],
                [i for i, factors in enumerate(self._macs) if _mentions(factors, unit.axis)],
            )

    def total(self, widths: Mapping[Axis, int] | None = None) -> Cost:
        """The cost of the traced part of the model with these widths."""
        return self._sum(range(len(self._tensors)), range(len(self._macs)), widths or {})

    def added(self, unit: Unit, widths: Mapping[Axis, int], count: int = 1) -> Cost:
        """What ``count`` more neurons of a unit cost, given the widths of all units."""
        before = widths.get(unit.axis, unit.width)
        touched = self._touched[unit.axis]
        after = {**widths, unit.axis: before + count}
        return self._sum(*touched, after) - self._sum(*touched, widths)

    def _sum(self, tensors: Iterable[int], macs: Iterable[int], widths: Mapping[Axis, int]) -> Cost:
        params = sum(prod(size_of(d, widths) for d in self._tensors[i]) for i in tensors)
        ops = sum(prod(_size(f, widths) for f in self._macs[i]) for i in macs)
        return Cost(params, ops // self._batch)


def _size(factor: Layout | int, widths: Mapping[Axis, int]) -> int:
    return factor if isinstance(factor, int) else size_of(factor, widths)


def _mentions(layouts: tuple[Layout | int, ...], axis: Axis) -> bool:
    return any(axis in leaves(d) for d in layouts if not isinstance(d, int))
