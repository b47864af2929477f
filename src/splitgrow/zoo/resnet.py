"""Residual nets for small images, post- and pre-activation (He et al., 2015 and 2016)."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from splitgrow.zoo.layers import conv_norm_act


class BasicBlock(nn.Module):
    """act(norm(conv(act(norm(conv(x))))) + shortcut(x)).

    The shortcut is a 1x1 convolution with batch norm where the shape changes, else the identity.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        stride: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, hidden, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.activation1 = activation()
        self.conv2 = nn.Conv2d(hidden, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = (
            nn.Identity()
            if same_shape
            else conv_norm_act(in_channels, out_channels, 1, stride, activation=nn.Identity)
        )
        self.activation2 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        y = self.activation1(self.norm1(self.conv1(x)))
        return self.activation2(self.norm2(self.conv2(y)) + self.shortcut(x))


class PreActBlock(nn.Module):
    """conv(act(norm(conv(act(norm(x)))))) + shortcut.

    The shortcut is x itself, or a 1x1 convolution of act(norm(x)) where the shape changes.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        stride: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.activation1 = activation()
        self.conv1 = nn.Conv2d(in_channels, hidden, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.activation2 = activation()
        self.conv2 = nn.Conv2d(hidden, out_channels, 3, padding=1, bias=False)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = (
            None if same_shape else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        y = self.activation1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(self.activation2(self.norm2(self.conv1(y)))) + shortcut


def _stages(
    block: Callable[..., nn.Module],
    blocks: Sequence[int],
    widths: Sequence[int],
    hidden: Sequence[int] | None,
    activation: Callable[[], nn.Module],
) -> nn.Sequential:
    """Stack stages of `blocks[i]` blocks of `widths[i]` channels; all but the first halve."""
    stages: list[nn.Module] = []
    channels = widths[0]
    for index, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        inner = width if hidden is None else hidden[index]
        layers: list[nn.Module] = []
        for position in range(count):
            stride = 2 if index > 0 and position == 0 else 1
            layers.append(block(channels, inner, width, stride, activation))
            channels = width
        stages.append(nn.Sequential(*layers))
    return nn.Sequential(*stages)


class ResNet(nn.Module):
    """Post-activation residual net: stem, stages of `BasicBlock`, average, linear layer.

    `blocks` and `widths` give each stage's depth and channels, `hidden` the channels inside its
    blocks (as many as `widths` by default).
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        hidden: Sequence[int] | None = None,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.stem = conv_norm_act(in_channels, widths[0], 3, activation=activation)
        self.stages = _stages(BasicBlock, blocks, widths, hidden, activation)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))


class PreActResNet(nn.Module):
    """Pre-activation residual net: stem, stages of `PreActBlock`, norm, activation, linear layer.

    The arguments are those of `ResNet`.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        hidden: Sequence[int] | None = None,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.stages = _stages(PreActBlock, blocks, widths, hidden, activation)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.activation = activation()
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        y = self.activation(self.norm(self.stages(self.stem(x))))
        return self.classifier(y.mean((2, 3)))
