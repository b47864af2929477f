"""Depthwise convolutions of our own give what PyTorch's give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.paper import depthwise_kernels as kernels
from splitgrow.paper.depthwise_kernels import depthwise_kernels, have_kernels, layout_for

SHAPES = {  # channels, side, stride, padding, height, width
    "same size": (20, 3, 1, 1, 8, 8),
    "halved": (64, 3, 2, 1, 8, 8),
    "halved, odd": (70, 3, 2, 1, 9, 7),
    "five by five": (17, 5, 1, 2, 6, 10),
    "no padding": (3, 3, 3, 0, 9, 10),
}


def values_and_gradients(x: Tensor, weight: Tensor, stride: int, pad: int) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = F.conv2d(x, weight, stride=stride, padding=pad, groups=len(weight))
    upstream = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), upstream)]


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_pytorch(shape: str) -> None:
    channels, side, stride, pad, height, width = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, channels, height, width, generator=generator)
    weight = torch.randn(channels, 1, side, side, generator=generator)
    expected = values_and_gradients(x.double(), weight.double(), stride, pad)
    with depthwise_kernels():
        found = values_and_gradients(x.cuda(), weight.cuda(), stride, pad)
    assert have_kernels()
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.cuda
def test_under_autocast_they_compute_in_half_precision() -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False).cuda()
    x = torch.randn(2, 8, 5, 5, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), depthwise_kernels():
        y = conv(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert conv.weight.grad is not None
    assert conv.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), conv(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(6, 6, 3, groups=6, bias=False),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.Conv2d(6, 12, 3, groups=6),
        nn.Conv2d(6, 6, 3, groups=6, dilation=2, bias=False),
        nn.Conv2d(6, 6, (3, 1), groups=6, bias=False),
        nn.Conv2d(6, 6, 3, groups=6, padding="same", bias=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_every_other_convolution_is_left_to_pytorch(conv: nn.Conv2d, device: str) -> None:
    conv.to(device)
    x = torch.randn(2, 6, 7, 7, device=device)
    with depthwise_kernels():
        y = conv(x)
    torch.testing.assert_close(y, conv(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "groups", "have", "last"),
    [
        ("cpu", 4, False, True),
        ("cuda", 4, True, True),
        ("cuda", 1, False, True),
        ("cuda", 4, False, False),  # cuDNN would compile
    ],
)
def test_layout(
    device: str, groups: int, have: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "have_kernels", lambda: have)
    found = layout_for(nn.Conv2d(4, 4, 3, groups=groups), torch.device(device))
    assert found == (torch.channels_last if last else torch.contiguous_format)
