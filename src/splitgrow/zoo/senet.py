"""Squeeze-and-excitation net (Hu et al., 2018)."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from splitgrow.zoo.layers import conv_norm_act


class SqueezeExcitation(nn.Module):
    """Scale each channel by a gate in (0, 1) computed from the means of all channels."""

    def __init__(self, channels: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Linear(channels, hidden)
        self.activation = activation()
        self.excite = nn.Linear(hidden, channels)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        pooled = self.pool(x).flatten(1)
        gate = self.gate(self.excite(self.activation(self.squeeze(pooled))))
        return x * gate[:, :, None, None]


class SENet(nn.Module):
    """Blocks of convolution, batch norm, activation and a gate; then average and linear layer.

    `widths` gives the channels of each block, `hidden` those inside each gate; blocks after the
    first halve the image.
    """

    def __init__(
        self,
        widths: Sequence[int] = (16, 32, 64),
        hidden: Sequence[int] = (4, 8, 16),
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = in_channels
        for index, (width, inner) in enumerate(zip(widths, hidden, strict=True)):
            stride = 2 if index > 0 else 1
            blocks += [
                conv_norm_act(channels, width, 3, stride, activation=activation),
                SqueezeExcitation(width, inner, activation),
            ]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(self.blocks(x).mean((2, 3)))
