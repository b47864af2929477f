"""Batch norm with its ReLU as one operation gives what PyTorch gives for the two."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.paper import norm_kernels as kernels
from splitgrow.paper.norm_kernels import NormReLU, join_norms

SHAPES = {  # images, channels, height, width
    "few channels": (64, 16, 32, 32),
    "24 channels": (32, 24, 9, 7),
    "not in blocks": (6, 20, 5, 7),
    "many channels": (128, 512, 2, 2),
    "few rows": (3, 8, 1, 1),
}


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(),
        nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU(),
    )  # fmt: skip


def results(norm: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output, gradients and running statistics."""
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(upstream)
    inner = norm[0] if isinstance(norm, nn.Sequential) else norm
    assert isinstance(inner, nn.BatchNorm2d)
    assert inner.num_batches_tracked == 1
    found = [y, x.grad, inner.weight.grad, inner.bias.grad, inner.running_mean, inner.running_var]
    return [t.detach().double().cpu() for t in found if t is not None]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_gradients_and_statistics_are_those_of_pytorch(
    shape: str, dtype: torch.dtype
) -> None:
    size = SHAPES[shape]
    plain = nn.Sequential(nn.BatchNorm2d(size[1]), nn.ReLU()).double()
    norm = plain[0]
    with torch.no_grad():
        norm.weight.uniform_(-1, 2)
        norm.bias.normal_()
    joined = copy.deepcopy(plain).float().cuda()
    join_norms(joined)
    assert type(joined[0]) is NormReLU
    # Far from 0, where squares would cancel; and nothing so near the kink that rounding decides.
    x = (torch.randn(size) * 3 - 20).to(dtype)
    before = nn.functional.batch_norm(x.double(), None, None, norm.weight, norm.bias, training=True)
    upstream = torch.randn(size).to(dtype) * (before.abs() > 1e-4)
    expected = results(plain, x.double(), upstream.double())
    found = results(joined, x.cuda(), upstream.cuda())
    for mine, theirs in zip(found, expected, strict=True):
        error = (mine - theirs).norm() / theirs.norm().clamp_min(1e-12)
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.cuda
def test_a_joined_net_in_eval_mode_is_the_net() -> None:
    plain = net().cuda()
    joined = copy.deepcopy(plain)
    join_norms(joined)
    x = torch.randn(4, 3, 12, 12, device="cuda")
    joined.train()(x)  # other statistics now
    plain.train()(x)
    torch.testing.assert_close(joined.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-4)


def test_norms_before_a_relu_are_joined_and_others_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "have_kernels", lambda: True)
    monkeypatch.setattr(kernels, "_on_gpu", lambda net: True)
    model = net()
    names = [name for name, _ in model.named_parameters()]
    join_norms(model)
    kinds = [type(module) for module in model]
    assert kinds[1:3] == [NormReLU, nn.Identity]
    assert kinds[5:7] == [nn.BatchNorm2d, nn.Tanh]
    assert kinds[8:] == [nn.BatchNorm2d, nn.ReLU]  # its momentum is not a number
    assert [name for name, _ in model.named_parameters()] == names


def test_on_a_cpu_nothing_is_joined() -> None:
    model = net()
    join_norms(model)
    assert not any(isinstance(module, NormReLU) for module in model)


def test_in_eval_mode_it_is_a_batch_norm_and_a_relu() -> None:
    norm = NormReLU(5).eval()
    x = torch.randn(2, 5, 3, 3)
    torch.testing.assert_close(norm(x), F.relu(nn.BatchNorm2d(5).eval()(x)))
