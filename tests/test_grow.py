"""Growing as a whole: real small trainings, and every promise of ``sg.grow`` about them."""

from __future__ import annotations

import copy
import math
import random
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import splitgrow as sg
from grow_worker import carried, data, mse, private, renewed
from helpers_split import mlp
from splitgrow.errors import InputError, LossError, OptimizerError
from splitgrow.methods import METHODS, Growth, Method, Site
from splitgrow.plan import SplitPlan
from splitgrow.select import Candidate
from splitgrow.zoo import DenseNet

Losses = Callable[..., Tensor]


def trainer(batches: Any = None, loss_fn: Losses = mse, epochs: int = 4) -> sg.Trainer:
    return sg.Trainer(batches or data(), loss_fn, epochs=epochs, lr=0.02)


def nothing(model: nn.Module, phase: sg.Phase) -> None:
    """Trains nothing."""


def grow(model: nn.Module | None = None, **changes: Any) -> sg.Result:
    settings: dict[str, Any] = {
        "train": trainer(), "loss_fn": mse, "batches": data(), "policy": sg.Policy(count=2),
        "until": sg.Budget(phases=3),
    }  # fmt: skip
    return sg.grow(small() if model is None else model, **(settings | changes))


def small(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return mlp(2, 3, 1)


def conv_net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 2, 3, stride=2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 1, 6, 6, generator=generator)
    y = (x.mean((1, 2, 3)) * 12).round().clamp(-1, 1).long() + 1
    return [(x[:12], y[:12]), (x[12:], y[12:])]


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mean_loss(model: nn.Module, loss_fn: Losses, batches: Any) -> float:
    """Over batches of equal size, in eval mode; computed here and not by the package."""
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        return sum(loss_fn(twin, batch).item() for batch in batches) / len(batches)


