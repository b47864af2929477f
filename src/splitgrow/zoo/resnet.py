"""Residual nets for small images, post- and pre-activation (He et al., 2015 and 2016)."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from splitgrow.zoo.layers import conv_norm_act


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """A 1x1 convolution with batch norm where the shape changes, else the identity."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return conv_norm_act(in_channels, out_channels, 1, stride, activation=nn.Identity)


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
        self.shortcut = _shortcut(in_channels, out_channels, stride)
        self.activation2 = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        y = self.activation1(self.norm1(self.conv1(x)))
        return self.activation2(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """act(expand(act(conv(act(reduce(x))))) + shortcut(x)), with batch norm after each convolution.

    `reduce` and `expand` are 1x1 convolutions to and from `hidden` channels, between them is a 3x3
    convolution, which has the stride. The shortcut is that of `BasicBlock`.
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
        self.reduce = conv_norm_act(in_channels, hidden, 1, activation=activation)
        self.conv = conv_norm_act(hidden, hidden, 3, stride, activation=activation)
        self.expand = conv_norm_act(hidden, out_channels, 1, activation=nn.Identity)
        self.shortcut = _shortcut(in_channels, out_channels, stride)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        return self.activation(self.expand(self.conv(self.reduce(x))) + self.shortcut(x))


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
    stem: int | None = None,
) -> nn.Sequential:
    """Stack stages of `blocks[i]` blocks of `widths[i]` channels; all but the first halve.

    They read `stem` channels, by default as many as the first stage has.
    """
    stages: list[nn.Module] = []
    channels = widths[0] if stem is None else stem
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
    """Post-activation residual net: stem, stages of blocks, average, linear layer.

    `blocks` and `widths` give each stage's depth and channels, `hidden` the channels inside its
    blocks (as many as `widths` by default), `stem` those of the first convolution (as many as the
    first stage by default), `block` the class of the blocks: `BasicBlock` or `Bottleneck`.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        hidden: Sequence[int] | None = None,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
        stem: int | None = None,
        block: Callable[..., nn.Module] = BasicBlock,
    ) -> None:
        super().__init__()
        first = widths[0] if stem is None else stem
        self.stem = conv_norm_act(in_channels, first, 3, activation=activation)
        self.stages = _stages(block, blocks, widths, hidden, activation, first)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(self.stages(self.stem(x)).mean((2, 3)))


def resnet50(num_classes: int = 10, activation: Callable[[], nn.Module] = nn.ReLU) -> ResNet:
    """Build ResNet-50 for 32x32 images: a 3x3 stem without stride or pooling, four stages.

    With the 7x7 stem of large images (9,408 weights in place of 1,728) and 1,000 classes it is the
    published net of 25,557,032 parameters.
    """
    return ResNet(
        blocks=(3, 4, 6, 3),
        widths=(256, 512, 1024, 2048),
        hidden=(64, 128, 256, 512),
        num_classes=num_classes,
        activation=activation,
        stem=64,
        block=Bottleneck,
    )


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
