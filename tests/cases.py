"""A table of tiny models with every splittable unit of each stated by hand.

All are float64 and in eval mode, with smooth activations and widths that differ wherever they can,
so that a mistaken index shows as a wrong shape. Batch-norm affines and running statistics are drawn
at random, because at their initial values they would hide mistakes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracle import Slot, UnitSpec
from splitgrow import zoo

Batch = tuple[Tensor, ...]  # inputs ..., target
Positions = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """A model, its example inputs, and what is to be found in it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    units: tuple[UnitSpec, ...]
    skipped: tuple[str, ...]  # every module (or root parameter) whose channels cannot be split

    def __str__(self) -> str:
        return self.name


# --- models and data ----------------------------------------------------------------------


def _seeded(name: str, make: Callable[[], Any]) -> Any:
    """Call `make` with torch's generator seeded by a name, and put the generator back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        return make()


@torch.no_grad()
def _lively(model: nn.Module) -> nn.Module:
    """Double precision, eval mode, larger weights, random normalisations and PReLU slopes.

    torch's initial weights let the signal of a narrow net die out, and S with it.
    """
    model = model.double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(2.0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm):
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0.0, 0.3)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0.0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, nn.PReLU):
            module.weight.uniform_(0.1, 0.6)
    return model


def _case(
    name: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    units: tuple[UnitSpec, ...],
    skipped: tuple[str, ...],
) -> Case:
    return Case(
        name,
        build=lambda: _seeded(name, lambda: _lively(make())),
        inputs=lambda: (_seeded(f"{name} inputs", lambda: torch.randn(shape).double()),),
        units=units,
        skipped=skipped,
    )


def mse_loss_fn(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    *inputs, target = batch
    return F.mse_loss(model(*inputs), target)


def ce_loss_fn(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    *inputs, target = batch
    return F.cross_entropy(model(*inputs), target)


LOSSES = {"mse": mse_loss_fn, "ce": ce_loss_fn}


def make_batch(case: Case, loss: str) -> Batch:
    """Example inputs with seeded targets for the loss of that name in `LOSSES`."""
    inputs = case.inputs()
    with torch.no_grad():
        output = case.build()(*inputs)  # (B, classes, ...)

    def target() -> Tensor:
        if loss == "mse":
            return torch.randn(output.shape, dtype=output.dtype)
        return torch.randint(output.shape[1], (output.shape[0], *output.shape[2:]))

    return (*inputs, _seeded(f"{case.name} {loss}", target))


# --- words to state units in --------------------------------------------------------------


def at(offset: int) -> Positions:
    """Neuron k is entry `offset` + k: its unit stands behind others in a concatenation."""
    return lambda k: [offset + k]


FIRST = at(0)


def runs_of(length: int) -> Positions:
    """Neuron k is `length` entries on end: the pixels of a flattened channel, a multiplier."""
    return lambda k: range(k * length, (k + 1) * length)


def twice(width: int) -> Positions:
    """Neuron k is in both of two blocks of the unit's width."""
    return lambda k: [k, width + k]


def rows(module: str, *, dim: int = 0, positions: Positions = FIRST) -> tuple[Slot, ...]:
    return (Slot(f"{module}.weight", dim, positions),)


def rows_bias(module: str, *, dim: int = 0, positions: Positions = FIRST) -> tuple[Slot, ...]:
    return (*rows(module, dim=dim, positions=positions), Slot(f"{module}.bias", 0, positions))


def norm(module: str, positions: Positions = FIRST) -> tuple[Slot, ...]:
    names = ("weight", "bias", "running_mean", "running_var")
    return tuple(Slot(f"{module}.{name}", 0, positions) for name in names)


def columns(module: str, positions: Positions = FIRST, *, dim: int = 1) -> tuple[Slot, ...]:
    return (Slot(f"{module}.weight", dim, positions),)


def unit(
    name: str,
    width: int,
    theta: tuple[Slot, ...],
    consumers: tuple[Slot, ...],
    copies: tuple[Slot, ...] = (),
    depthwise: tuple[str, ...] = (),
    *,
    flat: bool = False,
) -> UnitSpec:
    return UnitSpec(name, width, theta, copies, consumers, depthwise, flat)


