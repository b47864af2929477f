"""Linear layers, matrix products and convolutions: where units begin and end."""

from __future__ import annotations

from torch import fx

from splitgrow.layout import Dims, Layout, Prod, position, size_of
from splitgrow.rules.registry import Op, Trait, rule


@rule("linear", traits=Trait.PRODUCT)
def linear(op: Op) -> Dims:
    """Contract the last dimension with the weight's columns; its rows carry on."""
    *rest, inner = op.dims("input")
    rows, *columns = op.dims("weight")
    op.contract(op["input"], inner, op["weight"], columns[0])
    if op.is_tensor("bias"):
        op.unify(rows, op.dims("bias")[0])
    op.count(*rest, inner, rows)
    return (*rest, rows)


@rule("matmul", "mm", "bmm", "mv", "dot", traits=Trait.PRODUCT)
def matmul(op: Op) -> Dims:
    """Contract the inner dimensions; one side must be a parameter for the units to end there."""
    left, right = op.inputs if len(op.inputs) == 2 else op.inputs * 2
    return _matmul(op, left, right)


@rule("addmm", "baddbmm", traits=Trait.PRODUCT)
def addmm(op: Op) -> Dims:
    """A matrix product with a term added."""
    names = ("mat1", "mat2") if "mat1" in op.arguments else ("batch1", "batch2")
    out = _matmul(op, op[names[0]], op[names[1]])
    added = op.dims("self")
    return (
        *out[: len(out) - len(added)],
        *(op.broadcast(a, b) for a, b in zip(out[len(out) - len(added) :], added, strict=True)),
    )


def _matmul(op: Op, left: fx.Node, right: fx.Node) -> Dims:
    a, b = op.dims(left), op.dims(right)
    if left is right:
        op.block([*a, *b], "is multiplied with itself")
        return op.fresh()
    columns = b[0] if len(b) == 1 else b[-2]
    op.contract(left, a[-1], right, columns)
    rows: Dims = (a[-2],) if len(a) > 1 else ()
    out: Dims = (b[-1],) if len(b) > 1 else ()
    batch = _broadcast_batch(op, a[:-2], b[:-2])
    op.count(*batch, *rows, *out, columns)
    return (*batch, *rows, *out)


def _broadcast_batch(op: Op, a: Dims, b: Dims) -> Dims:
    if len(a) < len(b):
        a, b = b, a
    extra = len(a) - len(b)
    return (*a[:extra], *(op.broadcast(x, y) for x, y in zip(a[extra:], b, strict=True)))


@rule("einsum", traits=Trait.PRODUCT)
def einsum(op: Op) -> Dims:
    """Letters are indices: equal letters are one index, missing ones are contracted."""
    equation = op["equation"].replace(" ", "")
    operands: list[fx.Node] = list(op["tensors"])
    if "..." in equation or "->" not in equation or len(set(operands)) < len(operands):
        for node in operands:
            op.block(list(op.dims(node)), f"enters einsum('{equation}'), which has no rule")
        return op.fresh()
    terms, result = equation.split("->")
    indices: dict[str, list[tuple[fx.Node, Layout]]] = {}
    for term, node in zip(terms.split(","), operands, strict=True):
        for letter, layout in zip(term, op.dims(node), strict=True):
            indices.setdefault(letter, []).append((node, layout))
    for letter, uses in indices.items():
        _einsum_index(op, letter in result, uses)
    op.count(*(uses[0][1] for uses in indices.values()))
    return tuple(indices[letter][0][1] for letter in result)


def _einsum_index(op: Op, kept: bool, uses: list[tuple[fx.Node, Layout]]) -> None:
    nodes = [node for node, _ in uses]
    if len(set(nodes)) < len(nodes):
        op.block([layout for _, layout in uses], "is a diagonal in einsum")
    elif kept:
        for _, layout in uses[1:]:
            op.broadcast(uses[0][1], layout)
    elif len(uses) == 2:
        (data, index), (weight, columns) = uses
        op.contract(data, index, weight, columns)
    else:
        op.block([layout for _, layout in uses], "is summed over in einsum without a weight")


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
        op.unify(rows, op.dims("bias")[0])
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
        "cannot be split one by one"
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
        out = channels if size_of(rows) == 1 else Prod((channels, rows))
    else:
        out = position(op.shape[len(batch)])
        op.block([channels, columns, rows], _grouped(groups))
    if op.is_tensor("bias"):
        op.unify(out, op.dims("bias")[0])
    result = (*batch, out, *op.fresh(op.shape[-places:]))
    op.count(*op.dims("input"), rows, *weight[2:])
    return result


@rule("embedding", traits=Trait.LINEAR | Trait.HOMOGENEOUS)
def embedding(op: Op) -> Dims:
    """Rows of a table: its columns carry on."""
    rows, columns = op.dims("weight")
    op.block(rows, "is looked up by number")
    return (*op.dims("indices"), columns)
