"""Plans: values that can be compared, saved whole and read back, and nothing else."""

from __future__ import annotations

import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import splitgrow as sg
from helpers_split import ConvNet, Problem, hand_plan, mlp, mse, problem
from splitgrow import plan as plan_module
from splitgrow.plan import Entry, SplitPlan


@cache
def trained() -> Problem:
    torch.manual_seed(0)
    return problem(ConvNet(), (6, 2, 5, 5))


@pytest.fixture
def plan() -> SplitPlan:
    return sg.select(trained().scores(), count=4)


def test_a_plan_is_a_sequence_of_its_entries(plan: SplitPlan) -> None:
    assert len(plan) == 4 == len(list(plan))
    assert plan[0] is next(iter(plan))
    assert plan[1:3] == (plan[1], plan[2])
    assert sorted((e.unit, e.neuron) for e in plan) == [
        (unit, neuron) for unit, neurons in plan.chosen.items() for neuron in neurons
    ]
    for entry in plan:
        assert entry.direction.norm().item() == pytest.approx(1)
        assert entry.lambda_ < 0
    assert f"split {len(plan)} neurons" in str(plan)


def test_equality_is_by_value(plan: SplitPlan) -> None:
    again = sg.select(trained().scores(), count=4)
    assert again is not plan
    assert again == plan
    assert plan != sg.select(trained().scores(), count=3)
    assert plan != list(plan)
    entry = plan[0]
    for changed in (
        Entry(entry.unit, entry.neuron, entry.lambda_ * 2, entry.direction, entry.scale),
        Entry(entry.unit, entry.neuron, entry.lambda_, -entry.direction, entry.scale),
        Entry(entry.unit, entry.neuron, entry.lambda_, entry.direction, entry.scale + 1),
    ):
        assert changed != entry
        assert SplitPlan([changed, *plan[1:]], plan.units) != plan
    other = problem(mlp(3, 4, 2), (5, 3))
    assert SplitPlan([], other.units) != SplitPlan([], plan.units)
    with pytest.raises(TypeError, match="unhashable"):
        hash(plan)


