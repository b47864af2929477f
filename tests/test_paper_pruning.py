"""The pruning baselines: which channels stay, and that the cut is in the right places."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitgrow import zoo
from splitgrow.cost import CostModel
from splitgrow.errors import InputError
from splitgrow.paper.pruning import add_sparsity_gradient, prune, prune_to, widths
from splitgrow.units import find_units

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def vgg() -> zoo.VGG:
    return shaken(zoo.VGG((6, "M", 8, 10), num_classes=5))


def mobilenet() -> zoo.MobileNetV1:
    return shaken(zoo.MobileNetV1(((8, 1), (10, 2)), stem=6, num_classes=5))


def shaken(model: Any) -> Any:
    """Scales, shifts and running statistics that differ from channel to channel."""
    for norm in norms(model):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model.eval()


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def top(scores: Tensor, count: int) -> list[int]:
    ranked = sorted(range(len(scores)), key=lambda j: -scores[j].item())
    return sorted(ranked[:count])


def set_scales(norm: nn.BatchNorm2d, values: list[float]) -> None:
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(values))


both = pytest.mark.parametrize("how", ["l1", "bn"])
every_net = pytest.mark.parametrize("build", [vgg, mobilenet])


# --- which channels stay, and what is left of them ----------------------------------------------


def expected_vgg(model: zoo.VGG, kept: list[list[int]]) -> zoo.VGG:
    """Cut by hand: rows of each convolution, its norm, and columns of what reads it."""
    made = zoo.VGG((len(kept[0]), "M", len(kept[1]), len(kept[2])), num_classes=5)
    before = [0, 1, 2]
    layers = zip(convolutions(model), norms(model), convolutions(made), norms(made), strict=True)
    for rows, (conv, norm, new_conv, new_norm) in zip(kept, layers, strict=True):
        new_conv.weight.data = conv.weight.data[rows][:, before]
        new_norm.load_state_dict(
            {k: v[rows] if v.ndim else v for k, v in norm.state_dict().items()}
        )
        before = rows
    made.classifier.weight.data = model.classifier.weight.data[:, before]
    made.classifier.bias.data = model.classifier.bias.data
    return made.eval()


def assert_same_net(got: nn.Module, expected: nn.Module) -> None:
    state, wanted = got.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name in state:
        assert torch.equal(state[name], wanted[name]), name
    assert torch.equal(got(X), expected(X))
    assert repr(got) == repr(expected)  # out_channels, num_features, groups


def test_l1_keeps_the_largest_filters_of_each_layer() -> None:
    model = vgg()
    kept = [
        top(conv.weight.abs().sum((1, 2, 3)), count)
        for conv, count in zip(convolutions(model), (3, 4, 5), strict=True)
    ]
    assert_same_net(prune(model, X, "l1", 0.5), expected_vgg(model, kept))


def test_bn_keeps_the_largest_scales_of_all_layers_together() -> None:
    model = vgg()
    set_scales(norms(model)[0], [0.9, 0.01, -0.95, 0.02, 0.8, 0.03])  # the sign does not count
    set_scales(norms(model)[1], [0.1, 0.2, 0.3, 0.11, 0.12, 0.13, 0.14, 0.15])
    set_scales(norms(model)[2], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.04, 0.05, 0.06])
    kept = [[0, 2, 4], [1, 2], [0, 1, 2, 3, 4, 5, 6]]
    assert_same_net(prune(model, X, "bn", 0.5), expected_vgg(model, kept))  # 12 of 24


def test_bn_scores_are_not_relative_to_their_layer() -> None:
    """What Torch-Pruning's own default would do: every layer would then shrink alike."""
    model = vgg()
    for norm, scale in zip(norms(model), (1.0, 1e-3, 1.0), strict=True):
        nn.init.uniform_(norm.weight, scale, 1.5 * scale)
    small = prune(model, X, "bn", 18 / 24)
    assert list(widths(small).values()) == [6, 2, 10]


