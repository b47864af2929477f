"""U-Net for dense prediction (Ronneberger et al., 2015)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.zoo.layers import conv_norm_act


def _double_conv(
    in_channels: int, out_channels: int, activation: Callable[[], nn.Module]
) -> nn.Sequential:
    """Two 3x3 convolutions, each with batch norm and activation."""
    return nn.Sequential(
        *conv_norm_act(in_channels, out_channels, 3, activation=activation),
        *conv_norm_act(out_channels, out_channels, 3, activation=activation),
    )


class UNet(nn.Module):
    """A contracting path, an expanding path of transposed convolutions, and skips by concatenation.

    `widths` runs from the finest level to the coarsest; the image must be divisible by
    2 ** (len(widths) - 1).
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64),
        in_channels: int = 3,
        num_classes: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        *levels, bottom = widths
        channels = [in_channels, *levels]
        self.downs = nn.ModuleList(
            _double_conv(fan_in, width, activation)
            for fan_in, width in zip(channels, levels, strict=False)
        )
        self.bottom = _double_conv(channels[-1], bottom, activation)
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(widths[i + 1], widths[i], 2, stride=2)
            for i in reversed(range(len(levels)))
        )
        self.merges = nn.ModuleList(
            _double_conv(2 * width, width, activation) for width in reversed(levels)
        )
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes, H, W)."""
        skips: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.ups, self.merges, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)
