"""Parameters and multiply-accumulates as functions of the units' widths.

One MAC is one multiplication and addition in a linear layer, matrix product, einsum or
convolution, for one sample; padding counts as if it were data. Everything else (biases,
normalisation, activations, pooling, element-wise products) counts 0.

``torch.utils.flop_counter`` counts 2 FLOPs where this counts 1 MAC, with these differences: it
counts nothing for a matrix times a vector or for an einsum that it runs as element-wise products,
and an einsum of three operands as two products in the order it chooses, not as one sum over all
indices. Attention that runs as one fused operation is not counted here, and by torch only with
some of its kernels; nor are recurrent layers. No unit passes through either, so a split changes
their cost at most through the sizes of what they read, which are never split.
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
        # Of a parameter with two names, the graph reads one; of a parameter without use, none.
        read = {name for node, name in units.graph.tensors.items() if node.users}
        self._tensors = [units.layouts[name] for name in units.graph.parameters if name in read]
        self._macs = [factors for _, factors in units.analysis.macs]
        self._touched: dict[Axis, tuple[list[int], list[int]]] = {}
        for unit in units:
            self._touched[unit.axis] = (
                [i for i, dims in enumerate(self._tensors) if _mentions(dims, unit.axis)],
                [i for i, factors in enumerate(self._macs) if _mentions(factors, unit.axis)],
            )

    def total(self, widths: Mapping[Axis, int] | None = None) -> Cost:
        """The cost of what forward uses, with these widths; a shared parameter counts once."""
        return self._per_sample(
            self._sum(range(len(self._tensors)), range(len(self._macs)), widths or {})
        )

    def added(self, unit: Unit, widths: Mapping[Axis, int], count: int = 1) -> Cost:
        """What ``count`` more neurons of a unit cost, given the widths of all units."""
        before = widths.get(unit.axis, unit.width)
        touched = self._touched[unit.axis]
        after = {**widths, unit.axis: before + count}
        return self._per_sample(self._sum(*touched, after) - self._sum(*touched, widths))

    def _sum(self, tensors: Iterable[int], macs: Iterable[int], widths: Mapping[Axis, int]) -> Cost:
        """Parameters, and the MACs of the whole example batch."""
        params = sum(prod(size_of(d, widths) for d in self._tensors[i]) for i in tensors)
        ops = sum(prod(_size(f, widths) for f in self._macs[i]) for i in macs)
        return Cost(params, ops)

    def _per_sample(self, cost: Cost) -> Cost:
        return Cost(cost.params, -(-cost.macs // self._batch))  # rounded up: limits hold


def _size(factor: Layout | int, widths: Mapping[Axis, int]) -> int:
    return factor if isinstance(factor, int) else size_of(factor, widths)


def _mentions(layouts: tuple[Layout | int, ...], axis: Axis) -> bool:
    return any(axis in leaves(d) for d in layouts if not isinstance(d, int))
