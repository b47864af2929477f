"""Parameters and MACs: counted from the layouts, compared with torch's own counters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import splitgrow as sg
from helpers_split import ConvNet, mlp, split_at_zero
from splitgrow import zoo

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(3, 5, 4, 2), (2, 3)),
    "convnet": (ConvNet, (2, 2, 5, 5)),
    "vgg": (lambda: zoo.VGG((3, 4, "M", 5, "M"), in_channels=2), (3, 2, 8, 8)),
    "mobilenet_v1": (lambda: zoo.MobileNetV1(((4, 2), (5, 1)), stem=3), (2, 3, 6, 6)),
    "mobilenet_v2": (lambda: zoo.MobileNetV2(((2, 3, 2, 2),), stem=4, last=5), (2, 3, 6, 6)),
    "resnet": (lambda: zoo.ResNet((1, 2), (3, 4), hidden=(5, 2), in_channels=2), (2, 2, 6, 6)),
    "densenet": (lambda: zoo.DenseNet((2, 1), stem=3, growth=2, in_channels=2), (2, 2, 6, 6)),
    "unet": (lambda: zoo.UNet((2, 3, 4), in_channels=1), (2, 1, 8, 8)),
    "tcn": (lambda: zoo.TCN((3, 4), hidden=(5, 2), num_classes=2), (2, 1, 9)),
}


class Transposed(nn.Module):
    """Transposed convolutions with stride, padding, a bias and one group per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1)
        self.depthwise = nn.ConvTranspose2d(3, 3, 2, groups=3)
        self.leave = nn.ConvTranspose2d(3, 2, 2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.depthwise(torch.tanh(self.enter(x)))))


class Convolutions(nn.Module):
    """Dilated, depthwise with a multiplier, strided, grouped; a matrix product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(2, 4, 2, dilation=2)
        self.multiplied = nn.Conv3d(4, 8, 1, groups=4)
        self.mixed = nn.Conv3d(8, 6, 1, stride=2)
        self.grouped = nn.Conv3d(6, 4, 1, groups=2)
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mixed(torch.tanh(self.multiplied(torch.tanh(self.volume(x))))))
        return torch.tanh(self.grouped(x)).mean((2, 3, 4)) @ self.weight


MODELS["transposed"] = (Transposed, (2, 2, 3, 3))
MODELS["convolutions"] = (Convolutions, (2, 2, 5, 5, 5))


def counted(model: nn.Module, x: Tensor) -> sg.Cost:
    """By torch itself."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    params = sum(p.numel() for p in model.parameters())
    return sg.Cost(params, counter.get_total_flops() // 2 // len(x))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [1, 3])
def test_totals_are_those_of_torch(name: str, batch: int) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(batch, *shape[1:])
    cost = sg.CostModel(sg.find_units(model, (x,))).total()
    assert cost.params > 0
    assert cost.macs > 0
    assert cost == counted(model, x)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_added_is_what_a_split_adds(name: str) -> None:
    """Neuron after neuron of every unit, so that neighbours' widths count."""
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    units = sg.find_units(model, (x,))
    costs = sg.CostModel(units)
    assert len(units)
    widths, total = {}, costs.total()
    chosen: dict[str, list[int]] = {}
    for i, unit in enumerate(units):
        count = 1 + i % 2
        total += costs.added(unit, widths, count)
        widths[unit.axis] = unit.width + count
        chosen[unit.name] = list(range(count))
    split_at_zero(model, units, chosen)
    assert total == counted(model, x) == costs.total(widths)


@pytest.mark.parametrize("widths", [(4,), (1, 5), (3, 2, 6)])
def test_an_mlp_by_hand(widths: tuple[int, ...]) -> None:
    units = sg.find_units(mlp(3, *widths, 2), torch.randn(4, 3))
    grown = [w + 2 + i for i, w in enumerate(widths)]
    sizes = [3, *grown, 2]
    macs = sum(a * b for a, b in pairwise(sizes))
    axes = {unit.axis: width for unit, width in zip(units, grown, strict=True)}
    assert sg.CostModel(units).total(axes) == sg.Cost(macs + sum(sizes[1:]), macs)


class Formula(nn.Module):
    """A function of the input and some parameters."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((x @ q) @ (x @ k).transpose(1, 2)).softmax(-1) @ (x @ v)


# For each formula: its weights, MACs per sample, and what torch counts where that differs.
FORMULAS = {
    "attention": (attention, [(4, 4)] * 3, (5, 4), 3 * 5 * 4 * 4 + 2 * 5 * 5 * 4, None),
    "einsum": (lambda x, w: torch.einsum("bi,ij->bj", x, w), [(4, 3)], (4,), 12, None),
    "vector": (lambda x, w: x @ w, [(4,)], (5, 4), 20, 0),
    "outer": (lambda x, w: torch.einsum("bi,j->bij", x, w), [(3,)], (4,), 12, 0),
    "three": (
        lambda x, v, w: torch.einsum("bi,ij,jk->bk", x, v, w), [(4, 3), (3, 2)], (4,), 24, 18
    ),
    "weighted_sum": (lambda x, w: (x[:, None] * w).sum(-1), [(3, 4)], (4,), 0, None),
    "fused": (
        lambda x, w: torch.nn.functional.scaled_dot_product_attention(x, x, x @ w),
        [(4, 4)], (5, 4), 5 * 4 * 4, 5 * 4 * 4 + 2 * 5 * 5 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_conventions(name: str) -> None:
    """Where the count agrees with torch's, and where it does not."""
    function, shapes, shape, macs, by_torch = FORMULAS[name]
    model, x = Formula(function, *shapes), torch.randn(2, *shape)
    assert sg.CostModel(sg.find_units(model, (x,))).total().macs == macs
    assert counted(model, x).macs == (macs if by_torch is None else by_torch)


def test_parameters_that_are_used_count_once() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = mlp(3, 4, 2), nn.Linear(5, 6)
            self.again = self.net[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Spare()
    cost = sg.CostModel(sg.find_units(model, torch.randn(2, 3))).total()
    assert cost == sg.Cost(16 + 10, 12 + 8)
    assert cost.params == sum(p.numel() for p in model.net.parameters())
    tied = nn.Sequential(layer := nn.Linear(3, 3), nn.Tanh(), layer)
    assert sg.CostModel(sg.find_units(tied, torch.randn(2, 3))).total() == sg.Cost(12, 18)


def test_nothing_is_changed() -> None:
    model, x = ConvNet(), torch.randn(2, 2, 5, 5)
    units = sg.find_units(model, (x,))
    before = copy.deepcopy(model.state_dict())
    costs = sg.CostModel(units)
    assert costs.added(units[0], {}) == costs.added(units[0], {})
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert sg.Cost(3, 5) - sg.Cost(1, 2) + sg.Cost(0, 1) == sg.Cost(2, 4)