def state(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


# --- the loss at a split ------------------------------------------------------------------


class Scales(sg.Watcher):
    """Weighs the model's loss before and after each split."""

    def __init__(self, model: nn.Module, loss_fn: Losses, batches: Any) -> None:
        self.weigh = lambda: mean_loss(model, loss_fn, batches)
        self.trained: list[float] = []
        self.grown: list[float] = []

    def on_trained(self, record: sg.PhaseRecord, history: sg.History) -> None:
        self.trained.append(self.weigh())

    def on_grown(self, record: sg.PhaseRecord, history: sg.History) -> None:
        self.grown.append(self.weigh())


@pytest.mark.parametrize(
    ("model", "loss_fn", "batches"),
    [
        (small(), mse, data()),
        (small(9), mse, data()),
        (mlp(2, 2, 3, 1, activation=nn.Softplus), mse, data()),
        (conv_net(), cross_entropy, images()),
    ],
    ids=["tanh", "tanh again", "softplus, two layers", "convolutions"],
)
def test_the_loss_never_rises_at_a_split(model: nn.Module, loss_fn: Losses, batches: Any) -> None:
    model = copy.deepcopy(model)
    scales = Scales(model, loss_fn, batches)
    result = grow(
        model, train=trainer(batches, loss_fn), loss_fn=loss_fn, batches=batches, watch=[scales],
    )  # fmt: skip
    assert len(scales.grown) == 2
    for record, before, after in zip(
        result.history.phases, scales.trained, [*scales.grown, None], strict=True
    ):
        assert record.loss == pytest.approx(before, rel=1e-5)
        if after is not None:
            assert after < before
            assert record.split is not None
            assert record.split.loss_before == pytest.approx(before, rel=1e-5)
            assert record.split.loss_after == pytest.approx(after, rel=1e-5)
            assert record.split.measured == pytest.approx(after - before, abs=1e-6)


# --- when it ends -------------------------------------------------------------------------


def test_phases_are_trained_and_all_but_the_last_split() -> None:
    seen: list[tuple[int, int]] = []

    def train(model: nn.Module, phase: sg.Phase) -> None:
        seen.append((phase.number, model[0].out_features))  # type: ignore[index]
        carried(model, phase)

    result = grow(train=train, until=sg.Budget(phases=3), policy=sg.Policy(count=1))
    assert seen == [(0, 3), (1, 4), (2, 5)]
    assert result.stopped == "phases"
    assert [record.phase for record in result.history.phases] == [0, 1, 2]
    assert [record.split is not None for record in result.history.phases] == [True, True, False]
    assert result.model[0].out_features == 5  # type: ignore[index]


def test_one_phase_is_a_training() -> None:
    result = grow(until=sg.Budget(phases=1))
    assert (result.stopped, len(result.history.phases)) == ("phases", 1)
    assert result.history.phases[0].split is None
    assert result.history.events == []


def sizes(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Parameters, and MACs per sample, as torch counts them."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(x)
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2 // len(x)


class Sizes(sg.Watcher):
    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.count = lambda: sizes(model, x)
        self.found: list[tuple[int, int]] = []

    def on_trained(self, record: sg.PhaseRecord, history: sg.History) -> None:
        self.found.append(self.count())

    def on_grown(self, record: sg.PhaseRecord, history: sg.History) -> None:
        self.found.append(self.count())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("params", "macs", "round_to"), [(47, None, 1), (None, 41, 1), (60, 41, 2)]
)
def test_a_budget_is_never_exceeded_and_the_last_split_is_trimmed(
    name: str, params: int | None, macs: int | None, round_to: int
) -> None:
    """Three neurons at a time would overshoot, so the last split takes fewer."""
    torch.manual_seed(4)
    model = mlp(2, 2, 2, 1)  # 15 parameters, 10 MACs
    seen = Sizes(model, data()[0][0])
    result = grow(
        model, method=name, policy=sg.Policy(count=3 if round_to == 1 else 4, round_to=round_to),
        until=sg.Budget(params=params, macs=macs, phases=9), watch=[seen],
    )  # fmt: skip
    largest = (params or math.inf, macs or math.inf)
    assert all(p <= largest[0] and m <= largest[1] for p, m in seen.found)
    assert result.stopped in {"params", "macs"}
    records = result.history.phases
    assert [(r.params, r.macs) for r in records] == [seen.found[0], *seen.found[1::2]][
        : len(records)
    ]
    # Nothing more fits: one neuron (two with round_to) more in either layer is too many.
    widths = [model[0].out_features, model[2].out_features]
    for i in range(2):
        wider = list(widths)
        wider[i] += round_to
        more = sizes(mlp(2, *wider, 1), data()[0][0])
        assert more[0] > largest[0] or more[1] > largest[1]
    assert all(width % round_to == 0 for width in widths)


def test_the_last_split_is_smaller_than_the_policy_asks_for() -> None:
    result = grow(policy=sg.Policy(count=3), until=sg.Budget(params=13 + 4 * 4))
    assert [len(r.split.neurons) for r in result.history.phases if r.split] == [3, 1]
    assert [record.params for record in result.history.phases] == [13, 25, 29]
    assert result.stopped == "params"


def test_a_seed_that_is_too_large_is_refused_before_it_is_trained() -> None:
    with pytest.raises(InputError, match=r"until: the model has 13 params .* budget of 12"):
        grow(train=forbidden, until=sg.Budget(params=12))


def forbidden(model: nn.Module, phase: sg.Phase) -> None:
    raise AssertionError("nothing is to be trained here")


@pytest.mark.parametrize("name", ["fit", "-error"])
def test_a_run_ends_with_the_metric(name: str) -> None:
    """With the first phase that reaches it, and no other."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        error = mean_loss(model, mse, data())
        return {"error": error, "fit": -error}

    free = grow(evaluate=evaluate)
    errors = [record.metrics["error"] for record in free.history.phases]
    assert errors[0] > errors[1] > errors[2]
    goal = -(errors[0] + errors[1]) / 2
    result = grow(evaluate=evaluate, until=sg.Budget(metric=(name, goal), phases=3))
    assert result.stopped == "metric"
    assert len(result.history.phases) == 2
    assert result.history.phases[-1].split is None


def test_a_metric_that_is_not_reported_is_named() -> None:
    with pytest.raises(InputError, match="evaluate reports error, but not 'accuracy'"):
        grow(evaluate=lambda _: {"error": 1.0}, until=sg.Budget(metric=("accuracy", 0.9)))


def test_a_net_that_fits_perfectly_is_splitting_stable() -> None:
    model = small()
    with torch.no_grad():
        fitted = [(x, model(x)) for x, _ in data()]
    result = grow(model, train=nothing, batches=fitted, until=sg.Budget(phases=5))
    assert result.stopped == "stable"
    assert len(result.history.phases) == 1
    assert result.history.phases[0].split is None
    assert "splitting stable" in str(result)


def test_a_net_without_curvature_is_splitting_stable() -> None:
    """Linear in theta: sigma'' = 0, so S = 0 whatever the loss."""
    result = grow(mlp(2, 3, 1, activation=nn.Identity))
    assert result.stopped == "stable"
    assert result.history.phases[0].loss > 0


def test_the_stand_in_of_a_policy_is_that_of_the_scores() -> None:
    """ReLU has no second derivative of its own."""
    kinked = mlp(2, 3, 1, activation=nn.ReLU)
    flat = grow(copy.deepcopy(kinked), policy=sg.Policy(count=2, stand_in=None))
    assert flat.stopped == "stable"
    found = {}
    for beta in (1.0, 10.0):
        policy = sg.Policy(count=2, stand_in=sg.Softplus(beta), step=0.01)
        result = grow(copy.deepcopy(kinked), policy=policy, until=sg.Budget(phases=2))
        split = result.history.phases[0].split
        assert split is not None
        found[beta] = split.predicted
    assert found[1.0] != found[10.0]


def test_a_threshold_that_no_neuron_is_below_is_splitting_stable() -> None:
    assert grow(policy=sg.Policy(count=2, threshold=-100.0)).stopped == "stable"


def test_a_split_that_cannot_lower_the_loss_is_refused(tmp_path: Path) -> None:
    """So large a constant in the loss that no change shows above its rounding."""
    result = grow(loss_fn=lambda m, b: mse(m, b) + 1e6, run_dir=tmp_path / "run")
    assert result.stopped == "refused"
    assert len(result.history.phases) == 1
    assert result.model[0].out_features == 3  # type: ignore[index]
    kept = tmp_path / "run" / "phase-0000" / "history.json"
    assert sg.History.from_json(kept.read_text(), "").stopped == "refused"


def test_a_policy_that_lets_nothing_grow_says_so() -> None:
    assert grow(policy=sg.Policy(count=2, round_to=8)).stopped == "policy"


# --- what can be wrong --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": None}, "train: expected a function, got NoneType"),
        ({"loss_fn": "mse"}, "loss_fn: expected a function, got str"),
        ({"batches": data()[0][0]}, r"batches: got a single tensor"),
        ({"batches": iter(data())}, "batches: a generator can be read only once"),
        ({"policy": {"count": 3}}, "policy: expected a Policy, got dict"),
        ({"until": 10}, "until: expected a Budget, got int"),
        ({"method": "magic"}, "method: expected one of splitting, random, .*got 'magic'"),
        ({"method": None}, "method: expected a name or a Method, got NoneType"),
        ({"evaluate": 3}, "evaluate: expected a function, got int"),
        ({"until": sg.Budget(metric=("a", 1))}, "until: to end when a is reached, give evaluate="),
        ({"seed": -1}, r"seed: expected an integer from 0 to 2\*\*32 - 1, got -1"),
        ({"exclude": ["nowhere"]}, r"exclude: no unit is called 'nowhere'; there are"),
        ({"exclude": "0"}, "model: nothing in it can be split"),
        ({"resume": True}, "resume: there is nothing to resume from without run_dir="),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_trained(
    changes: dict[str, Any], words: str
) -> None:
    model = small()
    before = state(model)
    with pytest.raises(InputError, match=words):
        grow(model, **({"train": forbidden} | changes))
    assert state(model) == before


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"model: expected a torch\.nn\.Module, got str"):
        sg.grow("model", train=nothing, loss_fn=mse, batches=data())  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [0.9, None, {"a": "high"}, {"a": torch.ones(2)}, [("a", 1)]])
def test_metrics_are_numbers_by_name(found: Any) -> None:
    with pytest.raises(InputError, match=r'evaluate: expected a dict of numbers.*"accuracy": 0.93'):
        grow(evaluate=lambda _: found)


def test_what_goes_wrong_in_training_is_told_as_it_is() -> None:
    def diverging(model: nn.Module, phase: sg.Phase) -> None:
        phase.log(math.inf)

    with pytest.raises(LossError, match="phase 0, iteration 0: the training loss is inf"):
        grow(train=diverging)


# --- the arguments of train ---------------------------------------------------------------


class Memory:
    """A training that writes down its optimizer's state where each phase begins and ends."""

    def __init__(self, inner: Callable[[nn.Module, sg.Phase], None] = carried) -> None:
        self.inner = inner
        self.optimizers: list[Any] = []
        self.begin: list[dict[str, Tensor]] = []
        self.end: list[dict[str, Tensor]] = []

    def __call__(self, model: nn.Module, phase: sg.Phase) -> None:
        self.begin.append(self.look(model, phase))
        self.inner(model, phase)
        self.end.append(self.look(model, phase))
        self.optimizers.append(phase.optimizer)

    def look(self, model: nn.Module, phase: sg.Phase) -> dict[str, Tensor]:
        if phase.optimizer is None:
            return {}
        return {f"{name}.{key}": value.clone() for name, p in model.named_parameters()
                for key, value in phase.optimizer.state.get(p, {}).items()}  # fmt: skip


def test_a_carried_optimizer_goes_on_and_its_state_follows_the_neurons() -> None:
    memory = Memory()
    result = grow(train=memory, policy=sg.Policy(count=1))
    assert memory.begin[0] == {}
    assert len({id(optimizer) for optimizer in memory.optimizers}) == 1
    for number in (0, 1):
        before, after = memory.end[number], memory.begin[number + 1]
        assert after["0.weight.step"] == before["0.weight.step"] == 6 * (number + 1)
        (event,) = result.history.phases[number].split.neurons  # type: ignore[union-attr]
        by_id = {n.id: n for n in result.history.neurons["0"]}
        parent, (first, second) = by_id[event.parent], (by_id[i] for i in event.children)  # type: ignore[index]
        old, new = before["0.weight.exp_avg"], after["0.weight.exp_avg"]
        assert len(new) == len(old) + 1
        assert old[parent.place].any()
        assert torch.equal(new[first.place], old[parent.place] / 2)
        assert torch.equal(new[second.place], old[parent.place] / 2)
        for place in set(range(len(old))) - {parent.place}:
            assert torch.equal(new[place], old[place])


def test_a_new_optimizer_in_each_phase_starts_afresh() -> None:
    memory = Memory(renewed)
    grow(train=memory)
    assert len({id(optimizer) for optimizer in memory.optimizers}) == 3
    assert all(state["0.weight.momentum_buffer"].any() for state in memory.end)


def test_an_optimizer_that_is_not_handed_over_is_nobodys_business() -> None:
    memory = Memory(private)
    result = grow(train=memory)
    assert memory.optimizers == [None, None, None]
    assert len(result.history.phases) == 3


def test_an_optimizer_of_another_model_is_an_error() -> None:
    other = small()

    def train(model: nn.Module, phase: sg.Phase) -> None:
        phase.optimizer = torch.optim.Adam(other.parameters())

    with pytest.raises(OptimizerError, match="the optimizer does not own 0"):
        grow(train=train)


def test_phases_have_seeds_of_their_own() -> None:
    seeds: list[int] = []
    draws: list[float] = []

    def train(model: nn.Module, phase: sg.Phase) -> None:
        seeds.append(phase.seed)
        draws.append(torch.rand(()).item())

    for seed in (0, 0, 1):
        grow(train=train, seed=seed)
    assert seeds[:3] == seeds[3:6]
    assert draws[:3] == draws[3:6]
    assert len(set(seeds)) == len(set(draws)) == 6


def test_curves_add_up_over_the_phases() -> None:
    result = grow(train=trainer(epochs=3))
    records = result.history.phases
    assert [record.iterations for record in records] == [6, 6, 6]
    joined = [iteration for record in records for iteration, _ in record.curve]
    assert joined == list(range(18)) == list(range(result.history.iterations))
    losses = [loss for record in records for _, loss in record.curve]
    assert losses[-1] < losses[0]


def test_a_training_that_logs_nothing_has_no_curve() -> None:
    result = grow(train=nothing, until=sg.Budget(phases=2))
    assert [(r.curve, r.iterations) for r in result.history.phases] == [((), 0), ((), 0)]


# --- cost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False], ids=["example", "no example"])
def test_parameters_and_macs_are_as_torch_counts_them(given: bool) -> None:
    model, batches = conv_net(), images()
    seen = Sizes(model, batches[0][0])
    result = grow(
        model, train=trainer(batches, cross_entropy), loss_fn=cross_entropy, batches=batches,
        watch=[seen], method="random", **({"example_inputs": batches[0][0][:1]} if given else {}),
    )  # fmt: skip
    records = [(r.params, r.macs) for r in result.history.phases]
    assert records == [seen.found[0], *seen.found[2::2]]
    assert len(set(records)) == 3
    widths = {"0": model[0].out_channels, "3": model[3].out_channels}
    assert result.history.phases[-1].widths == widths


# --- lineage ------------------------------------------------------------------------------


def check_lineage(history: sg.History) -> None:
    """The family tree and the records of the phases tell the same story."""
    assert set(history.neurons) == set(history.phases[-1].widths)
    for unit, neurons in history.neurons.items():
        assert [n.id for n in neurons] == list(range(len(neurons)))
        by_id = {n.id: n for n in neurons}
        for record in history.phases:
            living = [n for n in neurons if n.born <= record.phase
                      and (n.ended is None or n.ended >= record.phase)]  # fmt: skip
            assert sorted(n.place for n in living) == list(range(record.widths[unit]))
        children = Counter(n.parent for n in neurons if n.parent is not None)
        assert all(count == 2 for count in children.values())
        assert {n.id for n in neurons if n.ended is not None} == set(children)
        for neuron in neurons:
            line = history.ancestors(unit, neuron.id)
            assert line[-1].parent is None
            assert neuron.parent is None or by_id[neuron.parent].ended == neuron.born - 1
    check_events(history)


def check_events(history: sg.History) -> None:
    told = [(unit, child, event.parent, phase + 1) for phase, event in history.events
            for unit, child in ((event.unit, child) for child in event.children)]  # fmt: skip
    born = [(unit, n.id, n.parent, n.born) for unit, neurons in history.neurons.items()
            for n in neurons if n.born > 0]  # fmt: skip
    assert sorted(told, key=str) == sorted(born, key=str)


@pytest.mark.parametrize("name", METHODS)
def test_every_neuron_has_a_place_and_a_line(name: str) -> None:
    torch.manual_seed(3)
    result = grow(mlp(2, 2, 2, 1), method=name, until=sg.Budget(phases=5))
    assert len(result.history.events) == 8
    check_lineage(result.history)
    founders = [n for neurons in result.history.neurons.values() for n in neurons
                if n.parent is None]  # fmt: skip
    assert len(founders) == (12 if name in ("new", "boosting") else 4)


class Parts(nn.Module):
    """What ``whole`` makes is added to two concatenated layers: two units begin in it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(2, 5)
        self.left = nn.Linear(2, 2)
        self.right = nn.Linear(2, 3)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = self.whole(x) + torch.cat([self.left(x), self.right(x)], 1)
        return self.head(torch.tanh(both))


@pytest.mark.parametrize("name", ["splitting", "net2net"])
def test_lines_lead_to_the_very_neuron_that_was_there(name: str) -> None:
    """Without training and by tiny steps, a neuron's weights are still those of its founder."""
    torch.manual_seed(0)
    model = Parts()
    for layer in (model.left, model.right):  # no neuron is like another
        layer.weight.data = torch.linspace(-1, 1, layer.out_features)[:, None] * torch.ones(2)
    seed = {n: t.clone() for n, t in model.state_dict().items()}
    policy = sg.Policy(count=2, step=1e-6)
    result = grow(model, train=nothing, policy=policy, method=name, until=sg.Budget(phases=5))
    history = result.history
    check_lineage(history)
    assert set(history.neurons) == {"whole#0", "whole#1"}
    assert {event.unit for _, event in history.events} == {"whole#0", "whole#1"}
    now = model.state_dict()
    for unit, layer in (("whole#0", "left"), ("whole#1", "right")):
        assert len(history.alive(unit)) == len(now[f"{layer}.weight"])
        for place, neuron in history.alive(unit).items():
            founder = history.ancestors(unit, neuron.id)[-1].place
            expected = seed[f"{layer}.weight"][founder]
            error = (now[f"{layer}.weight"][place] - expected).abs().max()
            assert error < (1e-4 if name == "splitting" else 0.1)


def test_a_part_that_is_left_out_stays_so_while_its_neighbour_grows() -> None:
    """Its own name moves: whole[2:5] is whole[3:6] after the first split."""
    torch.manual_seed(0)
    result = grow(Parts(), method="random", exclude=["whole[2:5]"])
    assert set(result.history.neurons) == {"whole#0"}
    assert result.model.right.out_features == 3  # type: ignore[union-attr]
    assert result.model.left.out_features == 2 + 4  # type: ignore[union-attr]
    check_lineage(result.history)


def test_units_that_are_left_out_do_not_grow() -> None:
    result = grow(mlp(2, 3, 3, 1), method="random", exclude=["2"])
    assert set(result.history.neurons) == {"0"}
    assert result.model[2].out_features == 3  # type: ignore[index]


def test_a_dense_net_keeps_its_lines() -> None:
    torch.manual_seed(0)
    model = DenseNet(
        (2,), stem=2, growth=2, bottleneck=2, in_channels=1, num_classes=3, activation=nn.Softplus
    )
    result = grow(
        model, train=trainer(images(), cross_entropy, epochs=1), loss_fn=cross_entropy,
        batches=images(), policy=sg.Policy(count=4), until=sg.Budget(phases=3),
    )  # fmt: skip
    check_lineage(result.history)
    assert len(result.history.events) == 8
    assert sizes(model, images()[0][0]) == (
        result.history.phases[-1].params, result.history.phases[-1].macs)  # fmt: skip


# --- repeatable ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_equal_seeds_give_the_same_net_and_others_do_not(name: str) -> None:
    def run(seed: int) -> tuple[dict[str, list[float]], list[sg.Event]]:
        result = grow(method=name, train=private, seed=seed, until=sg.Budget(phases=2))
        return state(result.model), [event for _, event in result.history.events]

    first = run(5)
    assert run(5) == first
    assert run(6)[0] != first[0]


def world() -> tuple[Any, ...]:
    legacy = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), str(legacy)


