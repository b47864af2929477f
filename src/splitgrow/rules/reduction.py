"""Sums, means and norms: over positions they carry the unit, over the unit they end it."""

from __future__ import annotations

from torch import fx

from splitgrow.layout import ONE, Dims, Layout
from splitgrow.rules.registry import Op, Trait, find_rule, normalise_dims, rule

_HOMOGENEOUS = Trait.LINEAR | Trait.HOMOGENEOUS


def _reduce(op: Op, dims: list[int]) -> Dims:
    data = op.dims(op.inputs[0])
    if op.arguments.get("keepdim"):
        return tuple(ONE if i in dims else layout for i, layout in enumerate(data))
    return tuple(layout for i, layout in enumerate(data) if i not in dims)


@rule("mean", traits=_HOMOGENEOUS)
def mean(op: Op) -> Dims:
    """Carried past other dimensions; over the unit itself the width would enter the result."""
    data = op.dims(op.inputs[0])
    dims = normalise_dims(op.arguments.get("dim"), len(data))
    op.block([data[d] for d in dims], "is averaged over, so the result depends on the width")
    return _reduce(op, dims)


@rule("sum", traits=_HOMOGENEOUS)
def summation(op: Op) -> Dims:
    """Carried past other dimensions; over the unit itself it ends a weighted sum ``(w * x)``."""
    data = op.dims(op.inputs[0])
    dims = normalise_dims(op.arguments.get("dim"), len(data))
    for dim in dims:
        _weighted_sum(op, data, dim)
    return _reduce(op, dims)


def _weighted_sum(op: Op, data: Dims, dim: int) -> None:
    """A sum over ``dim`` of a product with a parameter is a contraction with that parameter."""
    product = _product_behind(op.inputs[0])
    operands = [n for n in product.all_input_nodes if n in op.analysis.dims] if product else []
    weights = [n for n in operands if op.analysis.is_weight(n)]
    if product is None or len(operands) != 2 or len(weights) != 1:
        op.block(data[dim], "is summed over without a parameter that weighs each neuron")
        return
    (weight,) = weights
    (values,) = (n for n in operands if n is not weight)
    columns = _aligned(op.dims(weight), dim - len(data))
    if columns is None:
        op.block(data[dim], "is summed over without a parameter that weighs each neuron")
    else:
        op.analysis.consume(product, values, weight, columns)


def _product_behind(node: fx.Node) -> fx.Node | None:
    """The multiplication that made a tensor, looking through plain copies."""
    while node.op == "call_function" and len(node.users) == 1:
        found = find_rule(node)
        if found is not None and found.name == "aten::mul":
            return node
        if found is None or found.propagate.__name__ != "copy":
            return None
        node = node.all_input_nodes[0]
    return None


def _aligned(dims: Dims, dim: int) -> Layout | None:
    """The layout that broadcasting puts at negative dimension ``dim``."""
    return dims[dim] if -dim <= len(dims) and dims[dim] is not ONE else None


@rule("var", "std", "amax", "amin", "logsumexp", "prod", "linalg_vector_norm", "norm", "all",
      "any", "argmax", "argmin")  # fmt: skip
def reduction(op: Op) -> Dims:
    """Any other reduction: carried past the other dimensions."""
    data = op.dims(op.inputs[0])
    dims = normalise_dims(op.arguments.get("dim"), len(data))
    op.block([data[d] for d in dims], f"is reduced over by {op.name}")
    return _reduce(op, dims)


@rule("max", "min", "var_mean", "std_mean")
def reduction_with_more(op: Op) -> Dims | list[Dims]:
    """A reduction with a second result, such as the place of the maximum."""
    if op.arguments.get("dim") is None and op.shape == ():
        op.block(list(op.dims(op.inputs[0])), f"is reduced over by {op.name}")
        return ()
    out = reduction(op)
    return [out, out]


@rule("cdist")
def cdist(op: Op) -> Dims:
    """Distances between rows: the rows of both sides are carried (a prototype is a neuron)."""
    left, right = op.dims("x1"), op.dims("x2")
    op.block(left[-1], "is measured by a distance")
    op.block(right[-1], "is measured by a distance")
    batch = max((left[:-2], right[:-2]), key=len)
    return (*batch, left[-2], right[-2])
