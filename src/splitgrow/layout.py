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

from collections import Counter
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
    position: bool = False  # a place in an image, a batch or the input: not a neuron anyway

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

ONE = Prod(())  # a dimension of size 1 that carries nothing
EMPTY = Cat(())  # a dimension of size 0

PINNED = Block("", "meets a dimension of size 1 that stays so, and cannot grow past it")


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
    return _prod(resolve(each) for each in layout.factors)


def _cat(parts: Iterator[Layout]) -> Layout:
    flat: list[Layout] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Cat) else (part,))
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


def _prod(factors: Iterator[Layout]) -> Layout:
    flat: list[Layout] = []
    for each in factors:
        flat.extend(each.factors if isinstance(each, Prod) else (each,))
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
    return prod(size_of(each, widths) for each in layout.factors)


def leaves(layout: Layout) -> list[Axis]:
    """The unbound axes of a layout, in order."""
    layout = resolve(layout)
    if isinstance(layout, Axis):
        return [layout]
    children = layout.parts if isinstance(layout, Cat) else layout.factors
    return [axis for child in children for axis in leaves(child)]


def repeated(dims: Sequence[Layout]) -> set[Axis]:
    """Axes that index one tensor twice, as in an outer product of a unit with itself."""
    degrees = _degrees(resolve(Prod(tuple(dims))))
    return {axis for axis, degree in degrees.items() if degree > 1}


def _degrees(layout: Layout) -> Counter[Axis]:
    """How many times an axis occurs in the index of one entry, at most."""
    if isinstance(layout, Axis):
        return Counter({layout: 1})
    found: Counter[Axis] = Counter()
    if isinstance(layout, Cat):  # an entry lies in one of the blocks
        for part in layout.parts:
            found |= _degrees(part)
    else:
        for each in layout.factors:
            found += _degrees(each)
    return found


def is_one(layout: Layout) -> bool:
    """A dimension that stays of size 1 however the units grow."""
    layout = resolve(layout)
    return isinstance(layout, Prod) and not layout.factors


def block(layout: Layout, reason: Block) -> None:
    """No axis of the layout can be split, for this reason (the first one given counts)."""
    for axis in leaves(layout):
        axis.blocks.append(reason)


def is_position(layout: Layout) -> bool:
    """Are all indices in the layout positions, and none of them neurons?"""
    return all(any(reason.position for reason in axis.blocks) for axis in leaves(layout))


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
    if is_one(a) or is_one(b):  # a width of 1 is kept apart, so that it can say why it stays
        block(Cat((a, b)), PINNED)
    elif isinstance(a, Axis):
        _bind(a, b)
    elif isinstance(b, Axis):
        _bind(b, a)
    elif isinstance(a, Prod) and isinstance(b, Prod):
        _unify_aligned(list(a.factors), list(b.factors), factor)
    else:
        _refuse_shift(a, b)
        _unify_aligned(_parts(a), _parts(b), cut)


def _parts(layout: Layout) -> list[Layout]:
    return list(layout.parts) if isinstance(layout, Cat) else [layout]


def _refuse_shift(a: Layout, b: Layout) -> None:
    """An axis beside itself, moved by less than its size, would come apart entry by entry."""
    there = _offsets(b)
    for part, start in _offsets(a).items():
        if part in there and 0 < abs(there[part] - start) < part.size:
            raise MismatchError


