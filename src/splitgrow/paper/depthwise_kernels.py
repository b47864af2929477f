"""Depthwise convolutions, channels last, for training on a GPU.

PyTorch has two there. Its own, channels first, sums the gradient of a filter in one block of
threads: several milliseconds a step for a net of 16 channels. cuDNN's, channels last, is compiled
anew for every number of channels (https://github.com/NVIDIA/cudnn-frontend/issues/1066), and a net
that grows has ever new ones. Here the number of channels is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

PIXELS = 64  # in the tile of a program
PARTS = 64  # that the sum over all pixels is divided into


def have_kernels() -> bool:
    """Is Triton installed? It comes with PyTorch where that is built for CUDA."""
    return find_spec("triton") is not None


def depthwise_kernels() -> AbstractContextManager[Any]:
    """Within, PyTorch calls these kernels for depthwise convolutions of tensors on a GPU."""
    return _Mode() if have_kernels() else nullcontext()


def layout_for(net: nn.Module, device: torch.device) -> torch.memory_format:
    """Channels last: what a GPU's matrix units compute, and up to twice as fast on a CPU.

    Not for depthwise convolutions on a GPU without these kernels, where cuDNN would compile its own
    for every number of channels.
    """
    if device.type != "cuda" or have_kernels():
        return torch.channels_last
    return torch.contiguous_format if has_depthwise(net) else torch.channels_last


def has_depthwise(net: nn.Module) -> bool:
    """Has it any convolution of single channels, or of groups?"""
    return any(isinstance(m, nn.Conv2d) and m.groups > 1 for m in net.modules())


class _Mode(TorchFunctionMode):
    """Takes the place of every depthwise convolution that it knows how to compute."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Called for every function of PyTorch."""
        if func is torch.conv2d and (ours := _as_depthwise(*args, **(kwargs or {}))) is not None:
            return ours
        return func(*args, **(kwargs or {}))


def _as_depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    """The convolution, or None where it is not a plain depthwise one with square filters."""
    if not 1 < groups == x.shape[1] == len(weight) or bias is not None:
        return None
    step, pad, apart = (_only(given) for given in (stride, padding, dilation))
    if step is None or pad is None or apart != 1 or _only(weight.shape[2:]) is None:
        return None
    if x.ndim != 4 or not x.is_cuda:
        return None
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        x, weight = x.to(half), weight.to(half)
    result: Tensor = Depthwise.apply(x, weight, Geometry(step, pad))
    return result


def _only(values: Any) -> int | None:
    """The value of both dimensions, if they have the same."""
    listed = {*values} if isinstance(values, list | tuple) else {values}
    only = listed.pop()
    return only if not listed and isinstance(only, int) else None


@dataclass(frozen=True)
class Geometry:
    """The constants of a depthwise convolution, the same in both directions."""

    stride: int
    pad: int

    def sizes(self, x: Tensor, weight: Tensor) -> list[int]:
        """Height and width of the output."""
        side = weight.shape[-1]
        return [(size + 2 * self.pad - side) // self.stride + 1 for size in x.shape[2:]]


class Depthwise(Function):
    """(B, C, H, W) in channels last, with filters (C, 1, K, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        x, weight = _last(x), weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _filtered(x, weight, geometry.sizes(x, weight), geometry, transposed=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = _last(gradient)
        by_x = by_weight = None
        if ctx.needs_input_grad[0]:
            by_x = _filtered(gradient, weight, x.shape[2:], ctx.geometry, transposed=True)
        if ctx.needs_input_grad[1]:
            by_weight = _summed(gradient, x, weight, ctx.geometry)
        return by_x, by_weight, None


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _filtered(
    source: Tensor, weight: Tensor, sizes: Any, geometry: Geometry, *, transposed: bool
) -> Tensor:
    """Images of some sizes, each pixel from those of ``source`` around it."""
    from splitgrow.paper import depthwise_triton

    result = torch.empty(
        (*source.shape[:2], *sizes), dtype=source.dtype, device=source.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    tiles = _Tiles(result)
    depthwise_triton.filtered[tiles.pixels, tiles.channels](
        source, weight, result, *tiles.sizes(source), geometry.stride, geometry.pad,
        SIDE=weight.shape[-1], TRANSPOSED=transposed, **tiles.constants,
    )  # fmt: skip
    return result


def _summed(gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient of the filters."""
    from splitgrow.paper import depthwise_triton

    tiles, taps = _Tiles(gradient), weight[0].numel()
    parts = min(PARTS, tiles.pixels)
    sums = torch.empty(parts, taps, len(weight), device=x.device)
    depthwise_triton.summed[taps, parts, tiles.channels](
        gradient, x, sums, *tiles.sizes(x), geometry.stride, geometry.pad,
        SIDE=weight.shape[-1], **tiles.constants,
    )  # fmt: skip
    return sums.sum(0).T.reshape(weight.shape).to(weight.dtype)


class _Tiles:
    """How the pixels and channels of images are divided among programs."""

    def __init__(self, images: Tensor) -> None:
        count, channels, height, width = images.shape
        tile = 16 if channels <= 16 else 32 if channels <= 32 else 64
        block = 8 if channels % 8 == 0 else 1
        self.pixels = -(-count * height * width // PIXELS)
        self.channels = -(-channels // tile)
        self._sizes = (count * height * width, height, width)
        self._blocks = channels // block
        self.constants = {"BLOCK": block, "PIXELS": PIXELS, "CHANNELS": tile}

    def sizes(self, source: Tensor) -> tuple[int, ...]:
        """Numbers of pixels, of rows and columns here and in the source, and of channel blocks."""
        return (*self._sizes, *source.shape[2:], self._blocks)
