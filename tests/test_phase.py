"""A phase: its optimizer is carried and restored, its curve is complete and bounded."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from splitgrow.errors import InputError, LossError, OptimizerError
from splitgrow.phase import MAX_POINTS, Curve, Phase


class Witness:
    """Writes down what a listener is told."""

    def __init__(self) -> None:
        self.iterations: list[tuple[int, int, float]] = []
        self.steps: list[tuple[int, int, int]] = []

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        self.iterations.append((phase.number, iteration, loss))

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        self.steps.append((phase.number, done, total))


def some_optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)


def trained_adam(parameter: nn.Parameter, steps: int) -> Adam:
    optimizer = Adam([parameter], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        parameter.square().sum().backward()
        optimizer.step()
    return optimizer


# --- the optimizer ------------------------------------------------------------------------


def test_an_optimizer_is_none_until_it_is_assigned() -> None:
    phase = Phase()
    assert phase.optimizer is None
    optimizer = some_optimizer()
    phase.optimizer = optimizer
    assert phase.optimizer is optimizer


def test_a_carried_optimizer_is_there_from_the_start() -> None:
    optimizer = some_optimizer()
    assert Phase(1, optimizer=optimizer).optimizer is optimizer


@pytest.mark.parametrize("thing", [None, "sgd", nn.Linear(1, 1), SGD])
def test_only_an_optimizer_can_be_assigned(thing: Any) -> None:
    phase = Phase(3)
    with pytest.raises(OptimizerError, match=r"phase 3: .*must be a torch.optim.Optimizer, got"):
        phase.optimizer = thing
    assert phase.optimizer is None


def test_only_an_optimizer_can_be_carried() -> None:
    with pytest.raises(OptimizerError, match="got str"):
        Phase(1, optimizer="sgd")  # type: ignore[arg-type]


def test_a_saved_state_is_loaded_into_the_first_optimizer_assigned() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    saved = trained_adam(parameter, 3).state_dict()
    phase = Phase(1, restore=lambda optimizer: optimizer.load_state_dict(saved))
    fresh = Adam([parameter], lr=0.5)
    phase.optimizer = fresh
    assert fresh.state[parameter]["step"] == 3
    assert torch.equal(fresh.state[parameter]["exp_avg"], saved["state"][0]["exp_avg"])
    assert fresh.param_groups[0]["lr"] == 0.1


def test_a_saved_state_is_loaded_once() -> None:
    calls: list[Optimizer] = []
    phase = Phase(1, restore=calls.append)
    optimizer = some_optimizer()
    phase.optimizer = optimizer
    phase.optimizer = optimizer
    assert calls == [optimizer]


def test_a_state_that_cannot_be_loaded_leaves_the_phase_without_optimizer() -> None:
    saved = Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]).state_dict()
    phase = Phase(1, restore=lambda optimizer: optimizer.load_state_dict(saved))
    with pytest.raises(ValueError, match="doesn't match the size"):
        phase.optimizer = Adam([nn.Parameter(torch.ones(2))])
    assert phase.optimizer is None
    right = Adam([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], lr=0.3)
    phase.optimizer = right  # the state is still waiting
    assert right.param_groups[0]["lr"] == 1e-3


def test_a_second_optimizer_is_refused_and_the_first_stays() -> None:
    first = some_optimizer()
    phase = Phase(2, optimizer=first)
    with pytest.raises(OptimizerError, match=r"phase 2: .*forget_optimizer"):
        phase.optimizer = some_optimizer()
    assert phase.optimizer is first


def test_forgetting_makes_room_for_a_fresh_optimizer_in_any_run() -> None:
    """Anew in each phase: the same in a resumed run, where a state waits, and in one that isn't."""
    for phase in (Phase(1, optimizer=some_optimizer()), Phase(1, restore=pytest.fail)):
        phase.forget_optimizer()
        assert phase.optimizer is None
        fresh = some_optimizer()
        phase.optimizer = fresh
        assert phase.optimizer is fresh


# --- logging ------------------------------------------------------------------------------


def test_iterations_are_counted_over_the_whole_run() -> None:
    phase = Phase(1, first_iteration=40)
    phase.log(2.0)
    phase.log(1.5)
    assert phase.curve == [(40, 2.0), (41, 1.5)]
    assert (phase.iterations, phase.next_iteration) == (2, 42)


def test_a_curve_is_plain_json() -> None:
    phase = Phase()
    phase.log(torch.tensor(0.5))
    assert json.loads(json.dumps(phase.curve)) == [[0, 0.5]]


