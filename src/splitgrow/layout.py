"""Which neuron does entry ``i`` of a tensor dimension belong to?

Every dimension of every tensor in the traced graph has a *layout*: a tree that says how its
entries are indexed.

- an :class:`Axis` is one index, for example the channels of a convolution;
- a :class:`Prod` is several indices in row-major order, as ``flatten`` makes them;
- a :class:`Cat` is several blocks one after the other, as ``cat`` makes them.

Rules state that two layouts index the same thing (:func:`unify`). An axis that turns out to be a
product or a concatenation of finer axes is *bound* to that tree, and everything that mentions it
is refined at once, much as type variables are in type inference. When the whole graph has been
read, the axes that remain are the candidates for units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Block:
    """Why an axis cannot be split: the place, and the cause in the user's terms."""

    place: str
    cause: str
    position: bool = False  # a position in an image or a batch: not a neuron to begin with

    def __str__(self) -> str:
        return f"{self.place}: {self.cause}" if self.place else self.cause


@dataclass(eq=False)
class Axis:
    """One index with ``size`` values; a variable that may get bound to a finer layout."""

    size: int
    blocks: list[Block] = field(default_factory=list)
    binding: Layout | None = None

    def __repr__(self) -> str:
        return f"Axis({self.size}, {id(self) % 9973})"


@dataclass(frozen=True, eq=False)
class Prod:
    """Row-major product of layouts; the empty product is a dimension of size 1 without index."""

    factors: tuple[Layout, ...]


@dataclass(frozen=True, eq=False)
class Cat:
    """Blocks of entries, one after the other."""

    parts: tuple[Layout, ...]


Layout = Axis | Prod | Cat
Dims = tuple[Layout, ...]

ONE = Prod(())


class MismatchError(Exception):
    """Two layouts that index the same entries in incompatible ways."""


def position(size: int) -> Layout:
    """A dimension of places (pixels, time steps, samples), never of neurons."""
    return ONE if size == 1 else Axis(size, [Block("", "a position, not a neuron", position=True)])


def resolve(layout: Layout) -> Layout:
    """Follow bindings; nested products and concatenations are flattened to a normal form."""
    if isinstance(layout, Axis):
        return layout if layout.binding is None else resolve(layout.binding)
    if isinstance(layout, Cat):
        return _cat(resolve(part) for part in layout.parts)
    return _prod(resolve(factor) for factor in layout.factors)


def _cat(parts: Iterator[Layout]) -> Layout:
    flat: list[Layout] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Cat) else (part,))
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def _prod(factors: Iterator[Layout]) -> Layout:
    flat: list[Layout] = []
    for factor in factors:
        flat.extend(factor.factors if isinstance(factor, Prod) else (factor,))
    if len(flat) == 1:
        return flat[0]
    if flat and isinstance(flat[0], Cat):  # only a leading sum distributes over row-major order
        rest = flat[1:]
        return _cat(_prod(iter([part, *rest])) for part in flat[0].parts)
    return Prod(tuple(flat))


def size_of(layout: Layout, widths: Mapping[Axis, int] | None = None) -> int:
    """Number of entries, with the sizes of some axes replaced by ``widths``."""
    layout = resolve(layout)
    if isinstance(layout, Axis):
        return layout.size if widths is None else widths.get(layout, layout.size)
    if isinstance(layout, Cat):
        return sum(size_of(part, widths) for part in layout.parts)
    return prod(size_of(factor, widths) for factor in layout.factors)


def leaves(layout: Layout) -> list[Axis]:
    """The unbound axes of a layout, in order."""
    return raw_leaves(resolve(layout))


def raw_leaves(layout: Layout) -> list[Axis]:
    """The axes as they are written in a layout, bindings not followed."""
    if isinstance(layout, Axis):
        return [layout]
    children = layout.parts if isinstance(layout, Cat) else layout.factors
    return [axis for child in children for axis in raw_leaves(child)]


def chain(axis: Axis) -> set[Axis]:
    """An axis and every axis it was refined into, intermediate ones included."""
    found = {axis}
    if axis.binding is not None:
        for child in raw_leaves(axis.binding):
            found |= chain(child)
    return found


def is_one(layout: Layout) -> bool:
    """A dimension that stays of size 1 however the units grow."""
    layout = resolve(layout)
    return isinstance(layout, Prod) and not layout.factors


def block(layout: Layout, reason: Block) -> None:
    """No axis of the layout can be split, for this reason (the first one given counts)."""
    for axis in leaves(layout):
        axis.blocks.append(reason)


def _bind(axis: Axis, target: Layout) -> None:
    if axis in leaves(target):
        raise MismatchError
    for reason in axis.blocks:
        block(target, reason)
    axis.binding = target


def unify(a: Layout, b: Layout) -> None:
    """State that two layouts index the same entries in the same order."""
    a, b = resolve(a), resolve(b)
    if a is b:
        return
    if size_of(a) != size_of(b):
        raise MismatchError
    if isinstance(a, Axis):
        _bind(a, b)
    elif isinstance(b, Axis):
        _bind(b, a)
    elif isinstance(a, Prod) and isinstance(b, Prod):
        _unify_aligned(list(a.factors), list(b.factors), _factor)
    else:
        _unify_aligned(_parts(a), _parts(b), cut)


