"""Each way to grow keeps its own promise, and all of them keep the limits."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from helpers_split import mlp, mse
from splitgrow.additions import NOISE
from splitgrow.errors import InputError, LossError
from splitgrow.methods import METHODS, Growth, Nothing, Site, method_named
from splitgrow.select import Limits
from splitgrow.units import Units, named_tensors

ADDING = ("new", "net2net", "boosting")
Batches = list[tuple[Tensor, Tensor]]


def some_data() -> Batches:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(48, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    return [(x[:24], y[:24]), (x[24:], y[24:])]


class Grown:
    """A small net before and after one growth by a method."""

    def __init__(
        self,
        method: str,
        model: nn.Module,
        units: Units,
        *,
        batches: Batches | None = None,
        limits: Limits = Limits(3, None, None),  # noqa: B008  (frozen)
        policy: sg.Policy = sg.Policy(count=3),  # noqa: B008  (frozen)
        optimizer: Any = None,
        seed: int = 0,
    ) -> None:
        self.batches = batches or some_data()
        self.model = copy.deepcopy(model)
        self.before = copy.deepcopy(model)
        self.units = units
        self.optimizer = None if optimizer is None else optimizer(self.model)
        self.old_state = copy.deepcopy(state_by_name(self.model, self.optimizer))
        site = Site(
            self.model, units, mse, self.batches, policy, limits, self.optimizer,
            torch.Generator().manual_seed(seed),
        )  # fmt: skip
        self.growth = method_named(method).grow(site)

    @property
    def done(self) -> Growth:
        assert isinstance(self.growth, Growth), self.growth
        return self.growth

    def twins(self, unit: str) -> dict[int, int | None]:
        """Places of the unit's new neurons, each with the neuron that was divided."""
        return {g.twin: g.neuron for g in self.done.neurons if g.unit == unit}

    def loss_change(self) -> float:
        return total_loss(self.model, self.batches) - total_loss(self.before, self.batches)


def total_loss(model: nn.Module, batches: Batches) -> float:
    with torch.no_grad():
        return sum(mse(model, batch).item() for batch in batches) / len(batches)


