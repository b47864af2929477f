"""Temporal convolutional net for sequences (Bai et al., 2018)."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class TemporalBlock(nn.Module):
    """Two causal dilated convolutions, each with activation, beside a shortcut.

    The shortcut is a 1x1 convolution where the channels change, else the identity; the sum goes
    through an activation too.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        kernel_size: int,
        dilation: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.history = (kernel_size - 1) * dilation
        self.conv1 = nn.Conv1d(in_channels, hidden, kernel_size, dilation=dilation)
        self.activation1 = activation()
        self.conv2 = nn.Conv1d(hidden, out_channels, kernel_size, dilation=dilation)
        self.activation2 = activation()
        self.shortcut = (
            nn.Identity()
            if in_channels == out_channels
            else nn.Conv1d(in_channels, out_channels, 1)
        )
        self.activation3 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, T) to (B, out_channels, T); no step sees a later one."""
        y = self.activation1(self.conv1(F.pad(x, (self.history, 0))))
        y = self.activation2(self.conv2(F.pad(y, (self.history, 0))))
        return self.activation3(y + self.shortcut(x))


class TCN(nn.Module):
    """Temporal blocks with dilations 1, 2, 4, ... and a linear layer on the last time step.

    `widths` gives the channels behind each block, `hidden` those inside (as many by default).
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 16, 16),
        hidden: Sequence[int] | None = None,
        kernel_size: int = 3,
        in_channels: int = 1,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = in_channels
        for index, width in enumerate(widths):
            inner = width if hidden is None else hidden[index]
            blocks.append(TemporalBlock(channels, inner, width, kernel_size, 2**index, activation))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences (B, C, T) to logits (B, num_classes)."""
        return self.classifier(self.blocks(x)[:, :, -1])