def plain(module: str, width: int, consumer: str, *, batch_norm: str | None = None) -> UnitSpec:
    """A layer's rows, up to the columns of one other layer; a bias where there is no norm."""
    if batch_norm is None:
        return unit(module, width, rows_bias(module), columns(consumer))
    return unit(module, width, rows(module), columns(consumer), norm(batch_norm))


# --- the families of the zoo --------------------------------------------------------------

MLP = _case(
    "mlp",
    lambda: zoo.MLP((3, 5, 4, 2), nn.Tanh),
    (6, 3),
    (plain("layers.0", 5, "layers.2"), plain("layers.2", 4, "layers.4")),
    ("layers.4",),
)

VGG = _case(
    "vgg_bn",
    lambda: zoo.VGG((3, 4, "M", 5, "M"), in_channels=2, num_classes=3, activation=nn.Softplus),
    (5, 2, 8, 8),
    (
        plain("features.0", 3, "features.3", batch_norm="features.1"),
        plain("features.3", 4, "features.7", batch_norm="features.4"),
        plain("features.7", 5, "classifier", batch_norm="features.8"),
    ),
    ("classifier",),
)

MOBILENET_V1 = _case(
    "mobilenet_v1",
    lambda: zoo.MobileNetV1(
        ((4, 2), (5, 1)), stem=3, in_channels=2, num_classes=2, activation=nn.Softplus
    ),
    (5, 2, 6, 6),
    (
        unit(
            "stem.0",
            3,
            theta=rows("stem.0") + rows("blocks.0.depthwise.0"),
            copies=norm("stem.1") + norm("blocks.0.depthwise.1"),
            consumers=columns("blocks.0.pointwise.0"),
            depthwise=("blocks.0.depthwise.0",),
        ),
        unit(
            "blocks.0.pointwise.0",
            4,
            theta=rows("blocks.0.pointwise.0") + rows("blocks.1.depthwise.0"),
            copies=norm("blocks.0.pointwise.1") + norm("blocks.1.depthwise.1"),
            consumers=columns("blocks.1.pointwise.0"),
            depthwise=("blocks.1.depthwise.0",),
        ),
        plain("blocks.1.pointwise.0", 5, "classifier", batch_norm="blocks.1.pointwise.1"),
    ),
    ("classifier",),
)


def _expanded(block: str, width: int) -> UnitSpec:
    """The neurons inside an inverted residual block."""
    return unit(
        f"{block}.expand.0",
        width,
        theta=rows(f"{block}.expand.0") + rows(f"{block}.depthwise.0"),
        copies=norm(f"{block}.expand.1") + norm(f"{block}.depthwise.1"),
        consumers=columns(f"{block}.project.0"),
        depthwise=(f"{block}.depthwise.0",),
    )


MOBILENET_V2 = _case(
    "mobilenet_v2",
    lambda: zoo.MobileNetV2(
        ((1, 4, 1, 1), (2, 3, 2, 2)),
        stem=3,
        last=5,
        in_channels=2,
        num_classes=2,
        activation=nn.SiLU,
    ),
    (5, 2, 6, 6),
    (
        unit(
            "stem.0",
            3,
            theta=rows("stem.0") + rows("blocks.0.depthwise.0"),
            copies=norm("stem.1") + norm("blocks.0.depthwise.1"),
            consumers=columns("blocks.0.project.0"),
            depthwise=("blocks.0.depthwise.0",),
        ),
        unit(
            "blocks.0.project.0",
            4,
            theta=rows("blocks.0.project.0"),
            copies=norm("blocks.0.project.1"),
            consumers=columns("blocks.1.expand.0"),
            flat=True,
        ),
        _expanded("blocks.1", 8),
        unit(
            "blocks.1.project.0",  # the residual stream
            3,
            theta=rows("blocks.1.project.0") + rows("blocks.2.project.0"),
            copies=norm("blocks.1.project.1") + norm("blocks.2.project.1"),
            consumers=columns("blocks.2.expand.0") + columns("last.0"),
            flat=True,
        ),
        _expanded("blocks.2", 6),
        plain("last.0", 5, "classifier", batch_norm="last.1"),
    ),
    ("classifier",),
)


