"""Linear layers, matrix products and convolutions: where units begin and end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce

from torch import fx

from splitgrow.layout import Axis, Dims, Layout, Prod, position, size_of
from splitgrow.rules.registry import Op, Trait, normalise_dims, rule


@rule("linear", traits=Trait.PRODUCT)
def linear(op: Op) -> Dims:
    """Contract the last dimension with the weight's columns; its rows carry on."""
    *rest, inner = op.dims("input")
    *rows, columns = op.dims("weight")
    op.contract(op["input"], inner, op["weight"], columns)
    if op.is_tensor("bias"):
        for row, bias in zip(rows, op.dims("bias"), strict=True):
            op.unify(bias, row)
    op.count(*rest, inner, *rows)
    return (*rest, *rows)


@rule("matmul", "mm", "bmm", "mv", "dot", traits=Trait.PRODUCT)
def matmul(op: Op) -> Dims:
    """Contract the inner dimensions; one side must be a parameter for the units to end there."""
    left, right = op.operands
    return _matmul(op, left, right)


@rule("addmm", "baddbmm", traits=Trait.PRODUCT)
def addmm(op: Op) -> Dims:
    """A matrix product with a term added."""
    names = ("mat1", "mat2") if "mat1" in op.arguments else ("batch1", "batch2")
    return op.broadcast_dims(_matmul(op, op[names[0]], op[names[1]]), op.dims("self"))


def _matmul(op: Op, left: fx.Node, right: fx.Node) -> Dims:
    a, b = op.dims(left), op.dims(right)
    if left is right:
        op.block([*a, *b], "is multiplied with itself")
        return op.fresh()
    columns = b[0] if len(b) == 1 else b[-2]
    op.contract(left, a[-1], right, columns)
    rows: Dims = (a[-2],) if len(a) > 1 else ()
    out: Dims = (b[-1],) if len(b) > 1 else ()
    batch = op.broadcast_dims(a[:-2], b[:-2])
    op.count(*batch, *rows, *out, columns)
    return (*batch, *rows, *out)


# ---- products by named indices ---------------------------------------------------------------


@rule("einsum", traits=Trait.PRODUCT)
def einsum(op: Op) -> Dims:
    """Letters are indices: equal letters are one index, missing ones are contracted."""
    nodes: list[fx.Node] = list(op["tensors"])
    terms, result = parse_equation(op["equation"], [len(op.dims(node)) for node in nodes])
    return _multiply(op, nodes, terms, result)


@rule("tensordot", traits=Trait.PRODUCT)
def tensordot(op: Op) -> Dims:
    """Contract some dimensions of one tensor with as many of another."""
    left, right = ([(side, d) for d in range(len(op.dims(side)))] for side in ("self", "other"))
    pairs = zip(
        normalise_dims(op["dims_self"], len(left)),
        normalise_dims(op["dims_other"], len(right)),
        strict=True,
    )
    for mine, theirs in pairs:
        right[theirs] = left[mine]
    kept = [i for i in left if i not in right] + [i for i in right if i not in left]
    return _multiply(op, [op["self"], op["other"]], [left, right], kept)


@rule("inner", traits=Trait.PRODUCT)
def inner(op: Op) -> Dims:
    """Contract the last dimensions of two tensors."""
    left, right = ([(side, d) for d in range(len(op.dims(side)))] for side in ("self", "other"))
    right[-1] = left[-1]
    return _multiply(op, [op["self"], op["other"]], [left, right], left[:-1] + right[:-1])


@rule("outer", "ger", traits=Trait.PRODUCT)
def outer(op: Op) -> Dims:
    """Every entry of one vector times every entry of another: both indices carry on."""
    other = "vec2" if "vec2" in op.arguments else "other"
    return (*op.dims("self"), *op.dims(other))


@rule("bilinear", traits=Trait.PRODUCT)
def bilinear(op: Op) -> Dims:
    """Contract two tensors with one weight; its rows carry on."""
    batch = [("batch", d) for d in range(len(op.shape) - 1)]
    nodes = [op["input1"], op["input2"], op["weight"]]
    terms: list[list[Index]] = [[*batch, "i"], [*batch, "j"], ["o", "i", "j"]]
    *rest, rows = _multiply(op, nodes, terms, [*batch, "o"])
    if op.is_tensor("bias"):
        op.unify(op.dims("bias")[0], rows)
    return (*rest, rows)


