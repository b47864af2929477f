"""DenseNet: every layer reads all earlier ones by concatenation (Huang et al., 2017)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """Norm, activation, 1x1 convolution, norm, activation, 3x3 convolution, beside the input."""

    def __init__(
        self, in_channels: int, bottleneck: int, growth: int, activation: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.activation1 = activation()
        self.conv1 = nn.Conv2d(in_channels, bottleneck, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck)
        self.activation2 = activation()
        self.conv2 = nn.Conv2d(bottleneck, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C + growth, H, W); the new channels are the last."""
        y = self.conv1(self.activation1(self.norm1(x)))
        y = self.conv2(self.activation2(self.norm2(y)))
        return torch.cat([x, y], 1)


class Transition(nn.Module):
    """Norm, activation, 1x1 convolution and a 2x2 average between two dense blocks."""

    def __init__(
        self, in_channels: int, out_channels: int, activation: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.activation = activation()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / 2, W / 2)."""
        return F.avg_pool2d(self.conv(self.activation(self.norm(x))), 2)


class DenseNet(nn.Module):
    """Stem, dense blocks with transitions between them, norm, activation, linear layer.

    `blocks` counts the layers of each dense block, each adds `growth` channels; a transition keeps
    the share `compression` of the channels.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (6, 6, 6),
        stem: int = 24,
        growth: int = 12,
        bottleneck: int = 48,
        compression: float = 0.5,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, stem, 3, padding=1, bias=False)
        stages: list[nn.Module] = []
        channels = stem
        for index, count in enumerate(blocks):
            if index > 0:
                stages.append(Transition(channels, int(channels * compression), activation))
                channels = int(channels * compression)
            layers = [
                DenseLayer(channels + i * growth, bottleneck, growth, activation)
                for i in range(count)
            ]
            stages.append(nn.Sequential(*layers))
            channels += count * growth
        self.stages = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = activation()
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        y = self.activation(self.norm(self.stages(self.stem(x))))
        return self.classifier(y.mean((2, 3)))
