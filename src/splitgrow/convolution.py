"""Convolution with derivatives that are convolutions themselves.

PyTorch differentiates a grouped convolution twice with a loop over its groups, which for a
depthwise layer is hundreds of times slower than the layer. The three maps below (forward, by the
input, by the weight) are bilinear and their derivatives are again these three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd import Function

aten = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """The constants of a convolution, and the three maps they define."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """y = x * w."""
        result: Tensor = aten.convolution(x, w, None, *self._rest)
        return result

    def by_input(self, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """The derivative of <y, x * w> by x (of x only the shape matters)."""
        if self._is_depthwise_on_cpu(x, w) and set(self.stride) == {1}:
            # The same with the mirrored filter, for which oneDNN takes as little as a third of the
            # time where images are small and many.
            places = range(2, w.ndim)
            reach = [d * (w.shape[i] - 1) for i, d in zip(places, self.dilation, strict=True)]
            around = tuple(r - p for r, p in zip(reach, self.padding, strict=True))
            if min(around) >= 0:
                return replace(self, padding=around).forward(y, w.flip(*places))
        return aten.convolution_backward(y, x, w, None, *self._rest, [True, False, False])[0]

    def by_weight(self, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """The derivative of <y, x * w> by w (of w only the shape matters)."""
        if self._is_depthwise_on_cpu(x, w) and (lacking := w.shape[2] - x.shape[2]) > 0:
            # Of images with fewer rows than the filter, oneDNN takes a hundred times as long.
            x = _with_rows(x, lacking)
            reach = self.dilation[0] * (w.shape[2] - 1) + 1
            rows = (x.shape[2] + 2 * self.padding[0] - reach) // self.stride[0] + 1
            y = _with_rows(y, rows - y.shape[2])
        return aten.convolution_backward(y, x, w, None, *self._rest, [False, True, False])[1]

    def _is_depthwise_on_cpu(self, x: Tensor, w: Tensor) -> bool:
        depthwise = self.groups == x.shape[1] == w.shape[0] and not self.transposed
        return depthwise and x.device.type == "cpu"

    @property
    def _rest(self) -> tuple[Any, ...]:
        return (self.stride, self.padding, self.dilation, self.transposed, self.output_padding,
                self.groups)  # fmt: skip


def _with_rows(images: Tensor, count: int) -> Tensor:
    """So many more rows of zeros."""
    return F.pad(images, (0, 0) * (images.ndim - 3) + (0, count))


class Convolve(Function):
    """y = x * w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry = geometry
        return geometry.forward(x, w)

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        by_x = _ByInput.apply(y, x, w, ctx.geometry) if ctx.needs_input_grad[0] else None
        by_w = _ByWeight.apply(y, x, w, ctx.geometry) if ctx.needs_input_grad[1] else None
        return by_x, by_w, None


class _ByInput(Function):
    """d<y, x * w>/dx, bilinear in y and w."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(y, w)
        ctx.geometry = geometry
        return geometry.by_input(y, x, w)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        y, w = ctx.saved_tensors
        geometry = ctx.geometry
        by_y = Convolve.apply(outer, w, geometry) if ctx.needs_input_grad[0] else None
        by_w = _ByWeight.apply(y, outer, w, geometry) if ctx.needs_input_grad[2] else None
        return by_y, None, by_w, None


class _ByWeight(Function):
    """d<y, x * w>/dw, bilinear in y and x."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(y, x)
        ctx.geometry = geometry
        return geometry.by_weight(y, x, w)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        y, x = ctx.saved_tensors
        geometry = ctx.geometry
        by_y = Convolve.apply(x, outer, geometry) if ctx.needs_input_grad[0] else None
        by_x = _ByInput.apply(y, x, outer, geometry) if ctx.needs_input_grad[1] else None
        return by_y, by_x, None, None


def as_convolution(node: fx.Node) -> Callable[..., Tensor] | None:
    """A twice differentiable form of a convolution node, called with the node's arguments."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::conv"):
        return None
    if schema.overload_name == "padding":  # padding="same", by name
        return None
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def run(*args: Any, **kwargs: Any) -> Tensor:
        given = defaults | dict(zip(names, args, strict=False)) | kwargs
        x, w, bias = given["input"], given["weight"], given.get("bias")
        places = w.ndim - 2
        geometry = Geometry(
            stride=_each(given["stride"], places),
            padding=_each(given["padding"], places),
            dilation=_each(given["dilation"], places),
            transposed=given.get("transposed", "transpose" in schema.name),
            output_padding=_each(given.get("output_padding", 0), places),
            groups=given["groups"],
        )
        batched = x if x.ndim == w.ndim else x.unsqueeze(0)
        y: Tensor = Convolve.apply(batched, w, geometry)
        if bias is not None:
            y = y + bias.reshape(-1, *(1,) * places)
        return y if x.ndim == w.ndim else y.squeeze(0)

    return run


def _each(value: Any, places: int) -> tuple[int, ...]:
    listed = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(listed if len(listed) == places else listed * places)