def _hidden(block: str, width: int, batch_norm: str) -> UnitSpec:
    """The neurons inside a residual block."""
    return plain(f"{block}.conv1", width, f"{block}.conv2", batch_norm=f"{block}.{batch_norm}")


RESNET = _case(
    "resnet",
    lambda: zoo.ResNet(
        blocks=(1, 2),
        widths=(3, 4),
        hidden=(5, 2),
        in_channels=2,
        num_classes=3,
        activation=nn.Softplus,
    ),
    (5, 2, 6, 6),
    (
        unit(
            "stem.0",
            3,
            theta=rows("stem.0") + rows("stages.0.0.conv2"),
            copies=norm("stem.1") + norm("stages.0.0.norm2"),
            consumers=columns("stages.0.0.conv1")
            + columns("stages.1.0.conv1")
            + columns("stages.1.0.shortcut.0"),
        ),
        _hidden("stages.0.0", 5, "norm1"),
        _hidden("stages.1.0", 2, "norm1"),
        unit(
            "stages.1.0.conv2",
            4,
            theta=rows("stages.1.0.conv2")
            + rows("stages.1.0.shortcut.0")
            + rows("stages.1.1.conv2"),
            copies=norm("stages.1.0.norm2")
            + norm("stages.1.0.shortcut.1")
            + norm("stages.1.1.norm2"),
            consumers=columns("stages.1.1.conv1") + columns("classifier"),
        ),
        _hidden("stages.1.1", 2, "norm1"),
    ),
    ("classifier",),
)

PREACT_RESNET = _case(
    "preact_resnet",
    lambda: zoo.PreActResNet(
        blocks=(1, 2),
        widths=(3, 4),
        hidden=(5, 2),
        in_channels=2,
        num_classes=3,
        activation=nn.SiLU,
    ),
    (5, 2, 6, 6),
    (
        unit(
            "stem",
            3,
            theta=rows("stem") + rows("stages.0.0.conv2"),
            copies=norm("stages.0.0.norm1") + norm("stages.1.0.norm1"),
            consumers=columns("stages.0.0.conv1")
            + columns("stages.1.0.shortcut")
            + columns("stages.1.0.conv1"),
        ),
        _hidden("stages.0.0", 5, "norm2"),
        unit(
            "stages.1.0.shortcut",  # runs before conv1 and conv2 of its block
            4,
            theta=rows("stages.1.0.shortcut") + rows("stages.1.0.conv2") + rows("stages.1.1.conv2"),
            copies=norm("stages.1.1.norm1") + norm("norm"),
            consumers=columns("stages.1.1.conv1") + columns("classifier"),
        ),
        _hidden("stages.1.0", 2, "norm2"),
        _hidden("stages.1.1", 2, "norm2"),
    ),
    ("classifier",),
)


def _read(offset: int, *places: tuple[str, str]) -> dict[str, tuple[Slot, ...]]:
    """Copies and consumers of a unit that is `offset` entries into each (norm, layer)."""
    return {
        "copies": sum((norm(batch_norm, at(offset)) for batch_norm, _ in places), ()),
        "consumers": sum((columns(layer, at(offset)) for _, layer in places), ()),
    }


_LAYER1 = ("stages.0.0.norm1", "stages.0.0.conv1")
_LAYER2 = ("stages.0.1.norm1", "stages.0.1.conv1")
_TRANSITION = ("stages.1.norm", "stages.1.conv")
_LAYER3 = ("stages.2.0.norm1", "stages.2.0.conv1")
_END = ("norm", "classifier")

DENSENET = _case(
    "densenet",
    lambda: zoo.DenseNet(
        blocks=(2, 1),
        stem=3,
        growth=2,
        bottleneck=4,
        compression=0.8,
        in_channels=2,
        num_classes=3,
        activation=nn.Softplus,
    ),
    (5, 2, 4, 4),
    (
        unit("stem", 3, rows("stem"), **_read(0, _LAYER1, _LAYER2, _TRANSITION)),
        _hidden("stages.0.0", 4, "norm2"),
        unit("stages.0.0.conv2", 2, rows("stages.0.0.conv2"), **_read(3, _LAYER2, _TRANSITION)),
        _hidden("stages.0.1", 4, "norm2"),
        unit("stages.0.1.conv2", 2, rows("stages.0.1.conv2"), **_read(5, _TRANSITION)),
        unit("stages.1.conv", 5, rows("stages.1.conv"), **_read(0, _LAYER3, _END)),
        _hidden("stages.2.0", 4, "norm2"),
        unit("stages.2.0.conv2", 2, rows("stages.2.0.conv2"), **_read(5, _END)),
    ),
    ("classifier",),
)


