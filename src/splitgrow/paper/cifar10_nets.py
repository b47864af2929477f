"""The two nets of the CIFAR-10 study: as small as growth starts, at full size, or in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from splitgrow.cost import Cost, CostModel
from splitgrow.errors import InputError
from splitgrow.history import lasting_names
from splitgrow.units import find_units
from splitgrow.zoo.mobilenet import MOBILENET_V1, MobileNetV1
from splitgrow.zoo.vgg import VGG, VGG19

Size = Literal["seed", "full"] | float  # a number: the seed's channels times that

ARCHS = ("vgg19", "mobilenet")
ACTIVATIONS = ("relu", "softplus")
WIDTH = 16  # channels of the seed, as in the paper
STEM = 32  # of MobileNet at full size, and of its seed, where that has 16 channels elsewhere


def build(
    arch: str, activation: str, size: Size, *, width: int = WIDTH, beta: float = 1.0
) -> nn.Module:
    """An untrained net for images of 3 x 32 x 32.

    Args:
        arch: ``"vgg19"`` (with batch norm) or ``"mobilenet"`` (version 1).
        activation: ``"relu"`` or ``"softplus"``.
        size: ``"seed"``: ``width`` channels everywhere, in MobileNet's stem twice as many;
            a number: so many times the channels of the seed; ``"full"``: as published.
        width: channels of the seed.
        beta: of the softplus.
    """
    act = _activation(activation, beta)
    if arch == "vgg19":
        config = [c if isinstance(c, str) else _channels(c, width, size) for c in VGG19]
        return VGG(config, activation=act)
    if arch == "mobilenet":
        blocks = [(_channels(c, width, size), stride) for c, stride in MOBILENET_V1]
        return MobileNetV1(
            blocks, stem=_channels(STEM, STEM * width // WIDTH, size), activation=act
        )
    raise InputError(f"arch: expected one of {', '.join(ARCHS)}, got {arch!r}.")


def _activation(name: str, beta: float) -> Callable[[], nn.Module]:
    if name not in ACTIVATIONS:
        raise InputError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}.")
    return nn.ReLU if name == "relu" else partial(nn.Softplus, beta)


def _channels(full: int, seed: int, size: Size) -> int:
    if isinstance(size, str):
        if size not in ("seed", "full"):
            raise InputError(f'size: expected "seed", "full" or a number, got {size!r}.')
        return full if size == "full" else seed
    if not round(seed * size) >= 1:
        raise InputError(f"size: {size} times {seed} channels leaves none.")
    return round(seed * size)


def example(device: torch.device) -> tuple[Tensor]:
    """Inputs to trace a net with."""
    return (torch.zeros(2, 3, 32, 32, device=device),)


def measured(net: nn.Module) -> tuple[Cost, dict[str, int]]:
    """A net's cost, and the channels of each of its units by a name that stays as it grows."""
    units = find_units(net, example(next(net.parameters()).device))
    names = lasting_names(units)
    return CostModel(units).total(), {names[unit.name]: unit.width for unit in units}


def count_parameters(net: nn.Module) -> int:
    """How many it has: all are used, so it is what ``measured`` counts, without the tracing."""
    return sum(p.numel() for p in net.parameters())
