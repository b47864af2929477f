"""Optimizer state follows its neuron, scaled as the gradient is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import splitgrow as sg
from helpers_split import (
    ConvNet,
    Problem,
    Snapshot,
    hand_plan,
    mlp,
    mse,
    problem,
    split_at_zero,
)
from splitgrow.optimizer import DEGREES, state_of

STEPS = 20


# --- the claim itself ---------------------------------------------------------------------


def gradients(p: Problem, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    mse(model, p.batches[0]).backward()
    return {name: q.grad.clone() for name, q in model.named_parameters()}


def test_offspring_have_half_their_parents_gradient_and_columns_all_of_it() -> None:
    p = problem(mlp(3, 4, 5, 2), (7, 3))
    before = gradients(p, p.model)
    split_at_zero(p.model, p.units, {"0": [1, 3], "2": [2]})
    after = gradients(p, p.model)
    rows, half = [0, 1, 2, 3, 1, 3], torch.tensor([1, 0.5, 1, 0.5, 0.5, 0.5]).double()
    rows2, half2 = [0, 1, 2, 3, 4, 2], torch.tensor([1, 1, 0.5, 1, 1, 0.5]).double()
    expected = {
        "0.weight": before["0.weight"][rows] * half[:, None],
        "0.bias": before["0.bias"][rows] * half,
        "2.weight": before["2.weight"][rows2][:, rows] * half2[:, None],
        "2.bias": before["2.bias"][rows2] * half2,
        "4.weight": before["4.weight"][:, rows2],
        "4.bias": before["4.bias"],
    }
    assert expected.keys() == after.keys()
    for name, gradient in after.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


def test_normalisations_and_depthwise_filters_scale_the_same_way() -> None:
    p = problem(ConvNet(), (6, 2, 5, 5))
    p.model.eval()
    before = gradients(p, p.model)
    split_at_zero(p.model, p.units, {"conv1": [2]})
    after = gradients(p, p.model)
    rows, half = [0, 1, 2, 3, 2], torch.tensor([1, 1, 0.5, 1, 0.5]).double()
    for name in ("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias", "depthwise.weight"):
        shape = (-1, *[1] * (before[name].ndim - 1))
        expected = before[name][rows] * half.reshape(shape)
        torch.testing.assert_close(after[name], expected, rtol=1e-11, atol=1e-14)
    expected = before["conv2.weight"][:, rows]
    torch.testing.assert_close(after["conv2.weight"], expected, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(after["head.weight"], before["head.weight"])


# --- continuity ---------------------------------------------------------------------------

Make = Callable[[list[dict[str, Any]]], Optimizer]
Correct = Callable[[dict[str, Any], float, float], None]


@dataclass(frozen=True)
class Continuity:
    """An optimizer, and the correction under which a split at step 0 changes nothing.

    `correct(group, a, b)` gets the parameter group of one tensor whose values became a times, and
    whose gradients became b times what they were.
    """

    make: Make
    correct: Correct
    before: int = 4  # steps of training before the split
    settings: dict[str, Any] = field(default_factory=dict)  # from the split on, in both runs
    state: Callable[[dict[str, Any], float, float], None] | None = None


def like_sgd(group: dict[str, Any], a: float, b: float) -> None:
    group["lr"] *= a / b
    group["weight_decay"] *= b / a


def like_adam(group: dict[str, Any], a: float, b: float) -> None:
    group["lr"] *= a
    group["eps"] *= b
    decoupled = group.get("decoupled_weight_decay", False)
    group["weight_decay"] *= 1 / a if decoupled else b / a


def like_asgd(group: dict[str, Any], a: float, b: float) -> None:
    like_sgd(group, a, b)
    group["lambd"] *= b / a


def asgd_state(state: dict[str, Any], a: float, b: float) -> None:
    state["eta"] = state["eta"] * a / b


def like_adadelta(group: dict[str, Any], a: float, b: float) -> None:
    group["lr"] *= a
    group["weight_decay"] *= b / a


def like_rprop(group: dict[str, Any], a: float, b: float) -> None:
    group["step_sizes"] = tuple(size * a for size in group["step_sizes"])


def rprop_state(state: dict[str, Any], a: float, b: float) -> None:
    state["step_size"] = state["step_size"] * a


SGD, ADAM = partial(Continuity, correct=like_sgd), partial(Continuity, correct=like_adam)

CONTINUITY = {
    "sgd": SGD(partial(optim.SGD, lr=0.1)),
    "sgd_momentum": SGD(partial(optim.SGD, lr=0.05, momentum=0.9)),
    "sgd_nesterov": SGD(partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
    "sgd_decay": SGD(
        partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1, foreach=True)
    ),
    "adam": ADAM(partial(optim.Adam, lr=0.02)),
    "adam_l2": ADAM(partial(optim.Adam, lr=0.02, weight_decay=0.1, eps=1e-3, foreach=True)),
    "adam_fused": ADAM(partial(optim.Adam, lr=0.02, fused=True)),
    "adamw_amsgrad": ADAM(partial(optim.AdamW, lr=0.02, amsgrad=True, weight_decay=0.1, eps=1e-2)),
    "rmsprop": ADAM(partial(optim.RMSprop, lr=0.005)),
    "rmsprop_full": ADAM(
        partial(optim.RMSprop, lr=0.002, centered=True, momentum=0.8, eps=1e-3, weight_decay=0.1)
    ),
    "adagrad": ADAM(partial(optim.Adagrad, lr=0.05, eps=1e-4, weight_decay=0.1)),
    "adagrad_start": ADAM(partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1)),
    "adamax": ADAM(partial(optim.Adamax, lr=0.01, eps=1e-3, weight_decay=0.1)),
    "nadam": ADAM(partial(optim.NAdam, lr=0.01, eps=1e-3, weight_decay=0.1)),
    "nadam_decoupled": ADAM(
        partial(optim.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)
    ),
    "radam": ADAM(partial(optim.RAdam, lr=0.02, eps=1e-3, weight_decay=0.1), before=5),
    "asgd": Continuity(
        partial(optim.ASGD, lr=0.1, lambd=1e-2, t0=1, weight_decay=0.1),
        like_asgd,
        state=asgd_state,
    ),
    "adadelta": Continuity(
        partial(optim.Adadelta, lr=1.0, eps=1e-6, weight_decay=0.1),
        like_adadelta,
        settings={"eps": 1e-22},  # which has no counterpart in a split: see the table
    ),
    "rprop": Continuity(
        partial(optim.Rprop, lr=0.01, step_sizes=(1e-4, 0.05)), like_rprop, state=rprop_state
    ),
}

# a and b of each parameter of the perceptron below when all its hidden neurons are split.
FACTORS = {
    "0.weight": (1, 0.5),
    "0.bias": (1, 0.5),
    "2.weight": (0.5, 0.5),
    "2.bias": (1, 0.5),
    "4.weight": (0.5, 1),
    "4.bias": (1, 1),
}


@cache
def _template() -> Problem:
    torch.manual_seed(0)
    return problem(mlp(3, 5, 4, 2), (9, 3))


def perceptron() -> Problem:
    template = _template()
    return Problem(copy.deepcopy(template.model), template.batches, template.units)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [q], "name": name} for name, q in model.named_parameters()]


def train(model: nn.Module, optimizer: Optimizer, p: Problem, steps: int) -> list[float]:
    losses = []
    for i in range(steps):
        optimizer.zero_grad()
        loss = mse(model, p.batches[i % 2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wide(name: str, tensor: Tensor) -> Tensor:
    """What a parameter of the narrow net is in the net with every neuron split."""
    a, _ = FACTORS[name]
    dims = {"0.weight": (0,), "2.weight": (0, 1), "4.weight": (1,), "4.bias": ()}.get(name, (0,))
    for dim in dims:
        tensor = torch.cat([tensor, tensor], dim)
    return a * tensor


def corrected(optimizer: Optimizer, case: Continuity) -> None:
    for group in optimizer.param_groups:
        case.correct(group, *FACTORS[group["name"]])
        if case.state is not None:
            case.state(optimizer.state[group["params"][0]], *FACTORS[group["name"]])


def run_both(case: Continuity, *, correct: bool = True) -> tuple[Problem, Problem, list[Any]]:
    """The same training twice, with and without a split of all hidden neurons at step 0."""
    narrow = perceptron()
    optimizer = case.make(groups_of(narrow.model))
    train(narrow.model, optimizer, narrow, case.before)
    for group in optimizer.param_groups:
        group.update(case.settings)

    grown = perceptron()
    grown.model.load_state_dict(narrow.model.state_dict())
    other = case.make(groups_of(grown.model))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    split_at_zero(grown.model, grown.units, {"0": range(5), "2": range(4)}, other)
    if correct:
        corrected(other, case)
    losses = [
        train(narrow.model, optimizer, narrow, STEPS),
        train(grown.model, other, grown, STEPS),
    ]
    return narrow, grown, [optimizer, other, losses]


@pytest.mark.parametrize("name", CONTINUITY)
def test_training_goes_on_as_without_the_split(name: str) -> None:
    start = perceptron().model.state_dict()
    narrow, grown, (_, _, losses) = run_both(CONTINUITY[name])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
    after = dict(grown.model.named_parameters())
    for parameter, tensor in narrow.model.named_parameters():
        assert (tensor - start[parameter]).abs().max() > 1e-4  # training did something
        expected = wide(parameter, tensor.detach())
        torch.testing.assert_close(after[parameter].detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONTINUITY)
def test_without_the_correction_it_does_not(name: str) -> None:
    """The comparison above can fail."""
    _, _, (_, _, losses) = run_both(CONTINUITY[name], correct=False)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) > 1e-4


# How often b is in each state tensor; None: it is the parameter's own average.
POWERS = {
    "sgd_momentum": {"momentum_buffer": 1},
    "adamw_amsgrad": {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2},
    "rmsprop_full": {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0},
    "adagrad": {"sum": 2},
    "adamax": {"exp_avg": 1, "exp_inf": 1},
    "nadam": {"exp_avg": 1, "exp_avg_sq": 2},
    "radam": {"exp_avg": 1, "exp_avg_sq": 2},
    "asgd": {"ax": None},
    "adadelta": {"square_avg": 2, "acc_delta": 0},
    "rprop": {"prev": 1},
}


@pytest.mark.parametrize("name", POWERS)
def test_state_stays_that_of_the_parent(name: str) -> None:
    """Twenty steps later the state is still the narrow run's, scaled by powers of b."""
    narrow, grown, (optimizer, other, _) = run_both(CONTINUITY[name])
    after = dict(grown.model.named_parameters())
    for parameter, tensor in narrow.model.named_parameters():
        a, b = FACTORS[parameter]
        for key, power in POWERS[name].items():
            value = optimizer.state[tensor][key]
            assert value.any() or name == "rprop"  # which forgets where the sign changed
            expected = wide(parameter, value) * (1 if power is None else b**power / a)
            torch.testing.assert_close(
                other.state[after[parameter]][key], expected, rtol=1e-7, atol=1e-13
            )