def _gated(block: str, gate: str, width: int, consumer: str) -> UnitSpec:
    """Channels that are averaged for their own gate, and multiplied with it."""
    return unit(
        f"{block}.0",
        width,
        theta=rows(f"{block}.0") + rows_bias(f"{gate}.excite"),
        copies=norm(f"{block}.1"),
        consumers=columns(f"{gate}.squeeze") + columns(consumer),
    )


SENET = _case(
    "senet",
    lambda: zoo.SENet(
        widths=(4, 5), hidden=(3, 2), in_channels=2, num_classes=3, activation=nn.SiLU
    ),
    (5, 2, 6, 6),
    (
        _gated("blocks.0", "blocks.1", 4, "blocks.2.0"),
        plain("blocks.1.squeeze", 3, "blocks.1.excite"),
        _gated("blocks.2", "blocks.3", 5, "classifier"),
        plain("blocks.3.squeeze", 2, "blocks.3.excite"),
    ),
    ("classifier",),
)


def _up(name: str, width: int, consumer: str, offset: int) -> UnitSpec:
    """A transposed convolution, with its output channels in dimension 1."""
    return unit(
        name, width, rows_bias(name, dim=1), columns(consumer, at(offset)), flat=True
    )  # nothing between it and the next convolution


def _skip(name: str, batch_norm: str, width: int, below: str, merge: str) -> UnitSpec:
    """The channels at one level on the way down, read again on the way up."""
    return unit(name, width, rows(name), columns(below) + columns(merge), norm(batch_norm))


UNET = _case(
    "unet",
    lambda: zoo.UNet(widths=(2, 3, 4), in_channels=1, num_classes=3, activation=nn.Softplus),
    (4, 1, 8, 8),
    (
        plain("downs.0.0", 2, "downs.0.3", batch_norm="downs.0.1"),
        _skip("downs.0.3", "downs.0.4", 2, "downs.1.0", "merges.1.0"),
        plain("downs.1.0", 3, "downs.1.3", batch_norm="downs.1.1"),
        _skip("downs.1.3", "downs.1.4", 3, "bottom.0", "merges.0.0"),
        plain("bottom.0", 4, "bottom.3", batch_norm="bottom.1"),
        unit("bottom.3", 4, rows("bottom.3"), columns("ups.0", dim=0), norm("bottom.4")),
        _up("ups.0", 3, "merges.0.0", offset=3),
        plain("merges.0.0", 3, "merges.0.3", batch_norm="merges.0.1"),
        unit("merges.0.3", 3, rows("merges.0.3"), columns("ups.1", dim=0), norm("merges.0.4")),
        _up("ups.1", 2, "merges.1.0", offset=2),
        plain("merges.1.0", 2, "merges.1.3", batch_norm="merges.1.1"),
        plain("merges.1.3", 2, "head", batch_norm="merges.1.4"),
    ),
    ("head",),
)

TCN = _case(
    "tcn",
    lambda: zoo.TCN(
        widths=(3, 3, 4),
        hidden=(4, 2, 5),
        kernel_size=2,
        in_channels=2,
        num_classes=3,
        activation=nn.Softplus,
    ),
    (6, 2, 7),
    (
        plain("blocks.0.conv1", 4, "blocks.0.conv2"),
        unit(
            "blocks.0.conv2",
            3,
            theta=rows_bias("blocks.0.conv2")
            + rows_bias("blocks.0.shortcut")
            + rows_bias("blocks.1.conv2"),
            consumers=columns("blocks.1.conv1")
            + columns("blocks.2.conv1")
            + columns("blocks.2.shortcut"),
        ),
        plain("blocks.1.conv1", 2, "blocks.1.conv2"),
        plain("blocks.2.conv1", 5, "blocks.2.conv2"),
        unit(
            "blocks.2.conv2",
            4,
            theta=rows_bias("blocks.2.conv2") + rows_bias("blocks.2.shortcut"),
            consumers=columns("classifier"),
        ),
    ),
    ("classifier",),
)


