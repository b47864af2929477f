"""The two nets of the CIFAR-10 study: as small as growth starts, at full size, or in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper.jobs import WIDTH, Size, channels
from splitgrow.zoo.mobilenet import MOBILENET_V1, MobileNetV1
from splitgrow.zoo.vgg import VGG, VGG19

ARCHS = ("vgg19", "mobilenet")
ACTIVATIONS = ("relu", "softplus")
STEM = 32  # of MobileNet at full size, and of its seed, where that has 16 channels elsewhere


def build(
    arch: str,
    activation: str,
    size: Size,
    *,
    width: int = WIDTH,
    thin: float | None = None,
    beta: float = 1.0,
) -> nn.Module:
    """An untrained net for images of 3 x 32 x 32.

    Args:
        arch: ``"vgg19"`` (with batch norm) or ``"mobilenet"`` (version 1).
        activation: ``"relu"`` or ``"softplus"``.
        size: ``"seed"``: ``width`` channels everywhere, in MobileNet's stem twice as many;
            a number: so many times the channels of the seed; ``"full"``: as published.
        width: channels of the seed.
        thin: instead, the seed has this share of the full net's channels in every layer.
        beta: of the softplus.
    """
    act = _activation(activation, beta)

    def made(full: int, seed: int) -> int:
        return channels(full, seed if thin is None else max(1, round(thin * full)), size)

    if arch == "vgg19":
        config = [c if isinstance(c, str) else made(c, width) for c in VGG19]
        return VGG(config, activation=act)
    if arch == "mobilenet":
        blocks = [(made(c, width), stride) for c, stride in MOBILENET_V1]
        return MobileNetV1(blocks, stem=made(STEM, STEM * width // WIDTH), activation=act)
    raise InputError(f"arch: expected one of {', '.join(ARCHS)}, got {arch!r}.")


def arch_of(net: nn.Module) -> str:
    """The name of what ``build`` made, whatever has become of it."""
    return "mobilenet" if isinstance(net, MobileNetV1) else "vgg19"


def _activation(name: str, beta: float) -> Callable[[], nn.Module]:
    if name not in ACTIVATIONS:
        raise InputError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    return nn.ReLU if name == "relu" else partial(nn.Softplus, beta)


def example(device: torch.device) -> tuple[Tensor]:
    """Inputs to trace a net with."""
    return (torch.zeros(2, 3, 32, 32, device=device),)