def _parts(layout: Layout) -> list[Layout]:
    return list(layout.parts) if isinstance(layout, Cat) else [layout]


def _unify_aligned(
    left: list[Layout],
    right: list[Layout],
    divide: Callable[[Layout, int], tuple[Layout, Layout]],
) -> None:
    """Walk two lists of pieces, dividing the larger piece wherever the sizes differ."""
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if size_of(x) == size_of(y):
            unify(x, y)
        elif size_of(x) < size_of(y):
            first, rest = divide(y, size_of(x))
            unify(x, first)
            right.insert(0, rest)
        else:
            first, rest = divide(x, size_of(y))
            unify(first, y)
            left.insert(0, rest)
    if left or right:
        raise MismatchError


def cut(layout: Layout, at: int) -> tuple[Layout, Layout]:
    """The first ``at`` entries of a layout, and the rest."""
    layout = resolve(layout)
    if isinstance(layout, Axis):
        first, rest = Axis(at), Axis(layout.size - at)
        _bind(layout, Cat((first, rest)))
        return first, rest
    if isinstance(layout, Prod):
        if not layout.factors:
            raise MismatchError
        head, *tail = layout.factors
        inner = size_of(Prod(tuple(tail)))
        if at % inner:
            raise MismatchError
        first, rest = cut(head, at // inner)
        return Prod((first, *tail)), Prod((rest, *tail))
    done = 0
    for i, part in enumerate(layout.parts):
        if done + size_of(part) == at:
            return Cat(layout.parts[: i + 1]), Cat(layout.parts[i + 1 :])
        if done + size_of(part) > at:
            first, rest = cut(part, at - done)
            return Cat((*layout.parts[:i], first)), Cat((rest, *layout.parts[i + 1 :]))
        done += size_of(part)
    raise MismatchError


def _factor(layout: Layout, outer: int) -> tuple[Layout, Layout]:
    """A layout as a product whose first factor has ``outer`` entries."""
    layout = resolve(layout)
    if not isinstance(layout, Axis) or outer <= 1 or layout.size % outer:
        raise MismatchError
    first, rest = Axis(outer), Axis(layout.size // outer)
    _bind(layout, Prod((first, rest)))
    return first, rest


def regroup(dims: Sequence[Layout], sizes: Sequence[int]) -> list[Layout]:
    """The layouts after a row-major reshape of ``dims`` to ``sizes``."""
    product = resolve(Prod(tuple(dims)))
    if isinstance(product, Cat):  # a leading concatenation was distributed: keep it whole
        factors = [f for dim in dims for f in _factors(resolve(dim))]
    else:
        factors = _factors(product)
    out: list[Layout] = []
    for index, size in enumerate(sizes):
        taken: list[Layout] = []
        need = size
        while factors and (need > 1 or size_of(factors[0]) == 1):
            factor = factors.pop(0)
            if need % size_of(factor):
                factor, rest = _factor(factor, need)
                factors.insert(0, rest)
            taken.append(factor)
            need //= size_of(factor)
            if need == 1 and index + 1 < len(sizes):
                break  # a width of 1 that follows belongs to the next dimension
        if need != 1:
            raise MismatchError
        out.append(resolve(Prod(tuple(taken))))
    if factors:
        raise MismatchError
    return out


def _factors(layout: Layout) -> list[Layout]:
    return list(layout.factors) if isinstance(layout, Prod) else [layout]


# ---- entries: what a layout says about concrete positions -----------------------------------


def owners(layout: Layout, axis: Axis) -> NDArray[np.int64]:
    """For each entry of the dimension, the value of ``axis`` there, or -1."""
    return spread(layout, {axis: np.arange(axis.size)}, fill=-1)


def spread(
    layout: Layout, values: Mapping[Axis, NDArray[np.int64]], fill: int
) -> NDArray[np.int64]:
    """Lay one number per value of an axis out over the entries of the dimension.

    An axis may have more (or fewer) values than its size: the layout grows with it.
    """
    layout = resolve(layout)
    if isinstance(layout, Axis):
        return values[layout] if layout in values else np.full(layout.size, fill)
    if isinstance(layout, Cat):
        return np.concatenate([spread(part, values, fill) for part in layout.parts])
    out = np.full(1, fill)
    for factor in layout.factors:
        inner = spread(factor, values, fill)
        out = np.maximum(np.repeat(out, len(inner)), np.tile(inner, len(out)))
    return out


def sources(layout: Layout, grown: Mapping[Axis, NDArray[np.int64]]) -> NDArray[np.int64]:
    """For each entry of the grown dimension, the old entry that it is a copy of.

    ``grown[axis]`` lists, for each new value of the axis, the old value it descends from.
    """
    layout = resolve(layout)
    if isinstance(layout, Axis):
        return grown[layout] if layout in grown else np.arange(layout.size)
    if isinstance(layout, Cat):
        offsets = np.cumsum([0, *(size_of(part) for part in layout.parts)])
        pieces = [sources(p, grown) + o for p, o in zip(layout.parts, offsets, strict=False)]
        return np.concatenate(pieces)
    out = np.zeros(1, dtype=np.int64)
    for factor in layout.factors:
        out = (out[:, None] * size_of(factor) + sources(factor, grown)[None, :]).reshape(-1)
    return out