@both
def test_ties_do_not_cut_more_than_asked(how: Any) -> None:
    model = vgg()
    for p in model.parameters():
        nn.init.ones_(p)
    assert sum(widths(prune(model, X, how, 0.75)).values()) == 18


@both
@pytest.mark.parametrize("least", [1, 2, 4])
def test_no_layer_is_emptied(how: Any, least: int) -> None:
    model = vgg()
    set_scales(norms(model)[1], [0.0] * 7 + [1e-6])
    small = prune(model, X, how, 0.01, least=least)
    assert list(widths(small).values()) == [least] * 3
    if how == "bn":
        assert norms(small)[1].weight.abs().max() == 1e-6  # the highest of the layer stays
    assert small(X).shape == (2, 5)


@both
def test_no_layer_falls_below_its_floor(how: Any) -> None:
    model = vgg()
    set_scales(norms(model)[1], [0.0] * 8)  # a ranking of all layers together would empty this one
    expected = [-(-width // 2) for width in widths(model).values()]
    small = prune(model, X, how, 0.6, floor=0.5)
    assert all(got >= low for got, low in zip(widths(small).values(), expected, strict=True))
    if how == "bn":
        assert widths(small)[list(widths(model))[1]] == expected[1]
        assert sum(widths(small).values()) == round(0.6 * sum(widths(model).values()))


def test_channels_kept_for_their_layer_count_as_kept() -> None:
    model = vgg()
    set_scales(norms(model)[1], [0.0] * 8)
    assert sum(widths(prune(model, X, "bn", 0.5, least=4)).values()) == 12


def test_l1_of_a_depthwise_net_ranks_by_the_convolution_that_makes_the_channels() -> None:
    model = mobilenet()
    first, second = model.blocks
    with torch.no_grad():  # a depthwise filter that would turn the order around if it counted
        norm = first.pointwise[0].weight.abs().sum((1, 2, 3))
        second.depthwise[0].weight.copy_((100 / norm)[:, None, None, None].expand(8, 1, 3, 3))
    small = prune(model, X, "l1", 0.5)
    rows = top(norm, 4)
    inner = top(model.stem[0].weight.abs().sum((1, 2, 3)), 3)
    outer = top(second.pointwise[0].weight.abs().sum((1, 2, 3)), 5)
    a, b = small.blocks
    assert torch.equal(a.depthwise[0].weight, first.depthwise[0].weight[inner])
    assert torch.equal(a.pointwise[0].weight, first.pointwise[0].weight[rows][:, inner])
    assert torch.equal(a.pointwise[1].running_var, first.pointwise[1].running_var[rows])
    assert torch.equal(b.depthwise[0].weight, second.depthwise[0].weight[rows])
    assert torch.equal(b.depthwise[1].bias, second.depthwise[1].bias[rows])
    assert torch.equal(b.pointwise[0].weight, second.pointwise[0].weight[outer][:, rows])
    assert torch.equal(small.classifier.weight, model.classifier.weight[:, outer])
    assert (b.depthwise[0].groups, b.depthwise[0].in_channels, b.depthwise[0].out_channels) == (
        4, 4, 4,
    )  # fmt: skip


def test_bn_of_a_depthwise_net_takes_the_mean_over_both_norms() -> None:
    model = mobilenet()
    stem, inner, outer = model.stem[1], model.blocks[0], model.blocks[1]
    set_scales(stem, [9.0] * 6)
    set_scales(inner.depthwise[1], [9.0] * 6)
    set_scales(outer.pointwise[1], [9.0] * 10)
    # the mean keeps 2, 3, 4, 5; the first norm alone 0, 3, 4, 5; the second alone 1, 2, 3, 4
    set_scales(inner.pointwise[1], [1.0, 0.0, 0.4, 2.0, 2.0, 2.0, 0.1, 0.1])
    set_scales(outer.depthwise[1], [0.0, 1.0, 1.1, 2.0, 2.0, -0.6, 0.1, 0.1])
    small = prune(model, X, "bn", 20 / 24)
    assert widths(small)["blocks.0.pointwise.0"] == 4
    rows = [2, 3, 4, 5]
    assert torch.equal(small.blocks[0].pointwise[0].weight, inner.pointwise[0].weight[rows])
    assert torch.equal(small.blocks[1].depthwise[1].weight, outer.depthwise[1].weight[rows])


class Residual(nn.Module):
    """Two convolutions are added, so channel j of both is one; then a flatten over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 1)
        self.hidden = nn.Linear(4 * 64, 7)
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        return self.out(self.hidden((a + self.b(a)).flatten(1)).relu())


def test_l1_of_added_layers_is_the_mean_and_linear_layers_stay() -> None:
    model = Residual()
    with torch.no_grad():
        model.a.weight.copy_(torch.tensor([5.0, 1.0, 2.0, 4.0])[:, None, None, None] / 27)
        model.b.weight.copy_(torch.tensor([0.1, 7.0, 2.0, 0.2])[:, None, None, None] / 4)
    small = prune(model, X, "l1", 0.5)
    rows = [0, 1]  # sums 5.1, 8.0, 4.0, 4.2
    assert torch.equal(small.a.weight, model.a.weight[rows])
    assert torch.equal(small.a.bias, model.a.bias[rows])
    assert torch.equal(small.b.weight, model.b.weight[rows][:, rows])
    columns = model.hidden.weight.view(7, 4, 64)[:, rows].flatten(1)
    assert torch.equal(small.hidden.weight, columns)
    assert small.out.weight.shape == (5, 7)


# --- the cut changes nothing else ---------------------------------------------------------------


@both
@every_net
def test_channels_that_do_nothing_can_go(build: Callable[[], nn.Module], how: Any) -> None:
    """With zero filters and affines in 1 of 2 channels, the pruned net is the same function."""
    model = build().double()
    with torch.no_grad():
        for conv, norm in zip(convolutions(model), norms(model), strict=True):
            for tensor in (conv.weight, norm.weight, norm.bias):
                tensor[::2] = 0
    small = prune(model, X.double(), how, 0.5)
    assert list(widths(small).values()) == [w // 2 for w in widths(model).values()]
    torch.testing.assert_close(small(X.double()), model(X.double()))
    assert (model(X.double()) - model.classifier.bias).abs().min() > 1e-6


@both
@every_net
def test_keeping_all_changes_nothing(build: Callable[[], nn.Module], how: Any) -> None:
    model = build()
    assert_same_net(prune(model, X, how, 1.0), model)


@both
@every_net
def test_the_model_is_left_as_it_was(build: Callable[[], nn.Module], how: Any) -> None:
    model = build().train()
    norms(model)[0].eval()
    model.classifier.weight.requires_grad_(False)
    model(X).sum().backward()
    state = copy.deepcopy(model.state_dict())
    ids = [(id(p), id(p.grad), p.requires_grad) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    with torch.no_grad():
        small = prune(model, X, how, 0.5)
    assert [(id(p), id(p.grad), p.requires_grad) for p in model.parameters()] == ids
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    for net in (model, small):
        assert [m.training for m in net.modules()] == modes
        assert [p.requires_grad for p in net.parameters()] == [grad for *_, grad in ids]
        assert not any(m._forward_hooks for m in net.modules())


def test_frozen_layers_are_seen_too() -> None:
    model = vgg()
    expected = prune(model, X, "l1", 0.5)
    assert_same_net(prune(model.requires_grad_(False), X, "l1", 0.5), expected)


@both
@every_net
def test_the_pruned_net_is_of_its_class_and_trains(
    build: Callable[[], nn.Module], how: Any
) -> None:
    model = build()
    small = prune(model, X, how, 0.5).train()
    assert type(small) is type(model)
    before = [p.detach().clone() for p in small.parameters()]
    small(X).square().sum().backward()
    torch.optim.SGD(small.parameters(), lr=0.1).step()
    moved = zip(small.parameters(), before, strict=True)
    assert all(p.is_leaf and not torch.equal(p, old) for p, old in moved)


@both
@every_net
def test_units_and_costs_of_the_pruned_net(build: Callable[[], nn.Module], how: Any) -> None:
    model = build()
    small = prune(model, X, how, 0.5)
    units, before = find_units(small, X), find_units(model, X)
    assert [unit.name for unit in units] == [unit.name for unit in before]
    assert {unit.name: unit.width for unit in units}.items() <= widths(small).items()
    cost, full = CostModel(units).total(), CostModel(before).total()
    assert cost.params == size(small) < size(model) == full.params
    assert cost.macs < full.macs


@both
@every_net
def test_steps_of_pruning(build: Callable[[], nn.Module], how: Any) -> None:
    model = build()
    nets = [model]
    for _ in range(4):
        nets.append(prune(nets[-1], X, how, 0.6, least=1))
    sizes = [size(net) for net in nets]
    assert sizes == sorted(set(sizes), reverse=True)
    assert nets[-1].train()(X).shape == (2, 5)


@both
@every_net
def test_pruned_to_a_number_of_parameters(build: Callable[[], nn.Module], how: Any) -> None:
    model = build()
    channels = 24  # of both nets; a depthwise layer has those of the layer before it
    for most in (size(model) - 1, size(model) // 2, size(model) // 3):
        small = prune_to(model, X, how, most)
        nets = [prune(model, X, how, k / channels) for k in range(1, channels + 1)]
        assert size(small) == max(size(net) for net in nets if size(net) <= most)
        assert small(X).shape == (2, 5)


def test_pruned_to_a_number_of_parameters_without_convolutions() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    assert size(prune_to(model, torch.randn(2, 4), "bn", 100)) == 10 * (4 + 1 + 2 + 2) + 2


def test_pruned_to_less_than_can_be() -> None:
    with pytest.raises(InputError, match="model: expected a torch"):
        prune_to("net", X, "l1", 10)  # type: ignore[type-var]
    model = vgg()
    with pytest.raises(InputError, match=r"floor: expected a share .* got 1\.5"):
        prune_to(model, X, "l1", 10, floor=1.5)
    with pytest.raises(InputError, match=r"least=2 and floor=0\.5, more than 10 parameters stay"):
        prune_to(model, X, "l1", 10, floor=0.5)


def test_a_single_sample_as_a_plain_tensor() -> None:
    """Torch-Pruning would try to unpack a tensor into positional inputs."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    expected = list(widths(prune(model, (X,), "l1", 0.5)).values())
    assert list(widths(prune(model, X[:1], "l1", 0.5)).values()) == expected == [2, 2]


def test_outputs_and_inputs_are_never_cut() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3, groups=3), nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.ReLU(),
    )  # fmt: skip
    for how in ("l1", "bn"):
        assert list(widths(prune(model, X, how, 0.1)).values()) == [3, 2, 6]


