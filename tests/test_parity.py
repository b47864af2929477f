"""A split with eps = 0 changes no output, in eval and in train mode, and can be taken back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
import splitgrow as sg
from cases import CASES, LOSSES, Case
from helpers_score import (
    FLOAT32,
    batch_of,
    entry,
    float32_units_of,
    fresh,
    model_of,
    unit_vector,
    units_of,
)
from splitgrow.state import Undo
from splitgrow.surgery import plan_regrowth, regrow

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)


def chosen_in(units: sg.Units) -> dict[str, list[int]]:
    """Several neurons of every unit: all but one where there are many, in no block of their own."""
    return {u.name: [k for k in range(u.width) if k != 1 or u.width < 3] for u in units}


def grown(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with many neurons of every unit doubled, at eps = 0."""
    model, units = fresh(case).to(dtype), units_of(case)
    assert len(units) == len(case.units)
    with Undo() as undo:
        regrow(model, units, plan_regrowth(units, chosen_in(units)), undo)
    assert count(model) > count(fresh(case))
    return model


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) for x in case.inputs())


def assert_same_outputs(a: nn.Module, b: nn.Module, inputs: Any, tolerance: float) -> None:
    """To a fraction of the largest output."""
    with torch.no_grad():
        expected, found = a(*inputs), b(*inputs)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


# --- eps = 0 ------------------------------------------------------------------------------


@every_dtype
@every_case
def test_all_units_doubled_at_once_leave_the_outputs(
    case: Case, dtype: torch.dtype, tolerance: float
) -> None:
    model, wide = fresh(case).to(dtype), grown(case, dtype)
    assert_same_outputs(model, wide, inputs_of(case, dtype), tolerance)