def _offsets(layout: Layout) -> dict[Axis, int]:
    """Where the blocks begin that are plain axes."""
    found: dict[Axis, int] = {}
    start = 0
    for part in _parts(layout):
        if isinstance(part, Axis):
            found.setdefault(part, start)
        start += size_of(part)
    return found


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
    if not 0 < at < size_of(layout):
        return _cut_at_end(layout, at)
    if isinstance(layout, Axis):
        first, rest = Axis(at), Axis(layout.size - at)
        _bind(layout, Cat((first, rest)))
        return first, rest
    if isinstance(layout, Cat):
        return _cut_parts(layout.parts, at)
    head, *tail = layout.factors
    inner = size_of(Prod(tuple(tail)))
    if at % inner:
        raise MismatchError
    before, after = cut(head, at // inner)
    return Prod((before, *tail)), Prod((after, *tail))


def _cut_at_end(layout: Layout, at: int) -> tuple[Layout, Layout]:
    if at == 0:
        return EMPTY, layout
    if at == size_of(layout):
        return layout, EMPTY
    raise MismatchError


def _cut_parts(parts: tuple[Layout, ...], at: int) -> tuple[Layout, Layout]:
    for i, part in enumerate(parts):
        if at < size_of(part):
            first, rest = cut(part, at)
            return Cat((*parts[:i], first)), Cat((rest, *parts[i + 1 :]))
        at -= size_of(part)
    raise MismatchError


def factor(layout: Layout, outer: int) -> tuple[Layout, Layout]:
    """A layout as a row-major product, ``outer`` entries times the rest."""
    layout = resolve(layout)
    if outer <= 1 or size_of(layout) % outer:
        raise MismatchError
    if size_of(layout) == outer:
        return layout, ONE
    if isinstance(layout, Axis):
        first, rest = Axis(outer), Axis(layout.size // outer)
        _bind(layout, Prod((first, rest)))
        return first, rest
    if isinstance(layout, Cat):
        return _factor_parts(layout.parts, size_of(layout) // outer)
    return _factor_product(layout.factors, outer)


def _factor_parts(parts: tuple[Layout, ...], inner: int) -> tuple[Layout, Layout]:
    """Blocks whose inner index, of ``inner`` values, is one and the same."""
    firsts: list[Layout] = []
    rests: list[Layout] = []
    for part in parts:
        first: Layout = ONE
        rest = part
        if size_of(part) != inner:
            first, rest = factor(part, size_of(part) // inner)
        if size_of(rest) != inner:
            raise MismatchError
        firsts.append(first)
        rests.append(rest)
    for rest in rests[1:]:
        unify(rests[0], rest)
    return Cat(tuple(firsts)), rests[0]


def _factor_product(factors: tuple[Layout, ...], outer: int) -> tuple[Layout, Layout]:
    head, *tail = factors
    if outer == size_of(head):
        return head, Prod(tuple(tail))
    if outer % size_of(head) == 0:
        first, rest = factor(Prod(tuple(tail)), outer // size_of(head))
        return Prod((head, first)), rest
    first, rest = factor(head, outer)
    return first, Prod((rest, *tail))


def regroup(dims: Sequence[Layout], sizes: Sequence[int]) -> list[Layout]:
    """The layouts after a row-major reshape of ``dims`` to ``sizes``."""
    factors = [f for dim in dims for f in _factors(resolve(dim))]
    if 0 in (size_of(Prod(tuple(factors))), prod(sizes)):
        raise MismatchError
    out: list[Layout] = []
    for index, size in enumerate(sizes):
        last = index + 1 == len(sizes)
        taken = _take(factors, size, greedy=last)
        out.append(resolve(Prod(tuple(taken))))
    if factors:
        raise MismatchError
    return out


def _take(factors: list[Layout], size: int, *, greedy: bool) -> list[Layout]:
    """Factors off the front of a list, ``size`` entries in all.

    A width of 1 that follows belongs to the next dimension, if there is one.
    """
    taken: list[Layout] = []
    while factors and (size > 1 or size_of(factors[0]) == 1):
        front = factors.pop(0)
        if size % size_of(front):
            front, rest = factor(front, size)
            factors.insert(0, rest)
        taken.append(front)
        size //= size_of(front)
        if size == 1 and not greedy:
            break
    if size != 1:
        raise MismatchError
    return taken


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
        none = np.empty(0, dtype=np.int64)
        return np.concatenate([none, *(spread(part, values, fill) for part in layout.parts)])
    out = np.full(1, fill)
    for each in layout.factors:
        inner = spread(each, values, fill)
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
        offset, pieces = 0, [np.empty(0, dtype=np.int64)]
        for part in layout.parts:
            pieces.append(sources(part, grown) + offset)
            offset += size_of(part)
        return np.concatenate(pieces)
    out = np.zeros(1, dtype=np.int64)
    for each in layout.factors:
        out = (out[:, None] * size_of(each) + sources(each, grown)[None, :]).reshape(-1)
    return out