def test_adam_moves_offspring_as_their_parent_with_settings_left_alone() -> None:
    """theta's step does not depend on the gradient's size, so it needs no correction at all."""
    narrow = perceptron()
    optimizer = optim.Adam(narrow.model.parameters(), lr=0.01, eps=1e-30)
    train(narrow.model, optimizer, narrow, 4)
    grown = copy.deepcopy(narrow.model)
    other = optim.Adam(grown.parameters(), lr=0.01, eps=1e-30)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    split_at_zero(grown, narrow.units, {"2": [1]}, other)
    before = narrow.model[2].weight.detach().clone()
    train(narrow.model, optimizer, narrow, 1)
    train(grown, other, narrow, 1)
    moved = narrow.model[2].weight.detach() - before
    assert moved.abs().min() > 1e-5
    for row in (1, 4):
        torch.testing.assert_close(grown[2].weight[row] - before[1], moved[1], rtol=1e-9, atol=0)


# --- which neuron's state -----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        partial(optim.SGD, lr=0.1, momentum=0.9),
        partial(optim.Adam, lr=0.1, amsgrad=True),
        partial(optim.AdamW, lr=0.1, foreach=True),
        partial(optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
        partial(optim.Adagrad, lr=0.1),
        partial(optim.Adadelta),
        partial(optim.Adamax),
        partial(optim.NAdam),
        partial(optim.RAdam),
        partial(optim.ASGD),
        partial(optim.Rprop),
    ],
    ids=lambda make: make.func.__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_follows_its_neuron(make: Make, dtype: torch.dtype) -> None:
    template = _template()
    p = Problem(
        copy.deepcopy(template.model).to(dtype),
        [(x.to(dtype), y.to(dtype)) for x, y in template.batches],
        template.units,
    )
    optimizer = make(p.model.parameters())
    train(p.model, optimizer, p, 3)
    old = {n: dict(optimizer.state[q]) for n, q in p.model.named_parameters()}
    counters = {n: {k: v for k, v in s.items() if not v.ndim} for n, s in old.items()}
    values = {n: q.detach().clone() for n, q in p.model.named_parameters()}
    split_at_zero(p.model, p.units, {"0": [3]}, optimizer)
    rows, half = [0, 1, 2, 3, 4, 3], torch.tensor([1, 1, 1, 0.5, 1, 0.5], dtype=dtype)
    for name, parameter in p.model.named_parameters():
        new = optimizer.state[parameter]
        assert new.keys() == old[name].keys()
        for key, value in new.items():
            if not value.ndim:
                assert value is counters[name][key]
                continue
            assert value.dtype == dtype
            degree = DEGREES[next(k for k in type(optimizer).__mro__ if k in DEGREES)][key]
            a = half if degree == "value" else torch.ones(6, dtype=dtype)
            b = half ** (0 if degree == "value" else degree)
            was = old[name][key]
            expected = {
                "0.weight": lambda was=was, b=b: was[rows] * b[:, None],
                "0.bias": lambda was=was, b=b: was[rows] * b,
                "2.weight": lambda was=was, a=a: was[:, rows] * a,
            }.get(name, lambda was=was: was)()
            assert was.any()
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
            if degree == "value" and name == "2.weight":  # averaged as the parameter itself
                torch.testing.assert_close(value, values[name][:, rows] * half)
    train(p.model, optimizer, p, 2)
    assert all(q.isfinite().all() for q in p.model.parameters())


