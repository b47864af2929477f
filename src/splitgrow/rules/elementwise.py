"""Activations and arithmetic: every index is carried, each neuron on its own."""

from __future__ import annotations

from itertools import zip_longest

from splitgrow.layout import ONE, Dims
from splitgrow.rules.registry import Op, Trait, rule

# Written out, so that the table of supported operations is a list and not a guess.
ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardtanh",
    "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "log_sigmoid", "softshrink",
    "hardshrink", "threshold", "rrelu", "erf", "erfc", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sign", "clamp", "clamp_min",
    "clamp_max", "nan_to_num", "relu_", "softsign", "tanhshrink", "logit", "sinc", "lgamma",
)  # fmt: skip

ARITHMETIC = (
    "pow", "maximum", "minimum", "where", "atan2", "fmod", "remainder", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_and", "logical_or", "logical_not", "logaddexp", "hypot", "lerp",
    "addcmul", "addcdiv", "masked_fill", "bitwise_and", "bitwise_or", "bitwise_not", "floor",
    "ceil", "round", "trunc", "xlogy", "heaviside",
)  # fmt: skip

COPIES = (
    "clone", "contiguous", "alias", "lift_fresh_copy", "detach", "_to_copy", "dropout",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "type_as",
    "positive", "to",
)  # fmt: skip


def _broadcast(op: Op) -> Dims:
    """The layouts of an element-wise result."""
    result: Dims = ()
    for node in op.inputs:
        pairs = zip_longest(reversed(result), reversed(op.dims(node)), fillvalue=ONE)
        result = tuple(reversed([op.broadcast(a, b) for a, b in pairs]))
    return result


@rule(*ACTIVATIONS, traits=Trait.POINTWISE)
def activation(op: Op) -> Dims:
    """An activation: every index is carried."""
    return _broadcast(op)


@rule(*ARITHMETIC, traits=Trait.POINTWISE)
def arithmetic(op: Op) -> Dims:
    """Element-wise arithmetic: equal indices of the operands are one index."""
    return _broadcast(op)


@rule("add", "sub", "rsub", traits=Trait.POINTWISE | Trait.LINEAR)
def addition(op: Op) -> Dims:
    """A sum: a residual stream's branches carry the same channels."""
    return _broadcast(op)


@rule("mul", traits=Trait.POINTWISE | Trait.PRODUCT)
def multiplication(op: Op) -> Dims:
    """A product: a gate and what it gates carry the same channels."""
    return _broadcast(op)


@rule("div", traits=Trait.POINTWISE)
def division(op: Op) -> Dims:
    """A quotient: equal indices of the operands are one index."""
    return _broadcast(op)


@rule(*COPIES, traits=Trait.POINTWISE | Trait.LINEAR | Trait.HOMOGENEOUS)
def copy(op: Op) -> Dims:
    """A copy of its input; dropout is one in eval mode."""
    return op.dims(op.inputs[0])


@rule("neg", traits=Trait.POINTWISE | Trait.LINEAR | Trait.HOMOGENEOUS)
def negation(op: Op) -> Dims:
    """The negative of its input."""
    return op.dims("self")


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
def filled_like(op: Op) -> Dims:
    """A new tensor as large as another: it grows with it."""
    return op.dims(op.inputs[0])


@rule("prelu", "_prelu_kernel", traits=Trait.POINTWISE)
def prelu(op: Op) -> Dims:
    """One slope for all channels, or one for each, which then belongs to the neuron."""
    data, slopes = (op.dims(node) for node in op.inputs)
    if len(slopes) == len(data):  # _prelu_kernel has its slopes reshaped for broadcasting
        return _broadcast(op)
    if op.analysis.shape(op.inputs[1]) == (1,):
        op.block(list(slopes), "is one slope for all channels")
    else:
        op.unify(data[1], slopes[0])
    return data


@rule("glu")
def glu(op: Op) -> Dims:
    """The two halves of a dimension gate each other, so they are one unit."""
    from splitgrow.layout import MismatchError, cut, size_of

    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    try:
        first, second = cut(dims[dim], size_of(dims[dim]) // 2)
    except MismatchError:
        op.block(dims[dim], "is gated across a boundary of the channels")
        return op.fresh()
    dims[dim] = op.unify(first, second)
    return tuple(dims)
