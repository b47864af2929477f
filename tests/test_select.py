"""Select: the paper's rule, fractions, limits per unit, budgets, and the order of ties."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import splitgrow as sg
from helpers_split import ConvNet, mlp, split_at_zero
from splitgrow import zoo
from splitgrow.scores import Scores, UnitScores
from splitgrow.units import Units

MODELS = {
    "mlp": (lambda: mlp(3, 6, 4, 5, 2), (2, 3)),
    "convnet": (ConvNet, (2, 2, 5, 5)),
    "mobilenet_v2": (lambda: zoo.MobileNetV2(((2, 3, 2, 2),), stem=4, last=5), (2, 3, 6, 6)),
    "densenet": (lambda: zoo.DenseNet((2, 1), stem=3, growth=2, in_channels=2), (2, 2, 6, 6)),
    "unet": (lambda: zoo.UNet((2, 3), in_channels=1), (2, 1, 4, 4)),
}


@cache
def model_and_units(name: str) -> tuple[nn.Module, Tensor, Units]:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    return model, x, sg.find_units(model, (x,))


def synthetic(name: str, values: list[float], scales: list[float] | None = None) -> Scores:
    """Scores as given, unit after unit; random directions."""
    units = model_and_units(name)[2]
    found: dict[str, UnitScores] = {}
    start = 0
    for unit in units:
        taken = slice(start, start + unit.width)
        index = torch.tensor(values[taken], dtype=torch.float64)
        assert len(index) == unit.width
        size = torch.ones(unit.width) if scales is None else torch.tensor(scales[taken])
        vectors = F.normalize(torch.randn(unit.width, unit.size), dim=1)
        none = torch.zeros(unit.width)
        found[unit.name] = UnitScores(unit, index, vectors, none, size, "dense", none)
        start += unit.width
    assert start == len(values)
    return Scores(units, found, loss=1.0, samples=8)


def neurons(name: str) -> int:
    return sum(unit.width for unit in model_and_units(name)[2])


def listed(plan: sg.SplitPlan) -> list[tuple[str, int]]:
    return [(entry.unit, entry.neuron) for entry in plan]


# mlp: units "0" (6 neurons), "2" (4), "4" (5)
VALUES = [
    *(-3.0, 0.5, -1.0, 0.0, -0.2, -7.0),
    *(-2.0, -5.0, 1.0, -0.1),
    *(-4.0, -6.0, 2.0, -0.3, -8.0),
]


# --- the rule of the paper ----------------------------------------------------------------


def test_count_takes_the_most_negative() -> None:
    plan = sg.select(synthetic("mlp", VALUES), count=4)
    assert listed(plan) == [("4", 4), ("0", 5), ("4", 1), ("2", 1)]
    assert [entry.lambda_ for entry in plan] == [-8, -7, -6, -5]


def test_threshold_is_inclusive_and_works_with_count() -> None:
    scores = synthetic("mlp", VALUES)
    assert [e.lambda_ for e in sg.select(scores, threshold=-4.0)] == [-8, -7, -6, -5, -4]
    assert [e.lambda_ for e in sg.select(scores, threshold=-4.0, count=2)] == [-8, -7]
    assert [e.lambda_ for e in sg.select(scores, threshold=-7.5, count=9)] == [-8]
    assert len(sg.select(scores, threshold=-9.0)) == 0


def test_without_limits_every_negative_neuron_and_no_other() -> None:
    plan = sg.select(synthetic("mlp", VALUES))
    assert sorted(e.lambda_ for e in plan) == sorted(v for v in VALUES if v < 0)
    assert len(sg.select(synthetic("mlp", [0.0] * 15), fraction=1.0)) == 0
    assert len(sg.select(synthetic("mlp", [1.0] * 15), count=3, min_per_unit=2)) == 0


@pytest.mark.parametrize(
    ("fraction", "expected"), [(1e-9, 1), (0.1, 2), (0.3, 4), (0.5, 8), (0.8, 11), (1.0, 11)]
)
def test_fraction_is_of_all_neurons(fraction: float, expected: int) -> None:
    plan = sg.select(synthetic("mlp", VALUES), fraction=fraction)
    assert len(plan) == expected  # 15 neurons, 11 of them negative
    assert list(plan) == list(sg.select(synthetic_same(plan), count=expected))


def synthetic_same(plan: sg.SplitPlan) -> Scores:
    """The same scores with the directions of a plan, which are drawn at random."""
    scores = synthetic("mlp", VALUES)
    for entry in plan:
        scores[entry.unit].vectors[entry.neuron] = entry.direction
    return scores


def test_entries_hold_what_was_scored() -> None:
    scores = synthetic("mlp", VALUES, [float(i + 1) for i in range(15)])
    (entry,) = sg.select(scores, count=1)
    assert (entry.unit, entry.neuron, entry.lambda_, entry.scale) == ("4", 4, -8.0, 15.0)
    assert torch.equal(entry.direction, scores["4"].vectors[4])


# --- ties and order -----------------------------------------------------------------------


def test_ties_go_to_the_first_unit_and_the_first_neuron() -> None:
    plan = sg.select(synthetic("mlp", [-1.0] * 15), count=8)
    assert listed(plan) == [("0", k) for k in range(6)] + [("2", 0), ("2", 1)]


def test_ties_per_cost_are_broken_the_same_way_every_time() -> None:
    scores = synthetic("unet", [-1.0] * neurons("unet"))
    first, second = (listed(sg.select(scores, max_params=60)) for _ in range(2))
    assert first
    assert first == second
    for name in {unit for unit, _ in first}:
        own = [k for unit, k in first if unit == name]
        assert own == list(range(len(own)))


# --- rank ---------------------------------------------------------------------------------


def test_rank_by_gain_counts_the_neurons_scale() -> None:
    scales = [1.0] * 15
    scales[2], scales[9] = 3.0, 10.0  # lambda -1 and -0.1
    scores = synthetic("mlp", VALUES, scales)
    assert listed(sg.select(scores, count=3, rank="gain")) == [("2", 3), ("0", 2), ("4", 4)]
    assert listed(sg.select(scores, count=1, rank="lambda")) == [("4", 4)]


# --- limits per unit ----------------------------------------------------------------------


def test_maximum_per_unit() -> None:
    plan = sg.select(synthetic("mlp", VALUES), max_per_unit=1)
    assert listed(plan) == [("4", 4), ("0", 5), ("2", 1)]
    assert len(sg.select(synthetic("mlp", VALUES), max_per_unit=0)) == 0


def test_no_unit_grows_by_more_than_a_fraction_of_itself() -> None:
    scores = synthetic("mlp", VALUES)
    widths = {unit.name: unit.width for unit in scores.units}
    plan = sg.select(scores, max_growth=0.34)
    taken = Counter(unit for unit, _ in listed(plan))
    negative = {name: sum(v < 0 for v in found.values.tolist()) for name, found in scores.items()}
    assert taken == {n: min(max(round(0.34 * w), 1), negative[n]) for n, w in widths.items()}
    assert any(taken[name] < negative[name] for name in widths)  # it has kept some back
    least = Counter(unit for unit, _ in listed(sg.select(scores, max_growth=0.01)))
    assert set(least.values()) == {1}


def test_minimum_per_unit_comes_first_and_the_best_unit_first() -> None:
    scores = synthetic("mlp", VALUES)
    plan = sg.select(scores, count=4, min_per_unit=1)
    assert listed(plan) == [("4", 4), ("0", 5), ("2", 1), ("4", 1)]
    assert listed(sg.select(scores, count=2, min_per_unit=1)) == [("4", 4), ("0", 5)]
    plan = sg.select(scores, count=9, min_per_unit=3)
    assert Counter(entry.unit for entry in plan) == {"0": 3, "2": 3, "4": 3}


def test_minimum_stops_at_what_is_negative() -> None:
    values = [-9.0, *[1.0] * 5, -1.0, -2.0, -3.0, -4.0, *[-0.5] * 5]
    plan = sg.select(synthetic("mlp", values), count=6, min_per_unit=2)
    assert Counter(entry.unit for entry in plan) == {"0": 1, "2": 3, "4": 2}


# --- rounding -----------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_widths_end_at_a_multiple(multiple: int) -> None:
    values = [-float(i + 1) for i in range(15)]
    plan = sg.select(synthetic("mlp", values), round_to=multiple)
    counts = Counter(entry.unit for entry in plan)
    assert counts
    for unit in plan.units:
        if counts[unit.name]:
            assert (unit.width + counts[unit.name]) % multiple == 0


def test_a_unit_that_cannot_reach_the_multiple_is_left_alone() -> None:
    values = [-9.0, -9.0, *[1.0] * 4, -1.0, -2.0, -3.0, -4.0, *[1.0] * 5]
    plan = sg.select(synthetic("mlp", values), round_to=4)  # 6 -> 8, 4 -> 8, 5 -> 8 needs three
    assert Counter(entry.unit for entry in plan) == {"0": 2, "2": 4}
    plan = sg.select(synthetic("mlp", values), round_to=4, count=5)
    assert Counter(entry.unit for entry in plan) == {"0": 2}


# --- budgets ------------------------------------------------------------------------------


def counted(model: nn.Module, x: Tensor) -> sg.Cost:
    """Parameters and MACs per sample, by torch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    params = sum(p.numel() for p in model.parameters())
    return sg.Cost(params, counter.get_total_flops() // 2 // len(x))


def added(name: str, plan: sg.SplitPlan) -> sg.Cost:
    """What a plan really adds: a copy is split and counted."""
    model, x, units = model_and_units(name)
    grown = copy.deepcopy(model)
    split_at_zero(grown, units, plan.chosen)
    return counted(grown, x) - counted(model, x)


numbers = st.floats(-10, 2, allow_nan=False).map(lambda v: round(v, 1))


@given(data=st.data(), name=st.sampled_from(sorted(MODELS)))
def test_no_limit_is_ever_exceeded_and_none_is_wasted(data: st.DataObject, name: str) -> None:
    total = neurons(name)
    values = data.draw(st.lists(numbers, min_size=total, max_size=total))
    maybe = st.none() | st.integers(0, 400)
    limits: dict[str, Any] = {
        "max_params": data.draw(maybe),
        "max_macs": data.draw(st.none() | st.integers(0, 4000)),
        "count": data.draw(st.none() | st.integers(1, total)),
        "max_per_unit": data.draw(st.none() | st.integers(0, 4)),
        "max_growth": data.draw(st.none() | st.floats(0.01, 1.0)),
        "threshold": data.draw(st.sampled_from([0.0, -1.0, -5.0])),
        "per": data.draw(st.sampled_from([None, "neuron", "params", "macs"])),
        "rank": data.draw(st.sampled_from(["lambda", "gain"])),
        "round_to": data.draw(st.sampled_from([1, 1, 2, 4])),
    }
    limits["min_per_unit"] = data.draw(st.integers(0, min(2, limits["max_per_unit"] or 0)))
    scores = synthetic(name, values)
    plan = sg.select(scores, **limits)

    chosen = listed(plan)
    assert len(set(chosen)) == len(chosen)
    assert all(e.lambda_ == scores[e.unit].values[e.neuron] for e in plan)
    assert all(e.lambda_ < 0 and e.lambda_ <= limits["threshold"] for e in plan)
    counts = Counter(unit for unit, _ in chosen)
    for unit in plan.units:
        assert counts[unit.name] <= _most(unit, limits)
        assert not counts[unit.name] or (unit.width + counts[unit.name]) % limits["round_to"] == 0
    assert len(plan) <= (limits["count"] or inf)
    spent = added(name, plan)
    assert spent.params <= (inf if limits["max_params"] is None else limits["max_params"])
    assert spent.macs <= (inf if limits["max_macs"] is None else limits["max_macs"])
    for unit in plan.units:  # within a unit the best are taken
        own = scores[unit.name].values.tolist()
        taken = sorted((own[k], k) for name_, k in chosen if name_ == unit.name)
        assert taken == sorted((v, k) for k, v in enumerate(own))[: len(taken)]
    assert listed(sg.select(scores, **limits)) == chosen
    if limits["round_to"] == 1:
        _assert_maximal(name, scores, plan, limits)


def _most(unit: sg.Unit, limits: dict[str, Any]) -> float:
    """How many of a unit may be taken."""
    growth = limits["max_growth"]
    share = inf if growth is None else max(round(growth * unit.width), 1)
    return min(share, inf if limits["max_per_unit"] is None else limits["max_per_unit"])


def _assert_maximal(name: str, scores: Scores, plan: sg.SplitPlan, limits: dict[str, Any]) -> None:
    """Nothing more fits."""
    if limits["count"] is not None and len(plan) == limits["count"]:
        return
    for unit in plan.units:
        taken = plan.chosen.get(unit.name, [])
        if len(taken) >= _most(unit, limits):
            continue
        left = [k for k, v in enumerate(scores[unit.name].values.tolist())
                if v < 0 and v <= limits["threshold"] and k not in taken]  # fmt: skip
        if not left:
            continue
        entry = sg.Entry(unit.name, left[0], -1.0, scores[unit.name].vectors[left[0]], 1.0)
        spent = added(name, sg.SplitPlan([*plan, entry], plan.units))
        over_params = limits["max_params"] is not None and spent.params > limits["max_params"]
        over_macs = limits["max_macs"] is not None and spent.macs > limits["max_macs"]
        assert over_params or over_macs


def test_a_budget_that_just_fits_is_used_up() -> None:
    """One neuron of the first unit of the perceptron: 3 + 1 of its own, 4 that read it."""
    values = [-1.0, *[1.0] * 14]
    assert len(sg.select(synthetic("mlp", values), max_params=8)) == 1
    assert len(sg.select(synthetic("mlp", values), max_params=7)) == 0
    assert len(sg.select(synthetic("mlp", values), max_macs=7)) == 1
    assert len(sg.select(synthetic("mlp", values), max_macs=6)) == 0


def test_neighbours_that_grow_together_cost_more() -> None:
    """Neurons of "0" and "2" cost 8 and 6 + 1 + 5 alone, and one weight more together."""
    values = [-1.0, *[1.0] * 5, -1.0, *[1.0] * 8]
    assert len(sg.select(synthetic("mlp", values), max_params=8 + 12)) == 1
    assert len(sg.select(synthetic("mlp", values), max_params=8 + 12 + 1)) == 2


def test_gain_per_cost() -> None:
    """A neuron of "0" adds 8 parameters, one of "2" adds 12, one of "4" adds 4 + 1 + 2."""
    values = [1.0] * 15
    values[0], values[6], values[10] = -9.0, -10.0, -7.5
    scores = synthetic("mlp", values)
    assert listed(sg.select(scores, count=1)) == [("2", 0)]
    assert listed(sg.select(scores, count=1, per="params")) == [("0", 0)]  # 9/8 > 7.5/7 > 10/12
    assert listed(sg.select(scores, max_params=8)) == [("0", 0)]
    assert listed(sg.select(scores, max_params=8, per="neuron")) == [("0", 0)]
    assert listed(sg.select(scores, max_params=15, per="neuron")) == [("2", 0)]
    assert listed(sg.select(scores, max_params=15)) == [("0", 0), ("4", 0)]
    assert listed(sg.select(scores, count=1, per="macs")) == [("0", 0)]  # 9/7 > 7.5/6 > 10/11


def test_two_budgets_are_weighed_by_their_shares() -> None:
    """A neuron of conv1 costs 3.6 times the parameters of one of conv2, and 7.8 times the MACs."""
    units = model_and_units("convnet")[2]
    costs = [sg.CostModel(units).added(unit, {}) for unit in units]
    assert costs == [sg.Cost(36, 25 * (18 + 9 + 5)), sg.Cost(10, 25 * 4 + 3)]
    scores = synthetic("convnet", [-5.0, *[1.0] * 3, -1.0, *[1.0] * 4])

    def best(**limits: int) -> str:
        return sg.select(scores, count=1, **limits)[0].unit

    assert best(max_params=100) == "conv1"
    assert best(max_macs=1000) == "conv2"
    assert best(max_params=100, max_macs=10**9) == "conv1"
    assert best(max_params=10**9, max_macs=1000) == "conv2"


# --- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": 0.0}, r"fraction: expected a number in \(0, 1\], got 0.0"),
        ({"fraction": 1.01}, r"fraction: expected a number in \(0, 1\], got 1.01"),
        ({"fraction": -0.5}, "fraction"),
        ({"fraction": nan}, "fraction"),
        ({"fraction": 0.5, "count": 2}, "give fraction= or count=, not both"),
        ({"count": 0}, "count: expected a whole number of at least 1, got 0"),
        ({"count": -1}, "count"),
        ({"count": 1.5}, "count: expected a whole number"),
        ({"count": nan}, "count: expected a whole number"),
        ({"threshold": 0.1}, r"threshold: lambda\* must be <= 0, got 0.1"),
        ({"threshold": nan}, "threshold"),
        ({"min_per_unit": -1}, "min_per_unit"),
        ({"max_per_unit": -1}, "max_per_unit"),
        ({"max_growth": 0.0}, r"max_growth: expected a number in \(0, 1\], got 0.0"),
        ({"max_growth": 1.1}, "max_growth"),
        ({"min_per_unit": 3, "max_per_unit": 2}, "expected 0 <= min <= max, got 3 and 2"),
        ({"round_to": 0}, "round_to: expected a whole number of at least 1, got 0"),
        ({"max_params": -1}, "max_params: expected a whole number of at least 0, got -1"),
        ({"max_macs": -1}, "max_macs"),
        ({"rank": "best"}, "rank: expected one of"),
        ({"per": "watt"}, "per: expected one of"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(sg.InputError, match=message):
        sg.select(synthetic("mlp", VALUES), **arguments)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_an_index_that_is_no_number_is_refused(bad: float) -> None:
    values = [*VALUES[:7], bad, *VALUES[8:]]
    with pytest.raises(sg.InputError, match=r"^2, neuron 1: its splitting index is ") as raised:
        sg.select(synthetic("mlp", values), count=1)
    assert "exclude=" in str(raised.value)


def test_something_else_than_scores() -> None:
    with pytest.raises(sg.InputError, match="expected what score"):
        sg.select({"0": VALUES}, count=1)


def test_large_models_select_in_no_time() -> None:
    """Thousands of neurons with a budget: seconds would mean that the cost model is in the way."""
    model = mlp(8, *[256] * 6, 4)
    units = sg.find_units(model, torch.randn(2, 8))
    found = {
        u.name: UnitScores(
            u,
            -torch.rand(u.width),
            torch.ones(u.width, u.size),
            torch.zeros(u.width),
            torch.ones(u.width),
            "dense",
            torch.zeros(u.width),
        )
        for u in units
    }
    plan = sg.select(Scores(units, found, 1.0, 2), max_params=300_000)
    assert (
        300_000 - 1100
        < sg.CostModel(units)
        .total({units[n].axis: units[n].width + len(k) for n, k in plan.chosen.items()})
        .params
        - sg.CostModel(units).total().params
        <= 300_000
    )