def test_two_groups_and_a_frozen_parameter() -> None:
    p = perceptron()
    p.model[0].bias.requires_grad_(False)
    units = sg.find_units(p.model, p.example)
    optimizer = optim.Adam(
        [
            {"params": [p.model[0].weight, p.model[2].weight], "lr": 0.1},
            {"params": [p.model[2].bias, *p.model[4].parameters()], "lr": 0.01},
        ]
    )
    train(p.model, optimizer, p, 2)
    frozen = p.model[0].bias.detach().clone()
    sg.split(p.model, hand_plan(units, {"0": [1], "2": [0, 2]}), step=1e-2, optimizer=optimizer)
    assert torch.equal(p.model[0].bias.detach(), frozen[[0, 1, 2, 3, 4, 1]])  # copied, not moved
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]
    train(p.model, optimizer, p, 2)
    assert torch.equal(p.model[0].bias.detach(), frozen[[0, 1, 2, 3, 4, 1]])


def test_an_optimizer_that_has_not_stepped_yet() -> None:
    p = perceptron()
    optimizer = optim.Adam(p.model.parameters())
    sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=1e-2, optimizer=optimizer)
    assert not optimizer.state
    train(p.model, optimizer, p, 1)


def test_a_frozen_parameter_that_was_trained_before_keeps_its_state_in_step() -> None:
    p = perceptron()
    optimizer = optim.Adam(p.model.parameters())
    train(p.model, optimizer, p, 1)
    p.model[0].bias.requires_grad_(False)
    units = sg.find_units(p.model, p.example)
    sg.split(p.model, hand_plan(units, {"0": [1]}), step=1e-2, optimizer=optimizer)
    p.model[0].bias.requires_grad_(True)
    train(p.model, optimizer, p, 1)
    assert optimizer.state[p.model[0].bias]["exp_avg"].shape == (6,)