# --- the nets of the paper ----------------------------------------------------------------------


def vgg_size(c: list[int]) -> int:
    filters = sum(9 * a * b for a, b in zip([3, *c[:-1]], c, strict=True))
    return filters + 2 * sum(c) + 10 * c[-1] + 10


def mobilenet_size(c: list[int]) -> int:
    blocks = sum(9 * a + 2 * a + a * b + 2 * b for a, b in itertools.pairwise(c))
    return 27 * c[0] + 2 * c[0] + blocks + 10 * c[-1] + 10


@both
@pytest.mark.parametrize("keep", [0.7, 0.3, 0.1])
@pytest.mark.parametrize(
    ("build", "count", "step"), [(zoo.vgg19, vgg_size, 1), (zoo.mobilenet_v1, mobilenet_size, 2)]
)
def test_the_papers_nets(
    build: Callable[[], nn.Module], count: Callable[[list[int]], int], step: int, keep: float,
    how: Any,
) -> None:  # fmt: skip
    model = shaken(build())
    full = list(widths(model).values())[::step]  # a depthwise width is that before it
    small = prune(model, torch.randn(2, 3, 32, 32), how, keep)
    found = list(widths(small).values())[::step]
    assert size(model) == count(full)
    assert size(small) == count(found)
    assert all(new < old for new, old in zip(found, full, strict=True))
    if how == "l1":
        assert found == [round(keep * width) for width in full]
    assert abs(sum(found) - keep * sum(full)) < len(found)


