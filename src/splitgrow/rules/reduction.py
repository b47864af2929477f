"""Sums, means and norms: over positions they carry the unit, over the unit they end it."""

from __future__ import annotations

from torch import fx

from splitgrow.layout import ONE, Dims, Layout, leaves
from splitgrow.rules.registry import Op, Trait, find_rule, normalise_dims, operands, rule

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
    op.block([data[d] for d in dims], "is averaged over, so the result would depend on the width")
    return _reduce(op, dims)


@rule("sum", traits=_HOMOGENEOUS)
def summation(op: Op) -> Dims:
    """Carried past other dimensions; over the unit itself it ends a weighted sum ``(w * x)``."""
    data = op.dims(op.inputs[0])
    dims = normalise_dims(op.arguments.get("dim"), len(data))
    for dim in dims:
        _weighted_sum(op, data[dim], dim - len(data))
    return _reduce(op, dims)


def _weighted_sum(op: Op, summed: Layout, dim: int) -> None:
    """A sum over ``dim`` of a product with a parameter is a contraction with that parameter."""
    product = _product_behind(op.inputs[0])
    factors = [n for n in operands(product) if n in op.analysis.dims] if product else []
    weights = [n for n in factors if op.analysis.is_weight(n)]
    if product is not None and len(factors) == 2 and len(weights) == 1:
        (values,) = (n for n in factors if n is not weights[0])
        columns = _aligned(op.dims(weights[0]), dim)
        if columns is not None and leaves(columns) == leaves(summed):
            op.analysis.consume(product, values, weights[0], columns)
            return
    op.block(summed, "is summed over without a parameter that weighs each neuron")


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
    return dims[dim] if -dim <= len(dims) else None


@rule("var", "std", "amax", "amin", "logsumexp", "prod", "linalg_vector_norm", "norm", "all",
      "any", "argmax", "argmin", "frobenius_norm", "count_nonzero", "nansum",
      "nanmean")  # fmt: skip
def reduction(op: Op) -> Dims:
    """Any other reduction: carried past the other dimensions."""
    data = op.dims(op.inputs[0])
    dims = normalise_dims(op.arguments.get("dim"), len(data))
    op.block([data[d] for d in dims], f"is reduced over by {op.name}")
    return _reduce(op, dims)


@rule("max", "min", "var_mean", "std_mean", "median", "nanmedian", "mode", "aminmax")
def reduction_with_more(op: Op) -> Dims | list[Dims]:
    """A reduction with a second result, such as the place of the maximum; or the larger of two."""
    if op.is_tensor("other"):
        return op.broadcast_dims(op.dims("self"), op.dims("other"))
    out = reduction(op)
    return [out, out] if isinstance(op.node.meta["val"], list | tuple) else out