@pytest.mark.parametrize("fused", [False, True])
def test_state_keeps_the_parameters_memory_format(fused: bool) -> None:
    p = problem(ConvNet().to(memory_format=torch.channels_last), (6, 2, 5, 5))
    optimizer = optim.Adam(p.model.parameters(), fused=fused)
    train(p.model, optimizer, p, 1)
    sg.split(p.model, hand_plan(p.units, {"conv1": [1]}), step=1e-2, optimizer=optimizer)
    for parameter in p.model.parameters():
        assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()
        assert optimizer.state[parameter]["exp_avg_sq"].stride() == parameter.stride()
    train(p.model, optimizer, p, 1)


def test_optimizer_state_dict_round_trip_after_a_split() -> None:
    p = perceptron()
    optimizer = optim.AdamW(p.model.parameters())
    train(p.model, optimizer, p, 2)
    sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=1e-2, optimizer=optimizer)
    twin = copy.deepcopy(p.model)
    other = optim.AdamW(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(p.model, optimizer, p, 2)
    train(twin, other, p, 2)
    for a, b in zip(p.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# --- what cannot follow -------------------------------------------------------------------


class Factored(optim.SGD):
    """Keeps a row and a column in place of a matrix."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for q in group["params"]:
                if q.ndim == 2:
                    self.state[q]["row"] = q.detach().square().mean(1)


class Listed(optim.SGD):
    """Keeps a list of past gradients."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for q in group["params"]:
                self.state[q]["history"] = [q.grad.clone()]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Factored, lr=0.1), r"Factored keeps 'row' of 0.weight with shape \(5,\)"),
        (partial(Listed, lr=0.1), "Listed keeps 'history' of 0.weight as a list of tensors"),
        (partial(optim.Adafactor, lr=0.1), "Adafactor keeps 'row_var' of 0.weight"),
    ],
    ids=["factored", "listed", "adafactor"],
)
def test_state_of_other_shapes_is_refused(make: Make, message: str) -> None:
    p = perceptron()
    optimizer = make(p.model.parameters())
    train(p.model, optimizer, p, 2)
    plan = hand_plan(p.units, {"0": [1]})
    snapshot = Snapshot(p.model, optimizer)
    with pytest.raises(sg.OptimizerError, match=message) as raised:
        sg.split(p.model, plan, step=1e-2, optimizer=optimizer)
    assert "optimizer=None and make a new optimizer" in str(raised.value)
    snapshot.assert_same()


