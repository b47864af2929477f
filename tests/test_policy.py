"""Policy and Budget: what they take, what they refuse and in which words, and what they answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

import splitgrow as sg
from splitgrow.cost import Cost
from splitgrow.errors import InputError
from splitgrow.select import Caps, Limits

# --- how much in a phase ------------------------------------------------------------------


def test_the_default_is_the_papers_thirty_percent() -> None:
    assert sg.Policy().fraction == 0.3
    assert sg.Policy().how_many(10) == 3


@pytest.mark.parametrize(
    ("fraction", "neurons", "expected"), [(0.3, 1, 1), (0.01, 5, 1), (0.5, 7, 4), (1.0, 9, 9)]
)
def test_a_fraction_is_rounded_and_at_least_one(
    fraction: float, neurons: int, expected: int
) -> None:
    assert sg.Policy(fraction=fraction).how_many(neurons) == expected


def test_a_count_does_not_depend_on_the_net() -> None:
    policy = sg.Policy(count=4)
    assert policy.fraction is None
    assert [policy.how_many(n) for n in (1, 10, 1000)] == [4, 4, 4]


def test_caps_hold_what_each_unit_may_take() -> None:
    policy = sg.Policy(per="macs", min_per_unit=1, max_per_unit=5, round_to=4, max_growth=0.5)
    assert policy.caps == Caps("macs", 1, 5, 4, 0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fraction": 0.3, "count": 3}, r"fraction= or count=, not both"),
        ({"fraction": 0.0}, r"fraction: expected a number in \(0, 1\], got 0.0"),
        ({"fraction": 1.5}, r"fraction: .*got 1.5"),
        ({"count": 0}, r"count: expected a whole number of at least 1, got 0"),
        ({"count": 2.5}, r"count: .*got 2.5"),
        ({"threshold": 0.1}, r"threshold: lambda\* must be <= 0, got 0.1"),
        ({"threshold": math.nan}, r"threshold: .*got nan"),
        ({"rank": "size"}, r"rank: expected one of \('lambda', 'gain'\), got 'size'"),
        ({"per": "layer"}, r"per: expected one of .*'neuron', 'params', 'macs'.*got 'layer'"),
        ({"min_per_unit": -1}, r"min_per_unit: .*at least 0, got -1"),
        ({"max_per_unit": -1}, r"max_per_unit: .*got -1"),
        ({"max_growth": 2.0}, r"max_growth: expected a number in \(0, 1\], got 2.0"),
        ({"min_per_unit": 3, "max_per_unit": 2}, r"0 <= min <= max, got 3 and 2"),
        ({"round_to": 0}, r"round_to: expected a whole number of at least 1, got 0"),
        ({"step": 0.0}, r"step: expected a positive number, got 0.0"),
        ({"step": math.inf}, r"step: .*got inf"),
        ({"step": math.nan}, r"step: .*got nan"),
        ({"step": "big"}, r"step: .*got 'big'"),
        ({"lanczos": 0}, r"lanczos: expected a whole number of at least 1, got 0"),
        ({"lanczos": 1.5}, r"lanczos: .*got 1.5"),
        ({"stand_in": 3.0}, r"stand_in: expected splitgrow.Softplus\(3.0\) or the like, got 3.0"),
        ({"after": "rest"}, r"after: expected one of \('finetune', 'retrain'\), got 'rest'"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sg.Policy(**arguments)


# --- when to end --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["params", "macs", "phases"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True, "many", math.inf])
def test_a_budget_is_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"{name}: expected a whole number of at least 1, got"):
        sg.Budget(**{name: value})


def test_a_budget_without_any_end_is_refused() -> None:
    with pytest.raises(InputError, match="at least one of params, macs, phases and metric"):
        sg.Budget(phases=None)


@pytest.mark.parametrize(
    "goal",
    [
        "accuracy",
        ("accuracy",),
        (0.9, "accuracy"),
        ("accuracy", math.nan),
        0.9,
        ("accuracy", "high"),
        ("accuracy", math.inf),
    ],
)
def test_a_metric_is_a_name_and_a_value(goal: Any) -> None:
    with pytest.raises(InputError, match=r'metric: expected a name and a value, \("accuracy", 0.9'):
        sg.Budget(metric=goal)


def test_a_metric_may_come_as_a_list() -> None:
    assert sg.Budget(metric=["accuracy", 1]).metric == ("accuracy", 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("goal", "metrics", "expected"),
    [
        (("accuracy", 0.9), {"accuracy": 0.9}, "metric"),
        (("accuracy", 0.9), {"accuracy": 0.89}, None),
        (("-error", -0.1), {"error": 0.1}, "metric"),
        (("-error", -0.1), {"error": 0.11}, None),
        (("-error", 0.5), {"-error": 0.6, "error": 9.0}, "metric"),  # a metric of that very name
        (("accuracy", 0.9), {"accuracy": math.nan}, None),
        (("-error", -0.1), {"error": math.nan}, None),
    ],
)
def test_a_metric_is_reached_from_below(
    goal: tuple[str, float], metrics: dict[str, float], expected: str | None
) -> None:
    assert sg.Budget(metric=goal).reached(0, metrics) == expected


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, "evaluate reports no metrics, but not 'f1'"),
        ({"a": 1, "b": 2}, "reports a, b, but not"),
    ],
)
def test_a_metric_that_is_not_reported_is_an_error(metrics: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        sg.Budget(metric=("f1", 0.5)).reached(0, metrics)


def test_phases_are_counted_from_the_seed() -> None:
    budget = sg.Budget(phases=3)
    assert [budget.reached(n, {}) for n in range(4)] == [None, None, "phases", "phases"]
    assert sg.Budget(phases=None, params=9).reached(10_000, {}) is None


def test_a_metric_comes_before_the_number_of_phases() -> None:
    assert sg.Budget(phases=1, metric=("a", 1)).reached(0, {"a": 2}) == "metric"


def test_what_is_left_is_the_budget_less_what_is_spent() -> None:
    assert sg.Budget(params=100).left(Cost(30, 500), 4) == Limits(4, 70, None)
    assert sg.Budget(params=30, macs=600).left(Cost(30, 500), 1) == Limits(1, 0, 100)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (sg.Budget(params=1200), r"has 1,234 params before it grows, more than the .* of 1,200"),
        (sg.Budget(macs=5), r"has 99 macs before it grows, more than the budget of 5"),
    ],
)
def test_a_seed_larger_than_the_budget_is_refused(budget: sg.Budget, words: str) -> None:
    with pytest.raises(InputError, match=words):
        budget.check_seed(Cost(1234, 99))
    sg.Budget(params=1234, macs=99).check_seed(Cost(1234, 99))
