"""VGG with batch norm for small images (Simonyan and Zisserman, 2015)."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

VGG19: tuple[int | str, ...] = (
    *(64, 64, "M"),
    *(128, 128, "M"),
    *(256, 256, 256, 256, "M"),
    *(512, 512, 512, 512, "M"),
    *(512, 512, 512, 512, "M"),
)


class VGG(nn.Module):
    """3x3 convolutions with batch norm, max pooling at each "M" of `config`, one linear layer.

    What is left of the image at the end is averaged (32x32 inputs of `VGG19` end in 1x1, where that
    does nothing), so the net takes images of any size.
    """

    def __init__(
        self,
        config: Sequence[int | str],
        in_channels: int = 3,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for entry in config:
            if isinstance(entry, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [
                nn.Conv2d(channels, entry, 3, padding=1, bias=False),
                nn.BatchNorm2d(entry),
                activation(),
            ]
            channels = entry
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, num_classes)."""
        return self.classifier(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def vgg19(
    width: int | None = None,
    num_classes: int = 10,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> VGG:
    """Build VGG19 for 32x32 images: full size (64 to 512 channels), or `width` channels everywhere.

    `vgg19(16)` is the seed network that the paper grows on CIFAR.
    """
    config = [c if isinstance(c, str) or width is None else width for c in VGG19]
    return VGG(config, num_classes=num_classes, activation=activation)
