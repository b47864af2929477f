"""Batch norm and the ReLU behind it as one operation, channels last, for training on a GPU.

PyTorch's kernels take 40% of the time of a MobileNet there: images with few channels leave most of
the threads of a program idle, and the ReLU reads and writes everything once more. Forward and
backward pass read or write all of the images eight times here, and thirteen times there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from splitgrow.paper.depthwise_kernels import have_kernels

TILE = 2048  # numbers that a program has at a time
PARTS = 512  # that sums over all pixels are divided into; a power of 2
CHANNELS = 16  # of a program that adds up the parts


def join_norms(net: nn.Module) -> None:
    """Compute each batch norm with the ReLU that follows it in an ``nn.Sequential``, in place.

    For a net on a GPU; any other is left as it is.
    """
    if not have_kernels() or not _on_gpu(net):
        return
    for chain in [m for m in net.modules() if isinstance(m, nn.Sequential)]:
        for (_, norm), (name, act) in pairwise(list(chain.named_children())):
            if type(norm) is nn.BatchNorm2d and type(act) is nn.ReLU and _is_plain(norm):
                norm.__class__ = NormReLU
                chain._modules[name] = nn.Identity()


def _on_gpu(net: nn.Module) -> bool:
    return next(net.parameters()).is_cuda


def _is_plain(norm: nn.BatchNorm2d) -> bool:
    return norm.affine and norm.track_running_stats and norm.momentum is not None


class NormReLU(nn.BatchNorm2d):
    """max(batch norm, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same, channels last, in the type of x."""
        if not self.training:
            return F.relu(super().forward(x))
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        result: Tensor = _NormReLU.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps
        )
        return result


class _NormReLU(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor,
        running_var: Tensor, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        from splitgrow.paper import norm_triton

        x = x.contiguous(memory_format=torch.channels_last)
        work = _Work(x)
        sums, moment = work.sums(), torch.empty(4, work.channels, device=x.device)
        result = torch.empty_like(x)
        norm_triton.moments[work.parts, work.tiles](x, sums, *work.sizes, **work.tile)
        norm_triton.settled[work.few](
            x, sums, weight, bias, running_mean, running_var, moment, work.parts, *work.sizes,
            momentum, eps, **work.adding,
        )  # fmt: skip
        norm_triton.applied[work.steps, work.tiles](x, moment, result, *work.sizes, **work.tile)
        ctx.save_for_backward(x, moment)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from splitgrow.paper import norm_triton

        x, moment = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        work = _Work(x)
        sums, result = work.sums(), torch.empty_like(x)
        by_weight, by_bias = torch.empty(2, work.channels, device=x.device)
        norm_triton.gradient_sums[work.parts, work.tiles](
            x, gradient, moment, sums, *work.sizes, **work.tile
        )
        norm_triton.gradient_settled[work.few](
            sums, by_weight, by_bias, work.parts, work.sizes[1], **work.adding
        )
        norm_triton.gradient_applied[work.steps, work.tiles](
            x, gradient, moment, by_weight, by_bias, result, *work.sizes, **work.tile
        )
        return result, by_weight, by_bias, None, None, None, None


class _Work:
    """How the rows and channels of images are divided among programs."""

    def __init__(self, x: Tensor) -> None:
        self.device, self.channels = x.device, x.shape[1]
        rows, block = x.numel() // self.channels, 8 if self.channels % 8 == 0 else 1
        wide = 16 if self.channels <= 16 else 32 if self.channels <= 32 else 64
        self.sizes = (rows, self.channels // block)
        self.tile = {"BLOCK": block, "ROWS": TILE // wide, "CHANNELS": wide}
        self.adding = {"BLOCK": block, "PARTS": PARTS, "CHANNELS": CHANNELS}
        self.tiles = -(-self.channels // wide)
        self.steps = -(-rows // self.tile["ROWS"])
        self.parts = min(PARTS, self.steps)
        self.few = (-(-self.channels // CHANNELS),)

    def sums(self) -> Tensor:
        """Two for each part and channel."""
        return torch.empty(2, self.parts, self.channels, device=self.device)