# --- the sparsity term --------------------------------------------------------------------------


def test_the_sparsity_gradient_is_that_of_the_penalty() -> None:
    model, other = mobilenet(), mobilenet()
    other.load_state_dict(model.state_dict())
    for net in (model, other):
        with torch.no_grad():
            for norm in norms(net):
                norm.weight[0] = 0.0
                norm.weight[1] *= -1
    model(X).square().sum().backward()
    add_sparsity_gradient(model, 0.3)
    penalty = 0.3 * sum(norm.weight.abs().sum() for norm in norms(other))
    (other(X).square().sum() + penalty).backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_the_sparsity_gradient_by_default_and_of_frozen_scales() -> None:
    model = vgg()
    frozen = norms(model)[0].weight.requires_grad_(False)
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    add_sparsity_gradient(model)
    assert frozen.grad is None
    assert all((n.weight.grad == 1e-4).all() for n in norms(model)[1:])
    others = [p for n, p in model.named_parameters() if p.ndim > 1 or n.endswith("bias")]
    assert not any(p.grad.any() for p in others)


def test_the_sparsity_gradient_needs_gradients_and_norms() -> None:
    with pytest.raises(InputError, match=r"features\.1, features\.5, features\.8.*backward"):
        add_sparsity_gradient(vgg(), 1e-4)
    with pytest.raises(InputError, match="with none"):
        add_sparsity_gradient(nn.Linear(2, 2), 1e-4)


