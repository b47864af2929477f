"""Activations as the splitting matrix sees them: value, slope and curvature.

S needs second derivatives. ReLU and its relatives have none away from their kinks, so a smooth
stand-in supplies the curvature there: a kink at t where the slope jumps by j contributes
j * softplus_beta''(x - t). Values and slopes stay those of the model's own activation; nothing in
the forward pass changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from splitgrow.errors import InputError


@dataclass(frozen=True)
class Softplus:
    """The stand-in of softplus with sharpness ``beta``: a kink is as wide as about 4 / beta.

    Its curvature beta * s * (1 - s), s = sigmoid(beta x), integrates to 1 like that of a kink.
    """

    beta: float = 3.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise InputError(f"stand_in: beta must be positive, got {self.beta}.")

    def __call__(self, x: Tensor) -> Tensor:
        """softplus_beta''(x), the smoothed derivative of a unit step."""
        s = torch.sigmoid(self.beta * x)
        return self.beta * s * (1 - s)


Kinks = Callable[..., list[tuple[float, Any]]]


def _hardtanh(low: float = -1.0, high: float = 1.0) -> list[tuple[float, Any]]:
    return [(low, 1.0), (high, -1.0)]


def _clamp(low: float | None = None, high: float | None = None) -> list[tuple[float, Any]]:
    return [(t, j) for t, j in ((low, 1.0), (high, -1.0)) if isinstance(t, int | float)]


def _shrink(lambd: float = 0.5) -> list[tuple[float, Any]]:
    return [(-lambd, -1.0), (lambd, 1.0)]


# Operation -> the kinks (place, jump of the slope), from its arguments after the first.
KINKS: dict[str, Kinks] = {
    "aten::relu": lambda: [(0.0, 1.0)],
    "aten::relu6": lambda: [(0.0, 1.0), (6.0, -1.0)],
    "aten::leaky_relu": lambda slope=0.01: [(0.0, 1.0 - slope)],
    "aten::rrelu": lambda low=0.125, high=1 / 3, *_: [(0.0, 1.0 - (low + high) / 2)],
    "aten::prelu": lambda slope: [(0.0, 1.0 - slope)],
    "aten::_prelu_kernel": lambda slope: [(0.0, 1.0 - slope)],
    "aten::hardtanh": _hardtanh,
    "aten::clamp": _clamp,
    "aten::clamp_min": lambda low: _clamp(low),
    "aten::clamp_max": lambda high: _clamp(None, high),
    "aten::threshold": lambda at, value: [(at, 1.0)],
    "aten::hardshrink": _shrink,
    "aten::softshrink": _shrink,
    "aten::hardsigmoid": lambda: [(-3.0, 1 / 6), (3.0, -1 / 6)],
    "aten::hardswish": lambda: [(-3.0, -0.5), (3.0, -0.5)],
    "aten::abs": lambda: [(0.0, 2.0)],
}


def kink_curvature(node: fx.Node, args: tuple[Any, ...], stand_in: Softplus | None) -> Any:
    """The curvature that the stand-in adds at ``args[0]``, or None where there is no kink."""
    schema = getattr(node.target, "_schema", None)
    kinks = KINKS.get(schema.name) if schema is not None else None
    if kinks is None or stand_in is None:
        return None
    x = args[0]
    rest = [_slope_like(a, x) if isinstance(a, Tensor) else a for a in args[1:]]
    kwargs = {k: v for k, v in node.kwargs.items() if not isinstance(v, fx.Node)}
    found = kinks(*rest, **{{"min": "low", "max": "high"}.get(k, k): v for k, v in kwargs.items()})
    total = torch.zeros_like(x)
    for place, jump in found:
        total = total + jump * stand_in(x - place)
    return total


def _slope_like(slope: Tensor, x: Tensor) -> Tensor:
    """PReLU's slopes, shaped to broadcast against channels in dimension 1."""
    if slope.ndim == 1 and x.ndim > 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *(1,) * (x.ndim - 2))
    return slope.detach()


class Quadratic(Function):
    """A pointwise function known by its value y, slope d and curvature c at one point.

    All that a second derivative at that point needs, in two multiplications per pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, d: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(x, d, c)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, d, c = ctx.saved_tensors
        return _Slope.apply(grad, x, d, c), None, None, None


class _Slope(Function):
    """grad * f'(x), whose derivatives are f'(x) by grad and grad * f''(x) by x."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, d: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(grad * c, d)
        return grad * d

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        bent, d = ctx.saved_tensors
        return outer * d, outer * bent, None, None


def bend(y: Tensor, curvature: Tensor) -> Callable[[Tensor], Tensor]:
    """Add curvature to a value without changing it or its slope."""
    zeros = torch.zeros_like(curvature)
    return lambda x: y + Quadratic.apply(x, zeros, zeros, curvature)
