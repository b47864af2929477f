"""MobileNet, versions 1 and 2, for small images (Howard et al., 2017; Sandler et al., 2018)."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from splitgrow.zoo.layers import conv_norm_act

# (channels, stride) of each depthwise-separable block, strides for 32x32 images
MOBILENET_V1 = (
    *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1)),
    *((512, 2), (512, 1), (512, 1), (512, 1), (512, 1), (512, 1)),
    *((1024, 2), (1024, 1)),
)

# (expansion, channels, repeats, stride) of each group of blocks, strides for 32x32 images
MOBILENET_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class DepthwiseSeparable(nn.Module):
    """Depthwise 3x3 then pointwise 1x1 convolution, each with batch norm and activation."""

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, activation: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        self.depthwise = conv_norm_act(
            in_channels, in_channels, 3, stride, groups=in_channels, activation=activation
        )
        self.pointwise = conv_norm_act(in_channels, out_channels, 1, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        return self.pointwise(self.depthwise(x))


class MobileNetV1(nn.Module):
    """A 3x3 stem, depthwise-separable blocks, average, linear layer.

    Each entry (channels, stride) of `config` is a block. A neuron runs from a pointwise filter
    through the depthwise filter of the next block up to the next pointwise convolution.
    """

    def __init__(
        self,
        config: Sequence[tuple[int, int]],
        stem: int = 32,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.stem = conv_norm_act(in_channels, stem, 3, activation=activation)
        blocks: list[nn.Module] = []
        channels = stem
        for width, stride in config:
            blocks.append(DepthwiseSeparable(channels, width, stride, activation))
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def mobilenet_v1(
    width: int | None = None,
    num_classes: int = 10,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> MobileNetV1:
    """Build MobileNetV1 for 32x32 images: full size (32 to 1024 channels), or `width` everywhere.

    The stem keeps its 32 channels in both.
    """
    config = [(channels if width is None else width, stride) for channels, stride in MOBILENET_V1]
    return MobileNetV1(config, num_classes=num_classes, activation=activation)


class InvertedResidual(nn.Module):
    """Expand 1x1, depthwise 3x3, project 1x1 without activation, and add the input.

    The input is added where stride is 1 and the channels are equal; with expansion 1 there is no
    expanding convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        expansion: int,
        stride: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.residual = stride == 1 and in_channels == out_channels
        self.expand = (
            conv_norm_act(in_channels, hidden, 1, activation=activation)
            if expansion > 1
            else nn.Identity()
        )
        self.depthwise = conv_norm_act(
            hidden, hidden, 3, stride, groups=hidden, activation=activation
        )
        self.project = conv_norm_act(hidden, out_channels, 1, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_channels, H, W) to (B, out_channels, H / stride, W / stride)."""
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """A 3x3 stem, inverted residual blocks, a 1x1 convolution to `last` channels, a linear layer.

    Each entry (expansion, channels, repeats, stride) of `config` is a group of blocks; the stride
    is that of its first block.
    """

    def __init__(
        self,
        config: Sequence[tuple[int, int, int, int]],
        stem: int = 32,
        last: int = 1280,
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU6,
    ) -> None:
        super().__init__()
        self.stem = conv_norm_act(in_channels, stem, 3, activation=activation)
        blocks: list[nn.Module] = []
        channels = stem
        for expansion, width, repeats, first_stride in config:
            for stride in [first_stride] + [1] * (repeats - 1):
                blocks.append(InvertedResidual(channels, width, expansion, stride, activation))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.last = conv_norm_act(channels, last, 1, activation=activation)
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(self.last(self.blocks(self.stem(x))).mean((2, 3)))


def mobilenet_v2(
    num_classes: int = 10, activation: Callable[[], nn.Module] = nn.ReLU6
) -> MobileNetV2:
    """Build the full-size MobileNetV2 for 32x32 images."""
    return MobileNetV2(MOBILENET_V2, num_classes=num_classes, activation=activation)
