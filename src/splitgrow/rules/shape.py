"""Reshapes, slices and concatenations: the same entries, indexed anew."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from splitgrow.capture import shape_of
from splitgrow.layout import (
    ONE,
    Axis,
    Cat,
    Dims,
    Layout,
    MismatchError,
    Prod,
    cut,
    is_one,
    is_position,
    position,
    regroup,
    size_of,
)
from splitgrow.rules.registry import Op, Trait, normalise_dims, rule

_MOVES = Trait.LINEAR | Trait.HOMOGENEOUS
_CUTS = _MOVES | Trait.CUTS


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as",
      "_reshape_alias", traits=_MOVES)  # fmt: skip
def view(op: Op) -> Dims:
    """Row-major regrouping: dimensions become products of indices, or are taken apart again."""
    dims = op.dims(op.inputs[0])
    try:
        return tuple(regroup(dims, op.shape))
    except MismatchError:
        op.block(list(dims), "is reshaped across the boundaries of the channels")
        return op.fresh()


@rule("permute", traits=_MOVES)
def permute(op: Op) -> Dims:
    """Dimensions in another order."""
    dims = op.dims("self")
    return tuple(dims[d] for d in normalise_dims(op["dims"], len(dims)))


@rule("transpose", "swapaxes", "swapdims", traits=_MOVES)
def transpose(op: Op) -> Dims:
    """Two dimensions exchanged."""
    dims = list(op.dims("self"))
    names = ("dim0", "dim1") if "dim0" in op.arguments else ("axis0", "axis1")
    a, b = (op[name] % len(dims) for name in names)
    dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


@rule("numpy_T", traits=_MOVES)
def reverse(op: Op) -> Dims:
    """All dimensions in reverse order."""
    return op.dims("self")[::-1]


@rule("t", "mT", "mH", "matrix_H", "adjoint", traits=_MOVES)
def matrix_transpose(op: Op) -> Dims:
    """The last two dimensions exchanged."""
    dims = op.dims("self")
    return dims if len(dims) < 2 else (*dims[:-2], dims[-1], dims[-2])


@rule("movedim", "moveaxis", traits=_MOVES)
def movedim(op: Op) -> Dims:
    """Some dimensions moved, the others in their order."""
    dims = op.dims("self")
    source = normalise_dims(op["source"], len(dims))
    target = normalise_dims(op["destination"], len(dims))
    rest = iter([d for d in range(len(dims)) if d not in source])
    moved = dict(zip(target, source, strict=True))
    return tuple(dims[moved[i] if i in moved else next(rest)] for i in range(len(dims)))


@rule("unsqueeze", traits=_MOVES)
def unsqueeze(op: Op) -> Dims:
    """A dimension of size 1 is put in; it stays of size 1."""
    dims = list(op.dims("self"))
    dims.insert(op["dim"] % (len(dims) + 1), ONE)
    return tuple(dims)


@rule("squeeze", traits=_MOVES)
def squeeze(op: Op) -> Dims:
    """Dimensions of size 1 are dropped, so nothing that was carried there can grow."""
    dims = op.dims("self")
    asked = normalise_dims(op.arguments.get("dim"), len(dims))
    dropped = [d for d in asked if size_of(dims[d]) == 1]
    op.block([dims[d] for d in dropped], "is squeezed away, which only a width of 1 allows")
    return tuple(layout for d, layout in enumerate(dims) if d not in dropped)


@rule("expand", "expand_as", "broadcast_to", traits=_MOVES)
def expand(op: Op) -> Dims:
    """Dimensions of size 1 are repeated; the copies grow with whatever they meet."""
    return tuple(_expanded(op, layout, size) for layout, size in _padded(op))


def _padded(op: Op) -> Iterator[tuple[Layout, int]]:
    """Each dimension, with new ones in front, and its size in the result."""
    dims = op.dims(op.inputs[0])
    padded: Dims = (*(ONE,) * (len(op.shape) - len(dims)), *dims)
    return zip(padded, op.shape, strict=True)


def _expanded(op: Op, layout: Layout, size: int) -> Layout:
    if size_of(layout) == size:
        return layout
    op.block(layout, "is expanded, which only a width of 1 allows")
    return Axis(size)


@rule("repeat", "tile", traits=_MOVES)
def repeat(op: Op) -> Dims:
    """The entries of a dimension several times over: a neuron has an entry in each."""
    return tuple(
        _expanded(op, layout, size)
        if is_one(layout)
        else Prod((position(size // size_of(layout)), layout))
        for layout, size in _padded(op)
    )


@rule("repeat_interleave", traits=_MOVES)
def repeat_interleave(op: Op) -> Dims:
    """Each entry of a dimension several times."""
    dims = list(op.dims(op.inputs[0]))
    dim, times = op.arguments.get("dim"), op.arguments.get("repeats")
    if not isinstance(dim, int) or not isinstance(times, int):
        op.block(dims, "is repeated as a tensor says")
        return op.fresh()
    dims[dim] = Prod((dims[dim], position(times)))
    return tuple(dims)


@rule("slice", traits=_CUTS)
def slice_(op: Op) -> Dims:
    """A range of entries; a unit that is cut becomes two."""
    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    size, kept = size_of(dims[dim]), op.shape[dim]
    if op["step"] != 1:
        op.block(dims[dim], f"has every {op['step']}th entry picked out")
        dims[dim] = position(kept)
    elif kept < size:
        start = 0 if op["start"] is None else op.number("start")
        dims[dim] = _range(op, dims[dim], max(start + size if start < 0 else start, 0), kept)
    return tuple(dims)


@rule("narrow", traits=_CUTS)
def narrow(op: Op) -> Dims:
    """A range of entries."""
    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    dims[dim] = _range(op, dims[dim], op.number("start") % size_of(dims[dim]), op.shape[dim])
    return tuple(dims)


def _range(op: Op, layout: Layout, start: int, length: int) -> Layout:
    if is_position(layout):
        return position(length)
    try:
        return cut(cut(layout, start)[1], length)[0]
    except MismatchError:
        op.block(layout, "is cut across the boundaries of the channels")
        return position(length)


@rule("select", traits=_MOVES)
def select(op: Op) -> Dims:
    """One entry of a dimension; nothing of that dimension is carried."""
    dims = op.dims("self")
    dim = op["dim"] % len(dims)
    op.block(dims[dim], "has one entry picked out by number")
    return tuple(layout for d, layout in enumerate(dims) if d != dim)


@rule("split", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split", traits=_CUTS)
def split(op: Op) -> list[Dims]:
    """Equal parts (``chunk`` too): entry i of every part belongs to one neuron."""
    dims = list(op.dims("self"))
    dim, lengths = _pieces(op)
    if len(set(lengths)) > 1:
        op.block(dims[dim], "is cut into parts whose sizes are computed from its width")
    if len(set(lengths)) > 1 or is_position(dims[dim]):
        return _cut_into(op, dims, dim, lengths)
    part = Axis(lengths[0])
    op.unify(dims[dim], Prod((position(len(lengths)), part)))
    return [(*dims[:dim], part, *dims[dim + 1 :])] * len(lengths)


@rule("split_with_sizes", "unsafe_split_with_sizes", traits=_CUTS)
def split_with_sizes(op: Op) -> list[Dims]:
    """Consecutive ranges; a unit that is cut becomes several."""
    dim, lengths = _pieces(op)
    return _cut_into(op, list(op.dims("self")), dim, lengths)


def _pieces(op: Op) -> tuple[int, list[int]]:
    """The dimension that is cut, and the sizes of the pieces."""
    dim = op["dim"] % len(op.dims("self"))
    return dim, [shape_of(value)[dim] for value in op.node.meta["val"]]


def _cut_into(op: Op, dims: list[Layout], dim: int, lengths: list[int]) -> list[Dims]:
    pieces = []
    start = 0
    for length in lengths:
        pieces.append(_range(op, dims[dim], start, length))
        start += length
    return [(*dims[:dim], piece, *dims[dim + 1 :]) for piece in pieces]


@rule("unbind", traits=_MOVES)
def unbind(op: Op) -> list[Dims]:
    """Entries of one dimension taken apart; the others are carried."""
    dims = op.dims("self")
    dim = op["dim"] % len(dims)
    op.block(dims[dim], "is taken apart by number")
    rest = tuple(layout for d, layout in enumerate(dims) if d != dim)
    return [rest] * size_of(dims[dim])


@rule("cat", "concat", "concatenate", "hstack", "vstack", "dstack", traits=_MOVES)
def cat(op: Op) -> Dims:
    """Blocks one after the other: each keeps its own unit."""
    pieces = [op.dims(node) for node in op["tensors"] if op.analysis.shape(node) != (0,)]
    dim = _cat_dim(op, len(pieces[0]))
    if any(len(piece) != len(op.shape) for piece in pieces):  # vstack of vectors
        op.block([layout for piece in pieces for layout in piece], f"is stacked by {op.name}")
        return op.fresh()
    out = _aligned(op, pieces, dim)
    out[dim] = Cat(tuple(piece[dim] for piece in pieces))
    return tuple(out)


def _cat_dim(op: Op, rank: int) -> int:
    """The dimension along which tensors are put together."""
    if "dim" in op.arguments:
        return op["dim"] % rank
    return {"aten.hstack": min(1, rank - 1), "aten.vstack": 0, "aten.dstack": 2}[op.name]


def _aligned(op: Op, pieces: list[Dims], but: int | None = None) -> list[Layout]:
    """The dimensions of tensors of one shape, unified; dimension ``but`` is left alone."""
    out = list(pieces[0])
    for piece in pieces[1:]:
        for d, layout in enumerate(piece):
            if d != but:
                out[d] = op.unify(out[d], layout)
    return out


@rule("stack", traits=_MOVES)
def stack(op: Op) -> Dims:
    """A new dimension of positions; the others are one and the same."""
    pieces = [op.dims(node) for node in op["tensors"]]
    out = _aligned(op, pieces)
    out.insert(op["dim"] % (len(out) + 1), position(len(pieces)))
    return tuple(out)


@rule("pixel_shuffle", traits=_MOVES)
def pixel_shuffle(op: Op) -> Dims:
    """Channels (c, r, r) become c channels of r times as many rows and columns."""
    *batch, channels, height, width = op.dims("self")
    factor = op["upscale_factor"]
    kept = Axis(size_of(channels) // factor**2)
    op.block([height, width], "is shuffled")
    op.unify(channels, Prod((kept, position(factor), position(factor))))
    return (*batch, kept, *op.fresh(op.shape[-2:]))


@rule("pixel_unshuffle", traits=_MOVES)
def pixel_unshuffle(op: Op) -> Dims:
    """Channels c become (c, r, r), with r times fewer rows and columns."""
    *batch, channels, height, width = op.dims("self")
    factor = op["downscale_factor"]
    op.block([height, width], "is shuffled")
    out = Prod((channels, position(factor), position(factor)))
    return (*batch, out, *op.fresh(op.shape[-2:]))


@rule("unfold", traits=_MOVES)
def unfold(op: Op) -> Dims:
    """Windows along one dimension of positions, as a new last dimension."""
    dims = list(op.dims("self"))
    dim = op["dimension"] % len(dims)
    op.block(dims[dim], "is cut into windows")
    dims[dim] = position(op.shape[dim])
    return (*dims, position(op.shape[-1]))


@rule("channel_shuffle", "native_channel_shuffle", traits=_MOVES)
def channel_shuffle(op: Op) -> Dims:
    """Channels (groups, c) become (c, groups): entry i of every group belongs to one neuron."""
    batch, channels, *places = op.dims("self")
    groups = position(op["groups"])
    kept = Axis(size_of(channels) // op["groups"])
    op.unify(channels, Prod((groups, kept)))
    return (batch, Prod((kept, groups)), *places)


@rule("flip", "roll", traits=_MOVES)
def flip(op: Op) -> Dims:
    """Entries in another order within some dimensions."""
    dims = op.dims("self")
    for d in normalise_dims(op["dims"], len(dims)):
        op.block(dims[d], "has its entries put in another order")
    return dims


@rule("getitem", traits=Trait.CUTS)
def getitem(op: Op) -> Dims:
    """One of several results."""
    source, index = op.node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    return op.analysis.several[source][index]
