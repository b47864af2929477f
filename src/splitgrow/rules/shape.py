"""Reshapes, slices and concatenations: the same entries, indexed anew."""

from __future__ import annotations

from splitgrow.layout import ONE, Cat, Dims, Layout, MismatchError, cut, position, regroup, size_of
from splitgrow.rules.registry import Op, Trait, normalise_dims, rule

_MOVES = Trait.LINEAR | Trait.HOMOGENEOUS


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


@rule("t", "numpy_T", "mT", "adjoint", traits=_MOVES)
def matrix_transpose(op: Op) -> Dims:
    """The last two dimensions exchanged."""
    dims = op.dims("self")
    return dims if len(dims) < 2 else (*dims[:-2], dims[-1], dims[-2])


@rule("movedim", traits=_MOVES)
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
    """Dimensions of size 1 are repeated."""
    dims = op.dims(op.inputs[0])
    shape = op.shape
    added = len(shape) - len(dims)
    out: list[Layout] = [position(size) for size in shape[:added]]
    for layout, size in zip(dims, shape[added:], strict=True):
        if size_of(layout) == size:
            out.append(layout)
        else:
            op.block(layout, "is expanded, which only a width of 1 allows")
            out.append(position(size))
    return tuple(out)


@rule("repeat", "tile", "repeat_interleave", traits=_MOVES)
def repeat(op: Op) -> Dims:
    """Repeated dimensions become positions, the others are carried."""
    dims = op.dims(op.inputs[0])
    shape = op.shape
    if len(shape) < len(dims):
        op.block(list(dims), "is repeated")
        return op.fresh()
    padded: Dims = (*(ONE,) * (len(shape) - len(dims)), *dims)
    for layout, size in zip(padded, shape, strict=True):
        if size_of(layout) != size:
            op.block(layout, "is repeated")
    return tuple(
        layout if size_of(layout) == size else position(size)
        for layout, size in zip(padded, shape, strict=True)
    )


@rule("slice", traits=_MOVES)
def slice_(op: Op) -> Dims:
    """A range of entries; a unit that is cut becomes two."""
    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    size, kept = size_of(dims[dim]), op.shape[dim]
    if kept == size and op["step"] == 1:
        return tuple(dims)
    start = op["start"] if isinstance(op["start"], int) else 0
    start = max(start + size if start < 0 else start, 0)
    dims[dim] = _range(op, dims[dim], start, kept) if op["step"] == 1 else _picked(op, dims[dim])
    return tuple(dims)


def _range(op: Op, layout: Layout, start: int, length: int) -> Layout:
    try:
        rest = cut(layout, start)[1] if start else layout
        return cut(rest, length)[0] if length < size_of(rest) else rest
    except MismatchError:
        return _picked(op, layout, length)


def _picked(op: Op, layout: Layout, length: int | None = None) -> Layout:
    op.block(layout, "is cut across the boundaries of the channels")
    return position(op.shape[op["dim"]] if length is None else length)


@rule("narrow", traits=_MOVES)
def narrow(op: Op) -> Dims:
    """A range of entries."""
    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    dims[dim] = _range(op, dims[dim], op["start"], op.shape[dim])
    return tuple(dims)


@rule("select", traits=_MOVES)
def select(op: Op) -> Dims:
    """One entry of a dimension; nothing of that dimension is carried."""
    dims = op.dims("self")
    dim = op["dim"] % len(dims)
    op.block(dims[dim], "has one entry picked out by number")
    return tuple(layout for d, layout in enumerate(dims) if d != dim)


@rule("split", "split_with_sizes", "chunk", "tensor_split", traits=_MOVES)
def split(op: Op) -> list[Dims]:
    """Consecutive ranges; a unit that is cut becomes several."""
    from splitgrow.capture import shape_of

    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    rest = dims[dim]
    results: list[Dims] = []
    values = op.node.meta["val"]
    for i, value in enumerate(values):
        length = shape_of(value)[dim]
        if i + 1 == len(values):
            piece = rest
        else:
            try:
                piece, rest = cut(rest, length)
            except MismatchError:
                op.block(dims[dim], "is cut across the boundaries of the channels")
                return [op.fresh(shape_of(v)) for v in values]
        results.append((*dims[:dim], piece, *dims[dim + 1 :]))
    return results


@rule("unbind", traits=_MOVES)
def unbind(op: Op) -> list[Dims]:
    """Entries of one dimension taken apart; the others are carried."""
    dims = op.dims("self")
    dim = op["dim"] % len(dims)
    op.block(dims[dim], "is taken apart by number")
    rest = tuple(layout for d, layout in enumerate(dims) if d != dim)
    return [rest] * size_of(dims[dim])


@rule("cat", "concat", "concatenate", traits=_MOVES)
def cat(op: Op) -> Dims:
    """Blocks one after the other: each keeps its own unit."""
    pieces = [op.dims(node) for node in op["tensors"] if op.analysis.shape(node) != (0,)]
    dim = op["dim"] % len(pieces[0])
    out = list(pieces[0])
    for piece in pieces[1:]:
        out = [x if d == dim else op.unify(x, y) for d, (x, y) in enumerate(zip(out, piece, strict=True))]  # noqa: E501
    out[dim] = Cat(tuple(piece[dim] for piece in pieces))
    return tuple(out)


@rule("stack", traits=_MOVES)
def stack(op: Op) -> Dims:
    """A new dimension of positions; the others are one and the same."""
    pieces = [op.dims(node) for node in op["tensors"]]
    out = list(pieces[0])
    for piece in pieces[1:]:
        out = [op.unify(x, y) for x, y in zip(out, piece, strict=True)]
    dim = op["dim"] % (len(out) + 1)
    out.insert(dim, position(len(pieces)))
    return tuple(out)


@rule("pixel_shuffle", traits=_MOVES)
def pixel_shuffle(op: Op) -> Dims:
    """Channels (c, r, r) become c channels of r times as many rows and columns."""
    from splitgrow.layout import Axis, Prod

    *batch, channels, height, width = op.dims("self")
    factor = op["upscale_factor"]
    kept = Axis(size_of(channels) // factor**2)
    op.block([height, width], "is shuffled")
    op.unify(channels, Prod((kept, position(factor), position(factor))))
    return (*batch, kept, *op.fresh(op.shape[-2:]))


@rule("flip", "roll", traits=_MOVES)
def flip(op: Op) -> Dims:
    """Entries in another order within some dimensions."""
    dims = op.dims("self")
    for d in normalise_dims(op["dims"], len(dims)):
        op.block(dims[d], "has its entries put in another order")
    return dims


@rule("getitem")
def getitem(op: Op) -> Dims:
    """One of several results."""
    source, index = op.node.args
    several = op.analysis.several[source]
    return several[index]