@every_dtype
@every_case
def test_train_mode_keeps_parity_too(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    """Offspring see the same batch statistics, and their running statistics stay the same."""
    model, wide = fresh(case).to(dtype).train(), grown(case, dtype).train()
    inputs = inputs_of(case, dtype)
    for _ in range(2):
        assert_same_outputs(model, wide, inputs, tolerance)
    assert_same_outputs(model.eval(), wide.eval(), inputs, tolerance)


@every_case
def test_every_unit_alone_keeps_parity(case: Case) -> None:
    for unit in units_of(case):
        model, wide = fresh(case), fresh(case)
        with Undo() as undo:
            plans = plan_regrowth(units_of(case), {unit.name: [unit.width - 1, 0][: unit.width]})
            regrow(wide, units_of(case), plans, undo)
        assert_same_outputs(model, wide, case.inputs(), 1e-12)
        assert_same_outputs(model.train(), wide.train(), case.inputs(), 1e-12)


@every_case
def test_a_grown_model_is_an_ordinary_one(case: Case) -> None:
    """Printed sizes are those of the tensors, and it can be copied."""
    wide = grown(case)
    for module in wide.modules():
        assert_attributes_are_true(module)
    twin = copy.deepcopy(wide)
    twin.load_state_dict(wide.state_dict())
    assert str(twin) == str(wide)
    assert_same_outputs(wide, twin, case.inputs(), 0)


def assert_attributes_are_true(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        assert tuple(module.weight.shape) == (module.out_features, module.in_features)
    elif isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):
        expected = (module.in_channels, module.out_channels // module.groups)
        assert tuple(module.weight.shape[:2]) == expected
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        expected = (module.out_channels, module.in_channels // module.groups)
        assert tuple(module.weight.shape[:2]) == expected
    elif isinstance(module, nn.modules.batchnorm._BatchNorm):
        tensors = (module.weight, module.bias, module.running_mean, module.running_var)
        assert {len(t) for t in tensors} == {module.num_features}
    elif isinstance(module, nn.PReLU):
        assert len(module.weight) == module.num_parameters


# --- receipts -----------------------------------------------------------------------------


def arbitrary_plan(units: sg.Units) -> sg.SplitPlan:
    """Several neurons of every unit, each along a direction of its own."""
    chosen = chosen_in(units)
    entries = [
        entry(unit, k, -1.0, unit_vector(unit.size)) for unit in units for k in chosen[unit.name]
    ]
    return sg.SplitPlan(entries, units)


@every_case
def test_receipt_tells_a_small_parity_and_what_was_split(case: Case) -> None:
    model = fresh(case)
    plan = arbitrary_plan(units_of(case))
    batch = batch_of(case, "mse")
    receipt = sg.split(model, plan, step=1e-8, loss_fn=LOSSES["mse"], batches=[batch])
    scale = max(case.build()(*case.inputs()).abs().max().item(), 1.0)
    assert receipt.parity <= 1e-12 * scale
    assert receipt.step == 1e-8
    assert receipt.measured is not None
    assert abs(receipt.measured) <= 1e-12 * scale**2
    chosen = chosen_in(units_of(case))
    assert receipt.widths == {u.name: (u.width, u.width + len(chosen[u.name]))
                              for u in units_of(case)}  # fmt: skip
    assert len(receipt.offspring) == len(plan)
    wide = grown(case)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, wide.state_dict()[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32_receipt(case: Case) -> None:
    model, inputs = fresh(case).float(), inputs_of(case, torch.float32)
    with torch.no_grad():
        scale = max(model(*inputs).abs().max().item(), 1.0)
    units = float32_units_of(case)
    assert [unit.name for unit in units] == [unit.name for unit in units_of(case)]
    receipt = sg.split(model, arbitrary_plan(units), step=1e-3)
    assert receipt.parity <= 1e-5 * scale
    assert receipt.measured is None
    assert all(p.dtype == torch.float32 for p in model.parameters())


@every_case
def test_a_split_neuron_is_that_of_the_augmented_network(case: Case) -> None:
    """theta + eps v stands where the parent was and theta - eps v at the end of its unit."""
    parent, units, step = model_of(case), units_of(case), 1e-3
    for spec in case.units:
        for k in range(spec.width):
            v = unit_vector(units[spec.name].size)
            plan = sg.SplitPlan([entry(units[spec.name], k, -1.0, v)], units)
            model = fresh(case)
            sg.split(model, plan, step=step)
            theta = oracle.theta(parent, spec, k)
            offspring = torch.stack([theta + step * v, theta - step * v])
            halves = torch.full((2,), 0.5, dtype=torch.float64)
            expected = oracle.augmented_state(parent, spec, k, offspring, halves)
            assert model.state_dict().keys() == expected.keys()
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-14, atol=1e-16)


# --- two rounds ---------------------------------------------------------------------------


def split_once(model: nn.Module, case: Case, units: sg.Units) -> sg.Receipt:
    """Score, select, split; what the receipt tells is true of the model."""
    loss_fn, batches = LOSSES["mse"], [batch_of(case, "mse")]
    with torch.no_grad():
        loss = loss_fn(model, batches[0]).item()
    before = count(model)
    plan = sg.select(sg.score(model, loss_fn, batches, units=units), fraction=0.3)
    receipt = sg.split(model, plan, loss_fn=loss_fn, batches=batches)
    with torch.no_grad():
        change = loss_fn(model, batches[0]).item() - loss
    assert change < 0
    assert receipt.measured == pytest.approx(change, abs=1e-12)
    assert receipt.params == (before, count(model))
    assert count(model) > before
    for module in model.modules():
        assert_attributes_are_true(module)
    return receipt


@every_case
def test_two_rounds_in_a_row(case: Case) -> None:
    """Find, score, select, split, and all of it again on the wider model."""
    model, first = fresh(case), units_of(case)
    receipt = split_once(model, case, first)
    second = sg.find_units(model, case.inputs())
    widths = {u.name: u.width for u in first} | {n: w for n, (_, w) in receipt.widths.items()}
    assert {u.name: u.width for u in second} == widths
    assert [u.parameters for u in second] == [u.parameters for u in first]
    assert {s.name for s in second.skipped} == {s.name for s in first.skipped}
    split_once(model, case, second)


# --- back ---------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a split touches: tensors, where they live, gradients, attributes, repr."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plain = (int, float, str, bool, tuple, type(None))
    return {
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "grads": {n: None if t.grad is None else t.grad.clone() for n, t in tensors.items()},
        "identity": {name: (id(t), t.data_ptr(), t.requires_grad) for name, t in tensors.items()},
        "attributes": {
            (path, name): value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, plain)
        },
        "printed": str(model),
    }


def assert_same_snapshot(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("values", "grads"):
        assert list(found[kind]) == list(expected[kind])
        for name, tensor in expected[kind].items():
            other = found[kind][name]
            assert (tensor is None) == (other is None)
            assert tensor is None or torch.equal(tensor, other)
    for kind in ("identity", "attributes", "printed"):
        assert found[kind] == expected[kind]


@every_case
def test_rollback_restores_everything(case: Case) -> None:
    model, units = fresh(case).train(), units_of(case)
    LOSSES["mse"](model, batch_of(case, "mse")).backward()
    model.eval()
    before = snapshot(model)
    undo = Undo()
    regrow(model, units, plan_regrowth(units, chosen_in(units)), undo)
    assert str(model) != before["printed"] or case.name.startswith(("prototypes", "rbf"))
    assert snapshot(model)["identity"].keys() == before["identity"].keys()
    assert any(t.shape != before["values"][n].shape for n, t in model.state_dict().items()
               if n in before["values"])  # fmt: skip
    undo.rollback()
    assert_same_snapshot(snapshot(model), before)
    undo.rollback()  # nothing left to take back
    assert_same_snapshot(snapshot(model), before)


@every_case
def test_an_error_on_the_way_restores_everything(case: Case) -> None:
    model, units = fresh(case), units_of(case)
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="on purpose"), Undo() as undo:  # noqa: PT012
        regrow(model, units, plan_regrowth(units, chosen_in(units)), undo)
        raise RuntimeError("on purpose")
    assert_same_snapshot(snapshot(model), before)