def state_by_name(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    if optimizer is None:
        return {}
    return {n: dict(optimizer.state[p]) for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, Units]:
    """Two hidden layers, trained a little so that no neuron is like another."""
    torch.manual_seed(5)
    model = mlp(2, 4, 3, 1)
    sg.fit(model, some_data(), mse, epochs=5, lr=0.02)
    return model, sg.find_units(model, (some_data()[0][0],))


# --- limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_no_limit_is_ever_exceeded(name: str, net: tuple[nn.Module, Units]) -> None:
    model, units = net
    draw = random.Random(name)
    seed_cost = sg.CostModel(units).total()
    grown = 0
    for _ in range(25):
        limits = Limits(
            draw.choice([1, 2, 5, 9]), draw.choice([None, draw.randint(0, 60)]),
            draw.choice([None, draw.randint(0, 50)]),
        )  # fmt: skip
        policy = sg.Policy(
            count=9, round_to=draw.choice([1, 1, 2, 3]), max_per_unit=draw.choice([None, 1, 3]),
            per=draw.choice(["neuron", "params", "macs"]),
        )  # fmt: skip
        result = Grown(name, model, units, limits=limits, policy=policy, seed=draw.randint(0, 99))
        if isinstance(result.growth, Nothing):
            assert counted(result.model) == counted(model)
            continue
        grown += 1
        params, macs = counted(result.model)
        assert limits.params is None or params - seed_cost.params <= limits.params
        assert limits.macs is None or macs - seed_cost.macs <= limits.macs
        assert len(result.done.neurons) <= (limits.count or 0)
        check_caps(result, policy)
    assert grown >= 5


def counted(model: nn.Module) -> tuple[int, int]:
    """Parameters and MACs of an MLP, counted by hand."""
    layers = [m for m in model if isinstance(m, nn.Linear)]  # type: ignore[attr-defined]
    return sum(p.numel() for p in model.parameters()), sum(m.weight.numel() for m in layers)


def check_caps(result: Grown, policy: sg.Policy) -> None:
    for unit in result.units:
        new = len(result.twins(unit.name))
        assert policy.max_per_unit is None or new <= policy.max_per_unit
        assert not new or (unit.width + new) % policy.round_to == 0


@pytest.mark.parametrize("name", ["random", "random-neuron", "new", "net2net", "boosting"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_baseline_grows_as_many_neurons_as_asked_for(
    name: str, count: int, net: tuple[nn.Module, Units]
) -> None:
    result = Grown(name, *net, limits=Limits(count, None, None))
    assert len(result.done.neurons) == count
    for unit in result.units:
        width = named_tensors(result.model)[f"{unit.name}.weight"].shape[0]
        assert sorted(result.twins(unit.name)) == list(range(unit.width, width))


def test_why_nothing_was_grown(net: tuple[nn.Module, Units]) -> None:
    def reason(limits: Limits, name: str = "random", **policy: Any) -> str:
        found = Grown(name, *net, limits=limits, policy=sg.Policy(count=3, **policy)).growth
        assert isinstance(found, Nothing)
        return found.reason

    assert reason(Limits(3, 2, None)) == "params"
    assert reason(Limits(3, None, 1)) == "macs"
    assert reason(Limits(3, 1000, 1)) == "macs"
    assert reason(Limits(3, 2, 1000)) == "params"
    assert reason(Limits(3, 1, 1)) == "params"
    assert reason(Limits(3, None, None), round_to=64) == "policy"
    assert reason(Limits(3, 1000, None), max_per_unit=0) == "policy"
    assert reason(Limits(3, None, None), "splitting", threshold=-1e9) == "stable"


# --- splitting ----------------------------------------------------------------------------


def test_splitting_takes_the_lowest_indexes_and_lowers_the_loss(
    net: tuple[nn.Module, Units],
) -> None:
    model, units = net
    result = Grown("splitting", *net)
    scores = sg.score(model, mse, result.batches, units=units)
    lowest = sorted(v for found in scores.values() for v in found.values.tolist())[:3]
    assert sorted(g.lambda_ or 0.0 for g in result.done.neurons) == lowest
    assert result.done.measured == pytest.approx(result.loss_change(), abs=1e-7)
    assert result.loss_change() < 0
    assert result.done.predicted == pytest.approx(
        sum(g.predicted or 0.0 for g in result.done.neurons)
    )


def test_a_fixed_step_is_taken_as_it_is(net: tuple[nn.Module, Units]) -> None:
    result = Grown("splitting", *net, policy=sg.Policy(count=3, step=1e-3))
    assert {g.step for g in result.done.neurons} == {1e-3}
    assert result.done.step == 1e-3
    assert not result.done.relative
    assert Grown("splitting", *net).done.relative


def test_refused_leaves_everything_as_it_was(net: tuple[nn.Module, Units]) -> None:
    """So large a constant in the loss that no change shows above its rounding."""
    model, units = net
    changed = copy.deepcopy(model)
    optimizer = torch.optim.Adam(changed.parameters())
    site = Site(
        changed, units, lambda m, batch: mse(m, batch) + 1e6, some_data(), sg.Policy(count=3),
        Limits(3, None, None), optimizer,
    )  # fmt: skip
    found = method_named("splitting").grow(site)
    assert isinstance(found, Nothing)
    assert found.reason == "refused"
    assert same_state(changed, model)


def same_state(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_indexes_that_are_no_numbers_are_an_error_and_not_stable(
    net: tuple[nn.Module, Units], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, units = net
    found = sg.score(model, mse, some_data(), units=units)
    found["0"].values[1] = math.nan
    monkeypatch.setattr("splitgrow.methods.score", lambda *_, **__: found)
    with pytest.raises(InputError, match=r"0, neuron 1: its splitting index is nan"):
        Grown("splitting", model, units)


# --- random -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "random-neuron", "new", "net2net"])
def test_neurons_are_drawn_anew_with_every_seed(name: str, net: tuple[nn.Module, Units]) -> None:
    def chosen(seed: int) -> tuple[Any, ...]:
        found = Grown(name, *net, limits=Limits(2, None, None), seed=seed)
        return tuple((g.unit, g.neuron, g.twin) for g in found.done.neurons)

    assert chosen(4) == chosen(4)
    assert len({chosen(seed) for seed in range(8)}) > 1


@pytest.mark.parametrize("name", ["random", "random-neuron", "net2net"])
def test_every_neuron_is_drawn_about_as_often(name: str, net: tuple[nn.Module, Units]) -> None:
    model, units = net
    drawn: dict[tuple[str, int | None], int] = {}
    for seed in range(70):
        (one,) = Grown(name, model, units, limits=Limits(1, None, None), seed=seed).done.neurons
        drawn[one.unit, one.neuron] = drawn.get((one.unit, one.neuron), 0) + 1
    assert len(drawn) == 7  # of 4 + 3; that one is missed has a chance of 7 * (6/7)**70 = 1e-4
    assert max(drawn.values()) < 25


def test_a_random_direction_has_no_index_and_a_random_neuron_its_own(
    net: tuple[nn.Module, Units],
) -> None:
    model, units = net
    scores = sg.score(model, mse, some_data(), units=units)
    for neuron in Grown("random-neuron", model, units).done.neurons:
        assert neuron.neuron is not None
        assert neuron.lambda_ == pytest.approx(scores[neuron.unit].values[neuron.neuron].item())
        assert neuron.predicted is not None
    result = Grown("random", model, units)
    assert all(g.lambda_ is None and g.predicted is None for g in result.done.neurons)
    assert result.done.predicted is None


@pytest.mark.parametrize("name", ["random", "random-neuron"])
def test_a_random_split_changes_the_net_little_where_it_cannot_help(
    name: str, net: tuple[nn.Module, Units]
) -> None:
    for seed in range(6):
        result = Grown(name, *net, seed=seed)
        assert result.loss_change() < 1e-5
        assert result.done.measured == pytest.approx(result.loss_change(), abs=1e-7)
        assert {neuron.step for neuron in result.done.neurons} != {0.0}
        old = result.before.state_dict()["0.weight"]
        moved = result.model.state_dict()["0.weight"][: len(old)]
        divided = {g.neuron for g in result.done.neurons if g.unit == "0"}
        for k in range(len(old)):
            assert torch.equal(moved[k], old[k]) == (k not in divided)


# --- new neurons --------------------------------------------------------------------------


def old_entries_are_the_same(result: Grown) -> bool:
    """Every entry that was there before is there now, bit for bit."""
    for name, old in result.before.state_dict().items():
        now = result.model.state_dict()[name]
        if not torch.equal(now[tuple(slice(size) for size in old.shape)], old):
            return False
    return True


def test_a_new_neuron_has_no_effect(net: tuple[nn.Module, Units]) -> None:
    for seed in range(5):
        result = Grown("new", *net, limits=Limits(5, None, None), seed=seed)
        x = torch.randn(32, 2)
        assert torch.allclose(result.model(x), result.before(x), rtol=0, atol=1e-6)
        assert old_entries_are_the_same(result)
        assert abs(result.done.measured or 0.0) < 1e-7
        assert result.done.parity < 1e-6
        assert all(g.neuron is None for g in result.done.neurons)


def test_a_new_neuron_has_weights_as_its_layer_would_at_the_start() -> None:
    """Uniform within 1/sqrt(fan in), also where the layer before grows at the same time."""
    model = mlp(2, 4, 6, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(50)  # trained weights are no measure of fresh ones
    units = sg.find_units(model, (some_data()[0][0],))
    weights = []
    for seed in range(12):
        result = Grown("new", model, units, limits=Limits(10, None, None), seed=seed)
        weight = result.model.state_dict()["2.weight"]
        readers, bound = result.twins("0"), 1 / math.sqrt(weight.shape[1])
        for k in result.twins("2"):
            row = weight[k]
            assert row.abs().max() <= bound
            weights += [w for i, w in enumerate((row / bound).tolist()) if i not in readers]
    assert len(weights) > 50
    assert 0.4 < sum(abs(w) for w in weights) / len(weights) < 0.6
    assert len(set(weights)) == len(weights)


def test_columns_that_read_a_new_neuron_are_silent(net: tuple[nn.Module, Units]) -> None:
    result = Grown("new", *net, limits=Limits(5, None, None))
    for unit, reader in (("0", "2.weight"), ("2", "4.weight")):
        for twin in result.twins(unit):
            assert not result.model.state_dict()[reader][:, twin].any()


# --- net2net ------------------------------------------------------------------------------


def test_a_duplicate_changes_the_net_by_its_noise_alone(net: tuple[nn.Module, Units]) -> None:
    for seed in range(5):
        result = Grown("net2net", *net, seed=seed)
        x = torch.randn(64, 2)
        change = (result.model(x) - result.before(x)).abs().max().item()
        assert 0 < change < 0.05 * result.before(x).abs().max().item()
        old, now = (m.state_dict()["0.weight"] for m in (result.before, result.model))
        spread = old.square().mean().sqrt().item()
        for twin, parent in result.twins("0").items():
            assert torch.equal(now[parent], old[parent])
            noise = now[twin] - old[parent]
            assert 0 < noise.abs().max().item() < 5 * NOISE * spread


def test_the_columns_of_a_duplicate_are_shared(net: tuple[nn.Module, Units]) -> None:
    result = Grown("net2net", *net, limits=Limits(1, None, None), seed=1)
    (one,) = result.done.neurons
    reader = {"0": "2.weight", "2": "4.weight"}[one.unit]
    old, now = (m.state_dict()[reader] for m in (result.before, result.model))
    assert torch.equal(now[:, one.neuron], old[:, one.neuron] / 2)
    assert torch.equal(now[:, one.twin], old[:, one.neuron] / 2)


# --- boosting -----------------------------------------------------------------------------


def test_boosting_moves_no_old_entry_and_never_raises_the_loss(
    net: tuple[nn.Module, Units],
) -> None:
    lowered = 0
    for seed in range(8):
        result = Grown("boosting", *net, limits=Limits(1 + seed % 4, None, None), seed=seed)
        assert old_entries_are_the_same(result)
        assert result.loss_change() <= 1e-8
        assert result.done.measured == pytest.approx(result.loss_change(), abs=1e-7)
        lowered += result.loss_change() < -1e-4
    assert lowered >= 6


def test_where_nothing_can_be_gained_boosting_adds_neurons_without_effect() -> None:
    """A net that fits its data exactly: every fit makes it worse."""
    model = mlp(2, 3, 1)
    x = torch.randn(16, 2)
    with torch.no_grad():
        batches = [(x, model(x))]
    units = sg.find_units(model, (x,))
    result = Grown("boosting", model, units, batches=batches)
    assert result.loss_change() <= 1e-12
    for twin in result.twins("0"):
        assert not result.model.state_dict()["2.weight"][:, twin].any()


def test_boosting_leaves_frozen_parameters_alone(net: tuple[nn.Module, Units]) -> None:
    model = copy.deepcopy(net[0])
    model.get_submodule("4").requires_grad_(False)
    units = sg.find_units(model, (some_data()[0][0],))
    result = Grown("boosting", model, units, seed=2)
    assert old_entries_are_the_same(result)
    assert result.loss_change() <= 1e-8


def test_gradients_and_modes_are_left_alone(net: tuple[nn.Module, Units]) -> None:
    model = copy.deepcopy(net[0])
    model.train()
    model[1].eval()  # type: ignore[index]
    for name in METHODS:
        result = Grown(name, model, net[1])
        assert [m.training for m in result.model.modules()] == [m.training for m in model.modules()]
        assert all(p.grad is None for p in result.model.parameters())
        assert all(p.requires_grad for p in result.model.parameters())


# --- optimizers ---------------------------------------------------------------------------


def trained_with(kind: str) -> Any:
    """An optimizer of a model that has taken a few steps, which are taken back."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        kept = {n: t.clone() for n, t in model.state_dict().items()}
        optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.01) if kind == "adam"
            else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        )  # fmt: skip
        for batch in some_data():
            optimizer.zero_grad()
            mse(model, batch).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(kept)
        return optimizer

    return make


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("name", ["new", "boosting"])
def test_a_new_neuron_starts_without_state_and_the_others_keep_theirs(
    name: str, kind: str, net: tuple[nn.Module, Units]
) -> None:
    result = Grown(name, *net, optimizer=trained_with(kind), limits=Limits(5, None, None))
    state = state_by_name(result.model, result.optimizer)
    new = {"0.weight": ("0", None), "0.bias": ("0", None), "2.weight": ("2", "0"),
           "2.bias": ("2", None), "4.weight": (None, "2"), "4.bias": (None, None)}  # fmt: skip
    for parameter, (rows, columns) in new.items():
        for key, old in result.old_state[parameter].items():
            now = state[parameter][key]
            if key == "step":
                assert now == old
                continue
            assert old.any()
            assert now.shape == dict(result.model.named_parameters())[parameter].shape
            assert torch.equal(now[tuple(slice(size) for size in old.shape)], old)
            assert all(not now[k].any() for k in (result.twins(rows) if rows else ()))
            assert all(not now[:, k].any() for k in (result.twins(columns) if columns else ()))


@pytest.mark.parametrize("name", ["splitting", "random", "random-neuron", "net2net"])
def test_halves_of_a_neuron_share_its_state(name: str, net: tuple[nn.Module, Units]) -> None:
    result = Grown(name, *net, optimizer=trained_with("adam"), seed=3)
    state, old = state_by_name(result.model, result.optimizer), result.old_state
    halves = result.twins("0")
    assert halves
    for key, share in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        before, now = old["0.bias"][key], state["0.bias"][key]
        for k in range(len(before)):
            expected = before[k] * (share if k in halves.values() else 1.0)
            assert torch.equal(now[k], expected)
        for twin, parent in halves.items():
            assert torch.equal(now[twin], before[parent] * share)


@pytest.mark.parametrize("name", METHODS)
def test_training_goes_on_with_the_same_optimizer(name: str, net: tuple[nn.Module, Units]) -> None:
    result = Grown(name, *net, optimizer=trained_with("adam"))
    before = total_loss(result.model, result.batches)
    for _ in range(30):
        for batch in result.batches:
            result.optimizer.zero_grad()
            mse(result.model, batch).backward()
            result.optimizer.step()
    assert total_loss(result.model, result.batches) < before


# --- all or nothing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "calls"),
    [(name, 3) for name in METHODS] + [(n, 7) for n in METHODS if n not in ("new", "net2net")],
)
def test_whatever_fails_the_net_is_as_before(
    name: str, calls: int, net: tuple[nn.Module, Units]
) -> None:
    model, units = net
    changed = copy.deepcopy(model)
    optimizer = trained_with("adam")(changed)
    state = copy.deepcopy(state_by_name(changed, optimizer))
    left = calls

    def failing(view: Any, batch: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the disk is full")
        return mse(view, batch)

    site = Site(changed, units, failing, some_data(), sg.Policy(count=3), Limits(3, None, None),
                optimizer)  # fmt: skip
    with pytest.raises(RuntimeError, match="the disk is full"):
        method_named(name).grow(site)
    assert same_state(changed, model)
    now = state_by_name(changed, optimizer)
    for parameter, entries in state.items():
        assert all(torch.equal(now[parameter][key], value) for key, value in entries.items())


def test_a_loss_that_is_no_number_is_an_error(net: tuple[nn.Module, Units]) -> None:
    model, units = net
    site = Site(model, units, lambda m, b: m(b[0]).sum() * math.nan, some_data(), sg.Policy(),
                Limits(1, None, None))  # fmt: skip
    with pytest.raises(LossError):
        method_named("new").grow(site)


# --- convolutions and normalisation -------------------------------------------------------


@pytest.mark.parametrize("name", ADDING)
def test_convolutions_with_batch_norm_grow_too(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    images, labels = torch.randn(12, 1, 4, 4), torch.randint(2, (12,))

    def loss_fn(view: Any, batch: Any) -> Tensor:
        return F.cross_entropy(view(batch[0]), batch[1])

    sg.fit(model, [(images, labels)], loss_fn, epochs=3)
    model.eval()
    with torch.no_grad():
        before = model(images)
    units = sg.find_units(model, (images,))
    site = Site(model, units, loss_fn, [(images, labels)], sg.Policy(), Limits(3, None, None))
    growth = method_named(name).grow(site)
    assert isinstance(growth, Growth)
    with torch.no_grad():
        change = (model(images) - before).abs().max().item()
    if name == "new":
        assert change < 1e-5
    elif name == "net2net":
        assert 0 < change < 0.1
    else:
        assert growth.measured is not None
        assert growth.measured <= 1e-7


# --- by name ------------------------------------------------------------------------------


def test_an_unknown_method_names_those_there_are() -> None:
    with pytest.raises(InputError, match=r"method: expected one of splitting, random, .*'magic'"):
        method_named("magic")


def test_every_name_has_a_method_of_its_own() -> None:
    assert len({type(method_named(name)) for name in METHODS}) == len(METHODS) == 6
