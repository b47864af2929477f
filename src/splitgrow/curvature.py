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
from splitgrow.execute import name_of


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
        s = (self.beta * x).sigmoid_()
        return torch.addcmul(s, s, s, value=-1).mul_(self.beta)


Kinks = list[tuple[Any, Any]]  # (place, jump of the slope)


def _hardtanh(low: float = -1.0, high: float = 1.0) -> Kinks:
    return [(low, 1.0), (high, -1.0)]


def _clamp(low: float | None = None, high: float | None = None) -> Kinks:
    return [(t, j) for t, j in ((low, 1.0), (high, -1.0)) if isinstance(t, int | float)]


def _shrink(lambd: float = 0.5) -> Kinks:
    return [(-lambd, -1.0), (lambd, 1.0)]


# Operation -> its kinks, from its arguments after the first.
KINKS: dict[str, Callable[..., Kinks]] = {
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
    "aten::threshold": lambda at, _: [(at, 1.0)],
    "aten::hardshrink": _shrink,
    "aten::softshrink": _shrink,
    "aten::hardsigmoid": lambda: [(-3.0, 1 / 6), (3.0, -1 / 6)],
    "aten::hardswish": lambda: [(-3.0, -0.5), (3.0, -0.5)],
    "aten::abs": lambda: [(0.0, 2.0)],
    "aten::elu": lambda alpha=1.0, scale=1.0, input_scale=1.0: [
        (0.0, scale * (1.0 - alpha * input_scale))
    ],
    "aten::selu": lambda: [(0.0, 1.0507009873554805 * (1.0 - 1.6732632423543772))],
}
# Between its kinks each of them is linear, but for these.
CURVED_BETWEEN = {
    "aten::hardswish", "aten::prelu", "aten::_prelu_kernel", "aten::elu", "aten::selu",
}  # fmt: skip


def kinks_of(node: fx.Node, args: tuple[Any, ...]) -> Kinks:
    """The kinks of a node's operation at its argument values; none if it is smooth."""
    found = KINKS.get(name_of(node))
    if found is None:
        return []
    rest = [_slope_like(a, args[0]) if isinstance(a, Tensor) else a for a in args[1:]]
    renamed = {"min": "low", "max": "high", "min_val": "low", "max_val": "high",
               "negative_slope": "slope"}  # fmt: skip
    return found(*rest, **{renamed.get(k, k): v for k, v in node.kwargs.items()})


def kink_curvature(x: Tensor, kinks: Kinks, stand_in: Softplus | None) -> Tensor | None:
    """The curvature that the stand-in puts at ``x``, or None where there are no kinks."""
    if stand_in is None or not kinks:
        return None
    terms = [stand_in(x - place if place else x).mul_(jump) for place, jump in kinks]
    for term in terms[1:]:
        terms[0].add_(term)
    return terms[0]


def _slope_like(slope: Tensor, x: Tensor) -> Tensor:
    """PReLU's slopes, shaped to broadcast against channels in dimension 1."""
    if slope.ndim == 1 and x.ndim > 1 and slope.numel() > 1:
        slope = slope.reshape(-1, *(1,) * (x.ndim - 2))
    return slope.detach()


@dataclass(frozen=True)
class Jet:
    """A pointwise function of x at one point: value, slope and curvature (None: no curvature)."""

    value: Tensor
    slope: Tensor
    curvature: Tensor | None

    def then(self, value: Tensor, slope: Tensor, curvature: Tensor | None) -> Jet:
        """Followed by a function with this value, slope and curvature: the chain rule."""
        bent = None
        if curvature is not None:
            bent = curvature.mul_(self.slope * self.slope)
        if self.curvature is not None:
            carried = self.curvature * slope
            bent = carried if bent is None else bent.add_(carried)
        return Jet(value, slope * self.slope, bent)


def apply_to_jet(
    node: fx.Node, function: Callable[..., Tensor], args: tuple[Any, ...], jet: Jet,
    stand_in: Softplus | None,
) -> Jet:  # fmt: skip
    """A unary pointwise operation applied to a jet; ``args`` are the node's own."""
    kinks = kinks_of(node, args)
    with torch.enable_grad():
        at = jet.value.detach().requires_grad_()
        value = function(*[at if a is jet.value else a for a in args])
        flat = bool(kinks) and name_of(node) not in CURVED_BETWEEN
        (slope,) = torch.autograd.grad(value, at, torch.ones_like(value), create_graph=not flat)
        curved = None
        if slope.requires_grad:
            ones = torch.ones_like(value)
            (curved,) = torch.autograd.grad(slope, at, ones, allow_unused=True)
    added = kink_curvature(at.detach(), kinks, stand_in)
    if curved is not None and added is not None:
        curved = curved + added
    return jet.then(value.detach(), slope.detach(), added if curved is None else curved.clone())


class Bend:
    """Slope and curvature of a pointwise function at x; each is let go when it has been used."""

    def __init__(self, x: Tensor, slope: Tensor, curvature: Tensor) -> None:
        self.x: Tensor | None = x
        self.slope: Tensor | None = slope
        self.curvature: Tensor | None = curvature


class Quadratic(Function):
    """A pointwise function known by its value, slope and curvature at one point.

    Its gradient can be built once (``create_graph``) and then differentiated any number of times,
    in one or two multiplications each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, bend: Bend) -> Tensor:
        ctx.bend = bend
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        bend: Bend = ctx.bend
        if not torch.is_grad_enabled():
            assert bend.slope is not None
            return grad * bend.slope, None, None
        return _Slope.apply(grad, bend.x, bend), None, None


class _Slope(Function):
    """grad * f'(x), whose derivatives are f'(x) by grad and grad * f''(x) by x."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, bend: Bend) -> Tensor:
        assert bend.curvature is not None
        assert bend.slope is not None
        ctx.save_for_backward(bend.curvature.mul_(grad))  # from now on the product is all we need
        ctx.bend = bend
        bend.curvature = bend.x = None
        moved = grad * bend.slope
        if not grad.requires_grad:  # the last function before an edge: its slope has done its work
            bend.slope = None
        return moved

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (bent,) = ctx.saved_tensors
        by_grad = outer * ctx.bend.slope if ctx.needs_input_grad[0] else None
        return by_grad, outer * bent, None