@pytest.mark.parametrize("name", METHODS)
def test_the_callers_random_state_is_left_alone(name: str, tmp_path: Path) -> None:
    def train(model: nn.Module, phase: sg.Phase) -> None:
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        carried(model, phase)

    model = small()
    before = world()
    grow(model, train=train, method=name, until=sg.Budget(phases=2), run_dir=tmp_path,
         evaluate=lambda _: {"luck": torch.rand(()).item()},
         policy=sg.Policy(count=1, after="retrain"))  # fmt: skip
    assert world() == before


def test_the_callers_random_state_does_not_matter() -> None:
    found = []
    for seed in (1, 2):
        model = small()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        found.append(state(grow(model, train=private, until=sg.Budget(phases=2)).model))
    assert found[0] == found[1]


def test_a_shuffling_loader_scores_the_same_data_every_time() -> None:
    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, i: int) -> Any:
            x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
            return x[i], y[i]

    def run() -> dict[str, list[float]]:
        loader = torch.utils.data.DataLoader(Samples(), batch_size=12, shuffle=True)
        result = grow(train=trainer(), batches=loader, until=sg.Budget(phases=2))
        assert all(r.split is None or (r.split.measured or 0) < 0 for r in result.history.phases)
        return state(result.model)

    assert run() == run()