def test_lbfgs_is_refused_once_it_has_a_history() -> None:
    p = perceptron()
    optimizer = optim.LBFGS(p.model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(p.model, p.batches[0])
        loss.backward()
        return loss

    optimizer.step(closure)
    plan = hand_plan(p.units, {"2": [1]})  # whose tensors are not the first, where it keeps it all
    snapshot = Snapshot(p.model, optimizer)
    with pytest.raises(sg.OptimizerError, match="LBFGS keeps the history"):
        sg.split(p.model, plan, step=1e-2, optimizer=optimizer)
    snapshot.assert_same()


def test_an_optimizer_of_another_model_is_refused() -> None:
    p = perceptron()
    plan = hand_plan(p.units, {"0": [1]})
    other = optim.SGD(copy.deepcopy(p.model).parameters(), lr=0.1)
    snapshot = Snapshot(p.model, other)
    with pytest.raises(sg.OptimizerError, match=r"does not own 0\.weight, 0\.bias, 2\.weight, wh"):
        sg.split(p.model, plan, step=1e-2, optimizer=other)
    some = optim.SGD([*p.model[0].parameters()], lr=0.1)
    with pytest.raises(sg.OptimizerError, match=r"does not own 2\.weight, which the split resizes"):
        sg.split(p.model, plan, step=1e-2, optimizer=some)
    with pytest.raises(sg.OptimizerError, match=r"expected a torch\.optim\.Optimizer, got list"):
        sg.split(p.model, plan, step=1e-2, optimizer=[some])
    snapshot.assert_same()


# --- optimizers from elsewhere ------------------------------------------------------------


class Averaged(optim.SGD):
    """Keeps an average of the parameter itself under a name of its own."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for q in group["params"]:
                self.state[q].setdefault("z", q.detach().clone())


def test_unknown_state_is_announced_and_can_be_declared() -> None:
    class Declared(Averaged):
        pass

    for kind, expected in ((Averaged, 0.5), (Declared, 1.0)):
        if kind is Declared:
            state_of(Declared, z="value")
        p = perceptron()
        optimizer = kind(p.model.parameters(), lr=0.1, momentum=0.9)
        train(p.model, optimizer, p, 1)
        z = optimizer.state[p.model[0].weight]["z"].clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=1e-2, optimizer=optimizer)
        told = [str(w.message) for w in caught if "does not know" in str(w.message)]
        assert bool(told) == (kind is Averaged)
        torch.testing.assert_close(optimizer.state[p.model[0].weight]["z"][1], expected * z[1])
    assert "state_of(Averaged, z=...)" in told[0] if told else True


def test_every_optimizer_of_torch_has_its_table() -> None:
    """A new optimizer of torch must not fall back on guesses."""
    known = {k for k in vars(optim).values() if isinstance(k, type) and issubclass(k, Optimizer)}
    without = known - DEGREES.keys() - {Optimizer, optim.LBFGS, optim.AdamW}
    assert {kind.__name__ for kind in without} <= {"Muon"}  # momentum_buffer, by its usual name