Index = Hashable


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[list[Index]], list[Index]]:
    """The index names of each operand and of the result; ``...`` becomes one name a dimension."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_expand(t, rank) for t, rank in zip(left.split(","), ranks, strict=True)]
    dots = max((len([i for i in term if isinstance(i, int)]) for term in terms), default=0)
    if arrow:
        return terms, _expand(right, len(right.replace("...", "")) + dots * ("..." in right))
    listed = [letter for letter in left if letter.isalpha()]
    once = sorted(letter for letter in set(listed) if listed.count(letter) == 1)
    return terms, [*range(-dots, 0), *once]


def _expand(term: str, rank: int) -> list[Index]:
    """Letters, with the dimensions that ``...`` stands for numbered from the last."""
    before, dots, after = term.partition("...")
    count = rank - len(before) - len(after)
    return [*before, *(range(-count, 0) if dots else ()), *after]


def _multiply(
    op: Op, nodes: list[fx.Node], terms: Sequence[Sequence[Index]], result: Sequence[Index]
) -> Dims:
    """Multiply tensors whose dimensions have names, and sum over those not in ``result``."""
    uses: dict[Index, list[tuple[fx.Node, Layout]]] = {}
    for term, node in zip(terms, nodes, strict=True):
        for index, layout in zip(term, op.dims(node), strict=True):
            uses.setdefault(index, []).append((node, layout))
    if len(set(nodes)) < len(nodes):
        op.block([layout for node in nodes for layout in op.dims(node)], "multiplies itself")
        return op.fresh()
    merged = {index: _merge(op, used, kept=index in result) for index, used in uses.items()}
    op.count(*merged.values())
    return tuple(merged[index] for index in result)


def _merge(op: Op, uses: list[tuple[fx.Node, Layout]], *, kept: bool) -> Layout:
    nodes, layouts = zip(*uses, strict=True)
    if len(set(nodes)) < len(nodes):
        op.block(list(layouts), "is a diagonal in einsum")
    elif kept:
        return reduce(op.broadcast, layouts)
    elif len(uses) == 2:
        op.contract(nodes[0], layouts[0], nodes[1], layouts[1])
    else:
        op.block(list(layouts), f"is summed over in {op.name} without one weight for each neuron")
    return layouts[0]


# ---- convolutions ----------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d", "convolution", traits=Trait.PRODUCT)
def convolution(op: Op) -> Dims:
    """Input channels are contracted, output channels carry on; depthwise: channels carry on."""
    if op.arguments.get("transposed"):
        return transposed_convolution(op)
    weight = op.dims("weight")
    places = len(weight) - 2
    *batch, channels = op.dims("input")[:-places]
    op.block(list(op.dims("input")[-places:]), "is convolved over")
    out = _convolve(op, channels, weight[0], weight[1])
    result = (*batch, out, *op.fresh(op.shape[-places:]))
    op.count(*result, weight[1], *weight[2:])
    return result


def _convolve(op: Op, channels: Layout, rows: Layout, columns: Layout) -> Layout:
    groups = op["groups"]
    if op.is_tensor("bias"):
        op.unify(op.dims("bias")[0], rows)
    if groups == 1:
        op.contract(op["input"], channels, op["weight"], columns)
    elif groups == size_of(channels):
        multiplier = size_of(rows) // groups
        op.unify(rows, channels if multiplier == 1 else Prod((channels, position(multiplier))))
    else:
        op.block([channels, rows], _grouped(groups))
    return rows


def _grouped(groups: int) -> str:
    return (
        f"a grouped convolution (groups={groups}) mixes the channels of one group, so its neurons "
        "cannot be split one by one; groups=1 or one group per channel can"
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", traits=Trait.PRODUCT)
def transposed_convolution(op: Op) -> Dims:
    """As a convolution, with the weight's first two dimensions exchanged."""
    weight = op.dims("weight")
    places = len(weight) - 2
    *batch, channels = op.dims("input")[:-places]
    op.block(list(op.dims("input")[-places:]), "is convolved over")
    rows, columns, groups = weight[1], weight[0], op["groups"]
    if groups == 1:
        op.contract(op["input"], channels, op["weight"], columns)
        out = rows
    elif groups == size_of(channels):
        op.unify(columns, channels)
        op.block(rows, "is the multiplier of a depthwise convolution")
        out = channels if size_of(rows) == 1 else Prod((channels, rows))
    else:
        op.unify(columns, channels)
        out = Axis(op.shape[len(batch)])
        op.block([out, channels, rows], _grouped(groups))
    if op.is_tensor("bias"):
        op.unify(op.dims("bias")[0], out)
    result = (*batch, out, *op.fresh(op.shape[-places:]))
    op.count(*op.dims("input"), rows, *weight[2:])
    return result


@rule("embedding", traits=Trait.LINEAR | Trait.HOMOGENEOUS)
def embedding(op: Op) -> Dims:
    """Rows of a table: its columns carry on."""
    rows, columns = op.dims("weight")
    op.block(rows, "is looked up by number")
    return (*op.dims("indices"), columns)