@pytest.mark.parametrize(
    "loss",
    [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16), np.float32(0.5),
     torch.tensor(0.5, requires_grad=True) * 1],
    ids=["float", "tensor", "bfloat16", "numpy", "with a graph"],
)  # fmt: skip
def test_a_loss_may_be_any_single_number(loss: Any) -> None:
    phase = Phase()
    phase.log(loss)
    assert phase.curve == [(0, 0.5)]
    assert type(phase.curve[0][1]) is float


@pytest.mark.parametrize("loss", [torch.ones(1), torch.ones(3), "0.5", None, [0.5], 1j])
def test_a_loss_that_is_not_one_number(loss: Any) -> None:
    phase = Phase(2, first_iteration=7)
    with pytest.raises(InputError, match=r"phase 2, iteration 7: phase.log takes the mean loss"):
        phase.log(loss)
    assert phase.iterations == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_is_named_and_not_kept(bad: Any) -> None:
    witness = Witness()
    phase = Phase(4, first_iteration=10, listener=witness)
    phase.log(1.0)
    with pytest.raises(LossError, match=r"phase 4, iteration 11: the training loss is -?(nan|inf)"):
        phase.log(bad)
    assert phase.curve == [(10, 1.0)]
    assert witness.iterations == [(4, 10, 1.0)]


def test_a_listener_hears_every_iteration_and_the_progress() -> None:
    witness = Witness()
    phase = Phase(3, first_iteration=5, listener=witness)
    for loss in (2.0, 1.0):
        phase.log(loss)
    phase.progress(1, 4)
    assert witness.iterations == [(3, 5, 2.0), (3, 6, 1.0)]
    assert witness.steps == [(3, 1, 4)]


def test_progress_stays_within_its_bounds() -> None:
    witness = Witness()
    phase = Phase(listener=witness)
    phase.progress(5, 4)
    phase.progress(-1, 4)
    assert witness.steps == [(0, 4, 4), (0, 0, 4)]


def test_without_a_listener_nothing_is_needed() -> None:
    phase = Phase()
    phase.log(1.0)
    phase.progress(1, 2)
    assert not phase.should_stop


def test_should_stop_follows_the_flag() -> None:
    flag = threading.Event()
    phase = Phase(stop=flag)
    assert phase.should_stop is False
    flag.set()
    assert phase.should_stop is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"number": -1}, "number: expected an integer of 0 or more, got -1"),
        ({"first_iteration": 1.5}, "first_iteration: expected an integer"),
        ({"seed": -1}, "seed: expected an integer from 0"),
        ({"seed": 2**32}, "seed: expected an integer from 0"),
        ({"seed": True}, "seed: expected an integer from 0"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Phase(**settings)


def test_every_seed_is_one_that_numpy_takes() -> None:
    for seed in (0, 2**32 - 1):
        np.random.default_rng(seed)
        np.random.RandomState(Phase(seed=seed).seed)


# --- thinning -----------------------------------------------------------------------------


def curve_of(losses: list[float], first: int = 0) -> list[tuple[int, float]]:
    curve = Curve(first)
    for loss in losses:
        curve.add(loss)
    return curve.points


def test_a_short_curve_is_kept_whole() -> None:
    losses = [1 / (i + 1) for i in range(MAX_POINTS - 1)]
    assert curve_of(losses, 3) == [(3 + i, loss) for i, loss in enumerate(losses)]


@pytest.mark.parametrize("count", [MAX_POINTS, MAX_POINTS + 1, 3 * MAX_POINTS + 7, 100_003])
def test_a_long_curve_is_the_means_of_equal_blocks(count: int) -> None:
    losses = np.random.default_rng(0).random(count)
    points = curve_of(losses.tolist(), 11)
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    starts = [start - 11 for start, _ in points]
    block = starts[1]
    assert starts == list(range(0, count, block))
    means = [losses[start : start + block].mean() for start in starts]
    np.testing.assert_allclose([mean for _, mean in points], means, rtol=1e-12)


def test_the_length_of_a_curve_counts_iterations_not_points() -> None:
    curve = Curve()
    for i in range(5001):
        assert len(curve) == i
        curve.add(1.0)


def test_thinning_depends_on_the_losses_alone() -> None:
    losses = np.random.default_rng(1).random(9000).tolist()
    assert curve_of(losses) == curve_of(losses)
    reading = Curve()
    for loss in losses:  # being read in between changes nothing
        reading.add(loss)
        if len(reading) % 1000 == 0:
            assert reading.points
    assert reading.points == curve_of(losses)
