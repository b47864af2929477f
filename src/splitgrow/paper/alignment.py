"""Widths that suit a GPU's matrix units, for training alone.

Nets that grow or are pruned have 27 or 53 channels, and a GPU multiplies matrices in blocks of
eight. So a wider twin is trained in the net's place, whose additional channels are zero: their
filters, scales, shifts and readers. Each of these has a factor of zero in its gradient, so they
stay zero, and all others learn exactly what they would in the net itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BLOCK = 8


@contextmanager
def aligned(net: nn.Module, block: int = BLOCK) -> Iterator[nn.Module]:
    """A twin to train, with widths that are multiples of ``block``; at the end ``net`` learns it.

    For chains of convolutions, batch norms and ReLUs up to one linear layer: the first layer's
    inputs and the last one's outputs keep their number. Where an activation is not 0 at 0, the
    twin is the net itself.
    """
    if not _can_be(net):
        yield net
        return
    twin = copy.deepcopy(net)
    first = next(m for m in twin.modules() if isinstance(m, nn.Conv2d))
    for module in twin.modules():
        _widen(module, block, keeps_inputs=module is first)
    yield twin
    for (_, mine), (_, wide) in zip(_tensors(net), _tensors(twin), strict=True):
        mine.copy_(wide[_corner(mine)])
    net.train(twin.training)


def _can_be(net: nn.Module) -> bool:
    """Do all activations map 0 to 0, and has no convolution a bias?"""
    leaves = [m for m in net.modules() if not list(m.children())]
    known = (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Linear)
    return (
        all(isinstance(m, known) for m in leaves)
        and all(m.bias is None for m in leaves if isinstance(m, nn.Conv2d))
        and sum(isinstance(m, nn.Linear) for m in leaves) == 1
    )


def _widen(module: nn.Module, block: int, *, keeps_inputs: bool) -> None:
    if isinstance(module, nn.Conv2d):
        depthwise = module.groups > 1
        module.out_channels = _up(module.out_channels, block)
        if not keeps_inputs:
            module.in_channels = _up(module.in_channels, block)
        module.groups = module.in_channels if depthwise else 1
        inputs = module.in_channels // module.groups
        _resize(module, "weight", (module.out_channels, inputs, *module.kernel_size))
    elif isinstance(module, nn.BatchNorm2d):
        module.num_features = _up(module.num_features, block)
        for name in ("weight", "bias", "running_mean", "running_var"):
            _resize(module, name, (module.num_features,), 1.0 if name == "running_var" else 0.0)
    elif isinstance(module, nn.Linear):
        module.in_features = _up(module.in_features, block)
        _resize(module, "weight", (module.out_features, module.in_features))


def _up(width: int, block: int) -> int:
    return -(-width // block) * block


def _resize(module: nn.Module, name: str, shape: tuple[int, ...], fill: float = 0.0) -> None:
    old: Tensor = getattr(module, name)
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new[_corner(old)] = old.detach()
    if isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        setattr(module, name, new)


def _corner(tensor: Tensor) -> tuple[slice, ...]:
    return tuple(slice(size) for size in tensor.shape)


def _tensors(net: nn.Module) -> list[tuple[str, Tensor]]:
    with torch.no_grad():
        named = [*net.named_parameters(), *net.named_buffers()]
        return [(name, tensor.detach()) for name, tensor in named]