# --- retrain ------------------------------------------------------------------------------


def test_retraining_starts_from_fresh_weights_of_the_same_shape() -> None:
    begun: list[dict[str, Tensor]] = []

    def train(model: nn.Module, phase: sg.Phase) -> None:
        begun.append({n: p.detach().clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(7.0)  # trained weights are far from fresh ones

    result = grow(
        train=train, method="random", policy=sg.Policy(count=2, after="retrain"),
        until=sg.Budget(phases=3),
    )  # fmt: skip
    assert [start["0.weight"].shape for start in begun] == [(3, 2), (5, 2), (7, 2)]
    for start in begun[1:]:
        assert start["0.weight"].abs().max() <= 1 / math.sqrt(2)
        assert start["2.weight"].abs().max() <= 1 / math.sqrt(start["2.weight"].shape[1])
        assert len(set(start["0.weight"].flatten().tolist())) == start["0.weight"].numel()
    assert not torch.equal(begun[1]["0.weight"], begun[2]["0.weight"][:5])
    assert [record.widths for record in result.history.phases] == [{"0": 3}, {"0": 5}, {"0": 7}]


def test_retraining_forgets_the_optimizers_state() -> None:
    memory = Memory()
    grow(train=memory, policy=sg.Policy(count=1, after="retrain"))
    assert memory.begin == [{}, {}, {}]
    assert all(end["0.weight.step"] == 6 for end in memory.end)
    assert len({id(optimizer) for optimizer in memory.optimizers}) == 1


def test_batch_norm_forgets_its_statistics_when_retrained() -> None:
    means: list[bool] = []

    def train(model: nn.Module, phase: sg.Phase) -> None:
        means.append(bool(model[1].running_mean.any()))  # type: ignore[index]
        trainer(images(), cross_entropy, epochs=1)(model, phase)

    grow(
        conv_net(), train=train, loss_fn=cross_entropy, batches=images(), method="random",
        policy=sg.Policy(count=1, after="retrain"), until=sg.Budget(phases=2),
    )  # fmt: skip
    assert means == [False, False]


def test_what_cannot_be_drawn_anew_is_refused_at_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    with pytest.raises(InputError, match=r"reset_parameters\(\) .* on the model itself \(Scaled\)"):
        grow(Scaled(), train=forbidden, policy=sg.Policy(after="retrain"))


# --- evaluate -----------------------------------------------------------------------------


def test_evaluation_is_in_eval_mode_without_gradients_and_leaves_no_trace() -> None:
    seen: list[tuple[bool, bool]] = []
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))

    def evaluate(net: nn.Module) -> dict[str, float]:
        seen.append((any(m.training for m in net.modules()), torch.is_grad_enabled()))
        net.train()
        net(data()[0][0])  # in training mode batch norm takes note of what it sees
        net[0].eval()  # type: ignore[index]
        return {"one": 1}

    class Modes(sg.Watcher):
        def __init__(self) -> None:
            self.found: list[Any] = []

        def on_stage(self, phase: int, stage: str) -> None:
            if stage != "train":
                self.look()

        def on_trained(self, record: sg.PhaseRecord, history: sg.History) -> None:
            self.look()

        def look(self) -> None:
            modes = [m.training for m in model.modules()]
            self.found.append((modes, state(model)["1.running_mean"]))

    model[2].eval()
    watcher = Modes()
    grow(model, evaluate=evaluate, watch=[watcher], until=sg.Budget(phases=1))
    assert seen == [(False, False)]
    assert watcher.found[0] == watcher.found[1]
    assert watcher.found[0][0] == [True, True, True, False, True]


