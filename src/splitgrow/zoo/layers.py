"""Building blocks that several families share."""

from collections.abc import Callable

from torch import nn


def conv_norm_act(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    groups: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """Convolution (same padding, no bias), batch norm, activation.

    The convolution has no bias because the batch norm behind it has one.
    """
    return nn.Sequential(
        nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            groups=groups,
            bias=False,
        ),
        nn.BatchNorm2d(out_channels),
        activation(),
    )
