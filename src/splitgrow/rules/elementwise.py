"""Activations and arithmetic: every index is carried, each neuron on its own."""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from splitgrow.execute import REPLACED
from splitgrow.layout import ONE, Axis, Dims, MismatchError, cut, size_of
from splitgrow.rules.registry import Op, Trait, rule

# Written out, so that the table of supported operations is a list and not a guess. Some names
# appear only in other versions of PyTorch than the one at hand.
ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardtanh",
    "hardswish", "hardsigmoid", "sigmoid", "tanh", "softplus", "log_sigmoid", "softshrink",
    "hardshrink", "threshold", "rrelu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "log",
    "log2", "log10", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "abs", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sign", "clamp",
    "clamp_min", "clamp_max", "nan_to_num", "relu_", "logit", "sinc",
    "lgamma", "digamma", "frac", "special_expit", "special_ndtr", "special_log_ndtr",
    "log_sigmoid_forward", "rrelu_with_noise", "rrelu_with_noise_functional",
)  # fmt: skip

ARITHMETIC = (
    "pow", "float_power", "maximum", "minimum", "fmax", "fmin", "where", "atan2", "fmod",
    "remainder", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_xor", "logical_not", "logaddexp", "logaddexp2", "hypot", "lerp", "addcmul", "addcdiv",
    "masked_fill", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "floor", "ceil",
    "round", "trunc", "fix", "xlogy", "heaviside", "copysign", "isnan", "isinf", "isfinite",
    "signbit", "clip",
)  # fmt: skip

COPIES = (
    "clone", "contiguous", "alias", "lift_fresh_copy", "detach", "_to_copy", "dropout",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout", "type_as",
    "positive", "to",
)  # fmt: skip

FILLED = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor")


def _hardsigmoid(x: Tensor) -> Tensor:
    """``hardsigmoid`` with a second derivative, which PyTorch's own does not have."""
    return F.relu6(x + 3) / 6


REPLACED[torch.ops.aten.hardsigmoid.default] = _hardsigmoid


def _broadcast(op: Op) -> Dims:
    """The layouts of an element-wise result."""
    return reduce(op.broadcast_dims, map(op.dims, op.inputs), ())


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


@rule("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
      traits=Trait.CONSTANT)  # fmt: skip
def filled_like(op: Op) -> Dims:
    """A new tensor as large as another: it grows with it."""
    return op.dims(op.inputs[0])


@rule(*FILLED, traits=Trait.CONSTANT)
def filled(op: Op) -> Dims:
    """One value throughout: it grows with whatever it meets, if forward asks for the size."""
    return tuple(ONE if size == 1 else Axis(size) for size in op.shape)


@rule("prelu", "_prelu_kernel", traits=Trait.POINTWISE)
def prelu(op: Op) -> Dims:
    """One slope for all channels, or one for each, which then belongs to the neuron."""
    data, slopes = map(op.dims, op.operands)
    if len(slopes) != 1:  # _prelu_kernel has its slopes reshaped for broadcasting
        return op.broadcast_dims(data, slopes)
    channels = 1 if len(data) > 1 else 0
    return tuple(op.broadcast(x, slopes[0]) if d == channels else x for d, x in enumerate(data))


@rule("glu")
def glu(op: Op) -> Dims:
    """The two halves of a dimension gate each other, so they are one unit."""
    dims = list(op.dims("self"))
    dim = op["dim"] % len(dims)
    try:
        first, second = cut(dims[dim], size_of(dims[dim]) // 2)
    except MismatchError:
        op.block(dims[dim], "is gated across a boundary of the channels")
        return op.fresh()
    dims[dim] = op.unify(first, second)
    return tuple(dims)