def test_metrics_that_are_tensors_or_no_numbers_are_taken() -> None:
    found = {"a": torch.tensor(0.5), "b": 3, "c": math.nan, "d": math.inf, "e": np.float32(0.25)}
    result = grow(evaluate=lambda _: found, until=sg.Budget(phases=1, metric=("-c", 0)))
    metrics = result.history.phases[0].metrics
    assert {name: metrics[name] for name in "abe"} == {"a": 0.5, "b": 3.0, "e": 0.25}
    assert math.isnan(metrics["c"])
    assert math.isnan(metrics["d"])  # as it would be after a checkpoint
    assert result.stopped == "phases"


# --- what the model is called with --------------------------------------------------------


def test_a_model_with_several_inputs_by_place_and_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)) * scale)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0], scale=batch[0][:, :1]), batch[1])

    result = grow(Two(), train=trainer(loss_fn=loss_fn), loss_fn=loss_fn, until=sg.Budget(phases=2))
    assert result.history.phases[-1].widths["first"] > 3


# --- watchers -----------------------------------------------------------------------------


class Diary(sg.Watcher):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_stage(self, phase: int, stage: str) -> None:
        self.lines.append(f"{phase} {stage}")

    def on_iteration(self, phase: sg.Phase, iteration: int, loss: float) -> None:
        self.lines.append(f"{phase.number} iteration {iteration}")

    def on_progress(self, phase: sg.Phase, done: int, total: int) -> None:
        self.lines.append(f"{phase.number} progress {done}/{total}")

    def on_trained(self, record: sg.PhaseRecord, history: sg.History) -> None:
        assert history.phases[-1] is record
        assert record.split is None
        self.lines.append(f"{record.phase} trained")

    def on_grown(self, record: sg.PhaseRecord, history: sg.History) -> None:
        assert history.phases[-1] is record
        assert record.split is not None
        self.lines.append(f"{record.phase} grown")

    def on_end(self, history: sg.History) -> None:
        self.lines.append(f"end {history.stopped}")