def _transformer(name: str, mlp: Callable[..., nn.Module], activation: Any, spec: Any) -> Case:
    """Two blocks, of which only the hidden neurons of the MLPs can be split."""
    blocks = ("blocks.0", "blocks.1")
    attention = ("attention.query", "attention.key", "attention.value", "attention.out")
    return _case(
        name,
        lambda: zoo.Transformer(
            in_features=3,
            length=5,
            dim=4,
            heads=2,
            hidden=3,
            depth=2,
            num_classes=2,
            activation=activation,
            mlp=mlp,
        ),
        (4, 5, 3),
        tuple(spec(f"{block}.mlp") for block in blocks),
        (
            "embed",
            "position",
            *(f"{block}.{layer}" for block in blocks for layer in (*attention, "mlp.down")),
            "classifier",
        ),
    )


TRANSFORMER = _transformer(
    "transformer", zoo.FeedForward, nn.GELU, lambda mlp: plain(f"{mlp}.up", 3, f"{mlp}.down")
)

TRANSFORMER_GATED = _transformer(
    "transformer_gated",
    zoo.GatedFeedForward,
    nn.SiLU,
    lambda mlp: unit(
        f"{mlp}.gate",
        3,
        theta=rows_bias(f"{mlp}.gate") + rows_bias(f"{mlp}.up"),
        consumers=columns(f"{mlp}.down"),
    ),
)

TRANSFORMER_FUSED = _transformer(
    "transformer_fused",
    zoo.FusedGatedFeedForward,
    nn.SiLU,
    lambda mlp: unit(
        f"{mlp}.gate_up",
        3,
        theta=rows_bias(f"{mlp}.gate_up", positions=twice(3)),
        consumers=columns(f"{mlp}.down"),
    ),
)


def _prototypes(name: str, distances: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return _case(
        name,
        lambda: zoo.PrototypeNet((2, 5, 3), 4, 3, activation=nn.Tanh, distances=distances),
        (6, 2),
        (
            plain("encoder.layers.0", 5, "encoder.layers.2"),
            unit("prototypes", 4, (Slot("prototypes", 0),), columns("classifier")),
        ),
        ("encoder.layers.2", "classifier"),  # a distance sums over the encoder's outputs
    )


PROTOTYPES = _prototypes("prototypes", zoo.euclidean_distances)
PROTOTYPES_SQUARED = _prototypes("prototypes_squared", zoo.squared_distances)

_RADIAL = (Slot("scale", 0), Slot("shift", 0))

RBF = _case(
    "rbf",
    lambda: zoo.RBFNet(2, 4, 3),
    (6, 2),
    (unit("scale", 4, _RADIAL, columns("head")),),
    ("head",),
)

RBF_SUM = _case(
    "rbf_sum",
    lambda: zoo.RBFSumNet(2, 4, 3),
    (6, 2),
    (unit("scale", 4, _RADIAL, (Slot("weight", 1),)),),
    ("weight",),
)


# --- one feature each ---------------------------------------------------------------------


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) to (B, C)
        return x.mean((2, 3))


class _LayerScale(nn.Module):
    """x + gamma * f(x), gamma one number per channel."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, hidden, 1)
        self.activation = nn.SiLU()
        self.conv2 = nn.Conv2d(hidden, channels, 1)
        self.gamma = nn.Parameter(torch.rand(channels, 1, 1) + 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.conv2(self.activation(self.conv1(x)))


class _Within(nn.Module):
    """x + act(conv(x)): one convolution reads and writes the same channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.conv(x))


class _BothSigns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) to (B, 2 C, H, W)
        return torch.cat([x, -x], 1)