def test_round_trip_is_exact(plan: SplitPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    units = sg.find_units(trained().model, trained().example)  # another day
    loaded = SplitPlan.load(str(path), units)
    assert loaded == plan
    assert [e.direction.dtype for e in loaded] == [e.direction.dtype for e in plan]
    results = []
    for p in (plan, loaded):
        model = ConvNet().double()
        model.load_state_dict(trained().model.state_dict())
        sg.split(model, p, loss_fn=mse, batches=trained().batches)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], t) for name, t in results[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_directions_of_any_kind(dtype: torch.dtype, tmp_path: Path) -> None:
    units = trained().units
    kept = [
        Entry("conv2", 3, -1e-300, torch.randn(units["conv2"].size).to(dtype), 0.1 + 0.2),
        Entry("conv1", 0, -1 / 3, torch.randn(units["conv1"].size).to(dtype), 1e30),
        Entry("conv2", 1, -7.0, torch.randn(units["conv2"].size).to(dtype), 0.0),
    ]
    SplitPlan(kept, units).save(tmp_path / "plan")
    assert list(SplitPlan.load(tmp_path / "plan", units)) == kept


def test_an_empty_plan_round_trips(tmp_path: Path) -> None:
    SplitPlan([], trained().units).save(tmp_path / "plan")
    assert len(SplitPlan.load(tmp_path / "plan", trained().units)) == 0


# --- the file -----------------------------------------------------------------------------


def test_the_file_is_safetensors_and_json(plan: SplitPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.safetensors"
    plan.save(path)
    with safe_open(path, framework="np") as file:
        metadata = file.metadata()
        names = set(file.keys())
    assert names == set(plan.chosen)
    entries = json.loads(metadata["entries"])
    assert [(unit, neuron) for unit, neuron, _, _ in entries] == [(e.unit, e.neuron) for e in plan]
    assert b"\x80\x04" not in path.read_bytes()[:64]  # how a pickle begins


def test_pickles_are_never_read(plan: SplitPlan, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    torch.save(Trap(), tmp_path / "plan.pt")
    with pytest.raises(sg.PlanError, match="cannot be read as a plan"):
        SplitPlan.load(tmp_path / "plan.pt", plan.units)
    assert not (tmp_path / "sprung").exists()


def test_a_file_is_replaced_whole_or_not_at_all(
    plan: SplitPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    before = path.read_bytes()
    smaller = SplitPlan(list(plan)[:2], plan.units)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for target, name in ((plan_module.os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            with pytest.raises(KeyboardInterrupt):
                smaller.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["plan"]  # noqa: PTH208  (no half-written leftovers)
    smaller.save(path)
    assert len(SplitPlan.load(path, plan.units)) == 2


def test_others_may_read_the_file_as_any_other(plan: SplitPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan")
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plan", "other")}
    assert len(modes) == 1


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 40, 0.5, 0.9, -1])
def test_a_truncated_file(plan: SplitPlan, tmp_path: Path, keep: float) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(sg.PlanError, match="plan"):
        SplitPlan.load(path, plan.units)


def test_every_changed_byte_is_noticed(plan: SplitPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    data = path.read_bytes()
    for at in range(0, len(data), 41):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(bytes(changed))
        with pytest.raises(sg.PlanError):
            SplitPlan.load(path, plan.units)


def test_other_files(plan: SplitPlan, tmp_path: Path) -> None:
    with pytest.raises(sg.PlanError, match="missing"):
        SplitPlan.load(tmp_path / "missing", plan.units)
    with pytest.raises(sg.PlanError, match="cannot be read"):
        SplitPlan.load(tmp_path, plan.units)
    save_file({"weight": torch.ones(3)}, tmp_path / "weights")
    with pytest.raises(sg.PlanError, match="is not a splitgrow plan"):
        SplitPlan.load(tmp_path / "weights", plan.units)


def test_a_plan_for_other_shapes(plan: SplitPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    other = problem(mlp(3, 4, 2), (5, 3))
    with pytest.raises(sg.PlanError, match="made for a model of other shapes"):
        SplitPlan.load(path, other.units)
    grown = ConvNet().double()
    sg.split(grown, plan, step=1e-3)
    with pytest.raises(sg.PlanError, match="before it was split"):
        SplitPlan.load(path, sg.find_units(grown, trained().example))


def test_a_plan_for_units_that_were_left_out(plan: SplitPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan.save(path)
    units = sg.find_units(trained().model, trained().example, exclude=["conv1"])
    with pytest.raises(sg.PlanError, match="of conv1: there is no such unit; there are conv2"):
        SplitPlan.load(path, units)


# --- entries ------------------------------------------------------------------------------


def entry(**changes: Any) -> Entry:
    size = trained().units["conv2"].size
    fields = {"unit": "conv2", "neuron": 1, "lambda_": -1.0, "scale": 1.0}
    fields["direction"] = torch.ones(size) / size**0.5
    return Entry(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "conv9"}, "neuron 1 of conv9: there is no such unit; there are conv1, conv2"),
        ({"neuron": 5}, "neuron 5 of conv2: the unit has neurons 0 to 4"),
        ({"neuron": -1}, "neuron -1 of conv2: the unit has neurons 0 to 4"),
        ({"direction": torch.ones(3)}, r"expected a direction of shape \(5,\), got \(3,\)"),
        ({"direction": torch.full((5,), float("nan"))}, "not a finite number"),
        ({"lambda_": float("nan")}, "not a finite number"),
        ({"scale": float("inf")}, "not a finite number"),
    ],
)
def test_entries_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    SplitPlan([entry()], trained().units)
    with pytest.raises(sg.PlanError, match=message):
        SplitPlan([entry(**changes)], trained().units)


def test_a_neuron_listed_twice() -> None:
    with pytest.raises(sg.PlanError, match="neuron 1 of conv2 is listed twice"):
        SplitPlan([entry(), entry(neuron=2), entry()], trained().units)


def test_chosen_is_in_the_order_of_units_and_neurons() -> None:
    plan = hand_plan(trained().units, {"conv2": [3, 0], "conv1": [2, 1]})
    assert plan.chosen == {"conv1": [1, 2], "conv2": [0, 3]}
    assert list(plan.chosen) == ["conv1", "conv2"]


def test_plans_outlive_the_model() -> None:
    """A plan holds no reference to the model's tensors that would change with it."""
    p = problem(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), (4, 2))
    plan = sg.select(p.scores(), fraction=1.0)
    before = [e.direction.clone() for e in plan]
    with torch.no_grad():
        for parameter in p.model.parameters():
            parameter.zero_()
    assert all(torch.equal(a, e.direction) for a, e in zip(before, plan, strict=True))