def test_watchers_are_told_everything_in_order(tmp_path: Path) -> None:
    one, two = Diary(), Diary()
    grow(train=trainer(epochs=1), until=sg.Budget(phases=2), watch=[one, two], run_dir=tmp_path)
    assert one.lines == [
        "0 train", "0 iteration 0", "0 progress 1/2", "0 iteration 1", "0 progress 2/2",
        "0 evaluate", "0 save", "0 trained", "0 score", "0 save", "0 grown",
        "1 train", "1 iteration 2", "1 progress 1/2", "1 iteration 3", "1 progress 2/2",
        "1 evaluate", "1 save", "1 trained", "end phases",
    ]  # fmt: skip
    assert two.lines == one.lines


def test_watchers_are_told_of_the_end_whatever_it_is() -> None:
    def failing(model: nn.Module, phase: sg.Phase) -> None:
        raise RuntimeError("out of memory")

    diary = Diary()
    with pytest.raises(RuntimeError, match="out of memory"):
        grow(train=failing, watch=[diary])
    assert diary.lines == ["0 train", "end None"]


class Scalars:
    """What TensorBoard's writer is, as far as it is used."""

    made: list[Scalars] = []  # noqa: RUF012

    def __init__(self, folder: str) -> None:
        self.folder, self.closed = folder, False
        self.found: dict[str, list[tuple[int, float]]] = {}
        Scalars.made.append(self)

    def add_scalar(self, name: str, value: float, at: int) -> None:
        self.found.setdefault(name, []).append((at, float(value)))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_tensorboard_is_given_losses_sizes_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Scalars  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    board = sg.TensorBoard(tmp_path)
    result = grow(
        train=trainer(epochs=1), until=sg.Budget(phases=2), watch=[board],
        evaluate=lambda _: {"accuracy": 0.5},
    )  # fmt: skip
    written = Scalars.made[-1]
    records = result.history.phases
    assert written.folder == str(tmp_path)
    assert written.closed
    curve = [point for record in records for point in record.curve]
    assert written.found["loss/training"] == curve
    assert written.found["size/parameters"] == [(2, records[0].params), (4, records[1].params)]
    assert written.found["metric/accuracy"] == [(2, 0.5), (4, 0.5)]
    assert written.found["width/0"] == [(2, 3), (4, 5)]
    assert records[0].split is not None
    assert written.found["split/measured"] == [(2, records[0].split.measured)]