PRELU = _case(
    "prelu",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.PReLU(3),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.PReLU(4),
        _Pool(),
        nn.Linear(4, 5),
        nn.PReLU(),  # one slope for all: no neuron's own
        nn.Linear(5, 2),
    ),
    (5, 2, 5, 5),
    (
        unit("0", 3, rows_bias("0") + rows("1"), columns("2")),
        unit("2", 4, rows("2") + rows("4"), columns("6"), norm("3")),
        unit("6", 5, rows_bias("6"), columns("8"), flat=True),  # away from the kink
    ),
    ("8",),
)

FLATTEN = _case(
    "flatten",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.Softplus(),
        nn.AvgPool2d(2),
        nn.Flatten(),  # (B, 3 * 2 * 2)
        nn.Linear(12, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    ),
    (5, 2, 6, 6),
    (unit("0", 3, rows_bias("0"), columns("4", runs_of(4))), plain("4", 4, "6")),
    ("6",),
)

LAYER_SCALE = _case(
    "layer_scale",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), _LayerScale(3, 4), nn.Softplus(), _Pool(), nn.Linear(3, 2)
    ),
    (5, 2, 4, 4),
    (
        unit(
            "0",
            3,
            theta=rows_bias("0") + rows_bias("1.conv2") + (Slot("1.gamma", 0),),
            consumers=columns("1.conv1") + columns("4"),
        ),
        plain("1.conv1", 4, "1.conv2"),
    ),
    ("4",),
)

TRANSPOSED_CONV = _case(
    "transposed_conv",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Softplus(),
        nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.SiLU(),
        nn.Conv2d(4, 2, 1),
    ),
    (4, 2, 6, 6),
    (
        unit("0", 3, rows_bias("0"), columns("2", dim=0)),
        unit("2", 4, rows("2", dim=1), columns("5"), norm("3")),
    ),
    ("5",),
)

DEPTHWISE_MULTIPLIER = _case(
    "depthwise_multiplier",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Softplus(),
        nn.Conv2d(3, 6, 3, padding=1, groups=3, bias=False),
        nn.BatchNorm2d(6),
        nn.SiLU(),
        nn.Conv2d(6, 4, 1),
        nn.Softplus(),
        _Pool(),
        nn.Linear(4, 2),
    ),
    (5, 2, 5, 5),
    (
        unit(
            "0",
            3,
            theta=rows_bias("0") + rows("2", positions=runs_of(2)),
            copies=norm("3", runs_of(2)),
            consumers=columns("5", runs_of(2)),
            depthwise=("2",),
        ),
        plain("5", 4, "8"),
    ),
    ("8",),
)

STREAM_TO_STREAM = _case(
    "stream_to_stream",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 1), _Within(3), _Within(3), nn.Softplus(), _Pool(), nn.Linear(3, 2)
    ),
    (5, 2, 5, 5),
    (
        unit(
            "0",
            3,
            theta=rows_bias("0") + rows_bias("1.conv") + rows_bias("2.conv"),
            consumers=columns("1.conv") + columns("2.conv") + columns("5"),
        ),
    ),
    ("5",),
)

BOTH_SIGNS = _case(
    "both_signs",
    lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        _BothSigns(),
        nn.BatchNorm2d(6),
        nn.Softplus(),
        nn.Conv2d(6, 4, 1),
        nn.Softplus(),
        _Pool(),
        nn.Linear(4, 2),
    ),
    (5, 2, 4, 4),
    (
        unit("0", 3, rows("0"), columns("4", twice(3)), norm("2", twice(3))),
        plain("4", 4, "7"),
    ),
    ("7",),
)

CASES: tuple[Case, ...] = (
    MLP,
    VGG,
    MOBILENET_V1,
    MOBILENET_V2,
    RESNET,
    PREACT_RESNET,
    DENSENET,
    SENET,
    UNET,
    TCN,
    TRANSFORMER,
    TRANSFORMER_GATED,
    TRANSFORMER_FUSED,
    PROTOTYPES,
    PROTOTYPES_SQUARED,
    RBF,
    RBF_SUM,
    PRELU,
    FLATTEN,
    LAYER_SCALE,
    TRANSPOSED_CONV,
    DEPTHWISE_MULTIPLIER,
    STREAM_TO_STREAM,
    BOTH_SIGNS,
)
