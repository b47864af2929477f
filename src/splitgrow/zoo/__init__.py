"""Small plain networks to grow: one family per file, ordinary `nn.Module`s throughout.

Every class takes an `activation`, a factory without arguments such as `nn.ReLU` or `nn.Softplus`,
and widths and depths that go down to a few neurons.
"""

from splitgrow.zoo import kws
from splitgrow.zoo.densenet import DenseNet
from splitgrow.zoo.kws import DSCNN
from splitgrow.zoo.mlp import MLP
from splitgrow.zoo.mobilenet import MobileNetV1, MobileNetV2, mobilenet_v1, mobilenet_v2
from splitgrow.zoo.prototypes import PrototypeNet, euclidean_distances, squared_distances
from splitgrow.zoo.rbf import Gaussian, RBFNet, RBFSumNet
from splitgrow.zoo.resnet import Bottleneck, PreActResNet, ResNet, resnet50
from splitgrow.zoo.senet import SENet
from splitgrow.zoo.tcn import TCN
from splitgrow.zoo.transformer import (
    FeedForward,
    FusedGatedFeedForward,
    GatedFeedForward,
    Transformer,
)
from splitgrow.zoo.unet import UNet
from splitgrow.zoo.vgg import VGG, vgg19

__all__ = [
    "DSCNN",
    "MLP",
    "TCN",
    "VGG",
    "Bottleneck",
    "DenseNet",
    "FeedForward",
    "FusedGatedFeedForward",
    "GatedFeedForward",
    "Gaussian",
    "MobileNetV1",
    "MobileNetV2",
    "PreActResNet",
    "PrototypeNet",
    "RBFNet",
    "RBFSumNet",
    "ResNet",
    "SENet",
    "Transformer",
    "UNet",
    "euclidean_distances",
    "kws",
    "mobilenet_v1",
    "mobilenet_v2",
    "resnet50",
    "squared_distances",
    "vgg19",
]