def test_tensorboard_writes_files_that_it_can_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grow(train=trainer(epochs=1), until=sg.Budget(phases=1), watch=[sg.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/training")] == [0, 1]
    assert [event.value for event in events.Scalars("size/parameters")] == [13]


def test_tensorboard_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="the package tensorboard is not installed"):
        sg.TensorBoard("somewhere")


# --- a method of one's own ----------------------------------------------------------------


class First(Method):
    """Adds a neuron to the first unit, without effect."""

    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        unit = site.units[0]
        entry = sg.Entry(unit.name, 0, 0.0, F.normalize(torch.ones(unit.size), dim=0), 1.0)
        return {unit.name: [Candidate(1.0, entry)]}

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        from splitgrow.additions import NewNeuron

        return NewNeuron().carry_out(site, plan)


def test_a_method_of_ones_own_is_grown_with() -> None:
    result = grow(mlp(2, 2, 2, 1), method=First(), policy=sg.Policy(count=5))
    assert result.history.method == "First"
    assert result.history.phases[-1].widths == {"0": 4, "2": 2}
    check_lineage(result.history)


# --- the result ---------------------------------------------------------------------------


def test_the_model_is_grown_in_place_and_the_result_reads_well() -> None:
    model = small()
    parameters = list(model.parameters())
    result = grow(model, evaluate=lambda _: {"accuracy": 0.75})
    assert result.model is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert result.run_dir is None
    text = str(result)
    for word in ("phase", "parameters", "accuracy", "0.75", "as many phases as asked for"):
        assert word in text


def test_seconds_are_told_for_every_stage() -> None:
    first, last = grow(until=sg.Budget(phases=2)).history.phases
    assert set(first.seconds) == {"train", "evaluate", "score", "split"}
    assert set(last.seconds) == {"train", "evaluate"}
    assert all(seconds > 0 for seconds in first.seconds.values())