@pytest.mark.cuda
def test_the_sparsity_gradient_can_be_captured() -> None:
    model = vgg().cuda()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    add_sparsity_gradient(model, 0.5)  # warm up outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_sparsity_gradient(model, 0.5)
    with torch.no_grad():
        for norm in norms(model):
            norm.weight.neg_()  # a replay reads the values of its own time
            norm.weight.grad.zero_()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert all((norm.weight.grad == -1.0).all() for norm in norms(model))


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 0.0}, "keep: expected a share with 0 < keep <= 1, got 0.0"),
        ({"keep": 1.1}, "keep: expected a share"),
        ({"keep": float("nan")}, "keep: expected a share"),
        ({"how": "l2"}, 'how: expected "l1" or "bn", got \'l2\''),
        ({"least": 0}, "least: expected at least 1"),
        ({"floor": 0.8}, "floor: expected a share with 0 <= floor <= keep=0.5, got 0.8"),
        ({"floor": -0.1}, "floor: expected a share"),
        ({"model": vgg}, r"model: expected a torch\.nn\.Module, got function"),
        ({"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))}, "nothing can be pruned"),
        (
            {"model": nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=2))},
            r"1 \(Conv2d\): groups=2 mix",
        ),
        (
            {"model": nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1))},
            r"1 \(GroupNorm\): expected parameters in layers of the kinds ConvNd, BatchNorm",
        ),
    ],
)
def test_what_cannot_be_used(change: dict[str, Any], message: str) -> None:
    given = {"model": vgg(), "example_inputs": X, "how": "l1", "keep": 0.5, **change}
    with pytest.raises(InputError, match=message):
        prune(**given)


def test_scores_that_are_not_numbers() -> None:
    model = vgg()
    model.features[4].weight.data[2, 1] = float("nan")
    with pytest.raises(InputError, match=r"finite scores, got others in features\.4"):
        prune(model, X, "l1", 0.5)


class Mixed(nn.Module):
    """Sorts by a fixed number of channels: Torch-Pruning takes that for element-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)[:, torch.tensor([3, 2, 1, 0])])


class TwoOutputs(Mixed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a(x)
        return self.b(a), a


@pytest.mark.parametrize(
    ("build", "message"), [(Mixed, "does not run"), (TwoOutputs, "did not see an output")]
)
def test_what_the_dependency_graph_did_not_see(
    build: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prune(build(), X, "l1", 0.5)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(InputError, match=r'pip install "splitgrow\[pruning\]"'):
        prune(vgg(), X, "l1", 0.5)
