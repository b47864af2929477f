"""History: every neuron's line is kept through any number of phases, and through JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.errors import CheckpointError
from splitgrow.history import Event, History, Neuron, PhaseRecord, Split, lasting_names

# --- lines --------------------------------------------------------------------------------


def grown_history(choices: list[tuple[int, bool]]) -> History:
    """A unit of three neurons; in each phase one place divides, or a neuron is added."""
    history = History("run", "splitting", 0)
    history.begin("a", 3, 0)
    for phase, (choice, divides) in enumerate(choices):
        width = len(history.alive("a"))
        if divides:
            history.divide("a", choice % width, width, phase)
        else:
            history.add("a", width, phase)
    return history


growth = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=20)


@given(growth)
def test_every_place_has_one_living_neuron(choices: list[tuple[int, bool]]) -> None:
    history = grown_history(choices)
    alive = history.alive("a")
    assert sorted(alive) == list(range(3 + len(choices)))
    assert all(neuron.ended is None and neuron.place == place for place, neuron in alive.items())


@given(growth)
def test_ids_are_unique_and_lines_end_at_a_founder(choices: list[tuple[int, bool]]) -> None:
    history = grown_history(choices)
    ids = [neuron.id for neuron in history.neurons["a"]]
    assert len(set(ids)) == len(ids)
    for neuron in history.neurons["a"]:
        line = history.ancestors("a", neuron.id)
        assert line[0] == neuron
        assert line[-1].parent is None
        for child, parent in pairwise(line):
            assert child.parent == parent.id
            assert parent.ended == child.born - 1


def test_a_division_ends_the_parent_and_begins_two_children() -> None:
    history = History("run", "splitting", 0)
    history.begin("a", 2, 0)
    assert history.divide("a", 1, 2, phase=4) == (1, (2, 3))
    assert history.neurons["a"] == [
        Neuron(0, None, 0, None, 0),
        Neuron(1, None, 0, 4, 1),
        Neuron(2, 1, 5, None, 1),
        Neuron(3, 1, 5, None, 2),
    ]


def test_an_added_neuron_founds_a_line() -> None:
    history = History("run", "new", 0)
    history.begin("a", 1, 0)
    assert history.add("a", 1, phase=2) == 1
    assert history.alive("a")[1] == Neuron(1, None, 3, None, 1)


def test_a_unit_begins_once() -> None:
    history = History("run", "splitting", 0)
    history.begin("a", 2, 0)
    history.divide("a", 0, 2, 0)
    before = list(history.neurons["a"])
    history.begin("a", 3, 1)
    assert history.neurons["a"] == before
    history.begin("late", 2, 7)
    assert [n.born for n in history.neurons["late"]] == [7, 7]


def test_a_unit_that_never_was_has_no_neurons() -> None:
    assert History("run", "splitting", 0).alive("nowhere") == {}


# --- JSON ---------------------------------------------------------------------------------


def a_history() -> History:
    history = grown_history([(0, True), (1, True)])
    events = (Event("a", 0, (3, 4), -0.5, 0.1, -0.0025), Event("a", None, (5,), None, None, None))
    split = Split(0.1, True, -0.0025, -0.002, 0.5, 0.498, 1e-8, events)
    history.phases = [
        PhaseRecord(
            0, 10, 20, {"a": 3}, 0.1 + 0.2, {"accuracy": 1 / 3, "bad": math.nan}, {"train": 1.5},
            ((0, 1e-17), (1, 2.5)), 2, split,
        ),
        PhaseRecord(1, 14, 28, {"a": 4}, 0.4, {}, {}, (), 0),
    ]  # fmt: skip
    history.stopped = "stable"
    return history


def test_json_and_back_gives_the_same_history() -> None:
    history = a_history()
    history.phases[0] = replace(history.phases[0], metrics={"accuracy": 1 / 3})
    assert History.from_json(history.to_json(), "here") == history


def test_a_metric_that_is_no_number_is_null_and_comes_back_as_nan() -> None:
    text = a_history().to_json()
    assert json.loads(text)["phases"][0]["metrics"] == {"accuracy": 1 / 3, "bad": None}
    back = History.from_json(text, "here")
    assert math.isnan(back.phases[0].metrics["bad"])
    assert back.to_json() == text


def test_json_is_as_it_is_described() -> None:
    told = json.loads(a_history().to_json())
    assert told["format"] == "splitgrow-history-1"
    assert (told["name"], told["method"], told["seed"], told["stopped"]) == (
        "run", "splitting", 0, "stable")  # fmt: skip
    first = told["phases"][0]
    assert (first["phase"], first["params"], first["macs"]) == (0, 10, 20)
    assert first["curve"] == [[0, 1e-17], [1, 2.5]]
    assert first["split"]["neurons"] == [
        {"unit": "a", "parent": 0, "children": [3, 4], "lambda": -0.5, "step": 0.1,
         "predicted": -0.0025},
        {"unit": "a", "parent": None, "children": [5], "lambda": None, "step": None,
         "predicted": None},
    ]  # fmt: skip
    assert told["phases"][1]["split"] is None
    assert told["neurons"]["a"][0] == {"id": 0, "parent": None, "born": 0, "ended": 0, "place": 0}


@given(st.lists(st.floats(), max_size=5), st.dictionaries(st.text(), st.floats(), max_size=3))
def test_all_finite_numbers_come_back_to_the_last_bit(
    losses: list[float], metrics: dict[str, float]
) -> None:
    history = History("täglich \N{SNOWMAN}", "splitting", 2**32 - 1)
    curve = tuple(enumerate(losses))
    history.phases = [PhaseRecord(0, 1, 1, {}, 0.0, metrics, {}, curve, len(losses))]
    back = History.from_json(history.to_json(), "here")
    assert back.name == history.name
    for (_, was), (_, now) in zip(curve, back.phases[0].curve, strict=True):
        assert now == was if math.isfinite(was) else math.isnan(now)
    for name, value in metrics.items():
        now = back.phases[0].metrics[name]
        assert now == value if math.isfinite(value) else math.isnan(now)


def without(key: str) -> str:
    told = json.loads(a_history().to_json())
    del told[key]
    return json.dumps(told)


def changed(**changes: Any) -> str:
    return json.dumps(json.loads(a_history().to_json()) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{", '"text"', without("format"), without("neurons"), without("phases"),
        changed(format="splitgrow-history-2"), changed(phases=[{}]), changed(neurons=[]),
        changed(neurons={"a": [{"id": 0}]}), changed(phases=[3]),
    ],
)  # fmt: skip
def test_what_is_no_history_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"runs/x/history\.json is not a history that this"):
        History.from_json(text, "runs/x/history.json")


def test_events_and_iterations_are_over_all_phases() -> None:
    history = a_history()
    assert [(phase, event.children) for phase, event in history.events] == [(0, (3, 4)), (0, (5,))]
    assert history.iterations == 2


# --- names that last ----------------------------------------------------------------------


class Parts(nn.Module):
    """What ``whole`` makes is added to two concatenated layers: two units begin in it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Linear(3, 5)
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(3, 3)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        both = self.whole(x) + torch.cat([self.left(x), self.right(x)], 1)
        return self.head(torch.tanh(both))


def test_a_part_of_a_layer_is_named_by_its_number() -> None:
    model, x = Parts(), torch.randn(4, 3)
    units = sg.find_units(model, (x,))
    assert lasting_names(units) == {"whole[0:2]": "whole#0", "whole[2:5]": "whole#1"}


def test_other_units_keep_their_names() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    assert lasting_names(sg.find_units(model, (torch.randn(1, 2),))) == {"0": "0", "2": "2"}
