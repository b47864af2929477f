"""Parted columns: the model stays the same, and its offspring part as fast as they can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from cases import CASES, Case, mse_loss_fn
from helpers_score import batch_of, fresh, units_of
from helpers_split import Problem, Snapshot, hand_plan, mlp, mse, problem
from splitgrow.units import named_tensors

every_case = pytest.mark.parametrize("case", CASES, ids=str)
STEP = 1e-7


def small(activation: Callable[[], nn.Module] = nn.Tanh) -> Problem:
    torch.manual_seed(0)
    return problem(mlp(3, 4, 5, 2, activation=activation), (16, 3))


def of_case(case: Case) -> Problem:
    return Problem(fresh(case), [batch_of(case, "mse")], units_of(case), mse_loss_fn)


def parted(
    p: Problem, plan: sg.SplitPlan, step: float | sg.Relative | None = STEP, **settings: Any
) -> tuple[nn.Module, sg.Receipt]:
    """A copy of the model after the split."""
    grown = copy.deepcopy(p.model)
    receipt = sg.split(
        grown, plan, step=step, columns="parted", loss_fn=p.loss_fn, batches=p.batches, **settings
    )
    return grown, receipt


def columns(model: nn.Module, unit: sg.Unit) -> Tensor:
    """What reads each neuron of a unit that alone has grown: (width, numbers)."""
    tensors = named_tensors(model)
    return torch.cat(
        [tensors[slot.name].movedim(slot.dim, 0).flatten(1) for slot in unit.consumers], dim=1
    ).detach()


def in_scale(columns: Tensor) -> Tensor:
    """Each number of the columns as a part of its typical size: (width, numbers) of ones or so."""
    return columns / columns.square().mean(dim=0).sqrt()


# ---- on every model ------------------------------------------------------------------------------


@every_case
def test_a_model_stays_the_same_and_its_loss_falls_as_foretold(case: Case) -> None:
    """Of one neuron, where the loss falls at first order: the error is of the second."""
    p = of_case(case)
    torch.manual_seed(1)
    for unit in p.units:
        plan = hand_plan(p.units, {unit.name: [unit.width - 1]}, lambda_=0.0)
        grown, receipt = parted(p, plan)
        assert receipt.parity < 1e-11
        assert receipt.measured is not None
        (offspring,) = receipt.offspring
        assert offspring.slope * offspring.step <= 0
        assert receipt.predicted == offspring.slope * offspring.step
        rounding = 1e-14 * max(1.0, abs(receipt.loss or 0.0))
        off = abs(receipt.measured - receipt.predicted)
        assert off < 1e-3 * abs(receipt.predicted) + rounding, (unit.name, receipt)
        del grown


@every_case
def test_all_neurons_of_a_model_at_once(case: Case) -> None:
    p = of_case(case)
    chosen = {unit.name: list(range(unit.width)) for unit in p.units}
    _, receipt = parted(p, hand_plan(p.units, chosen))
    assert receipt.parity < 1e-10
    tensors = named_tensors(p.model)
    trained = {u.name: [s for s in u.consumers if isinstance(tensors[s.name], nn.Parameter)]
               for u in p.units}  # fmt: skip
    # What one number alone reads cannot be read unequally.
    read = {name for name, slots in trained.items()
            if sum(s.rows(tensors[s.name]).shape[1] for s in slots) > 1}  # fmt: skip
    assert {offspring.unit for offspring in receipt.offspring if offspring.slope} == read


# ---- what the columns are ------------------------------------------------------------------------


def test_columns_of_offspring_add_up_to_those_of_their_parent() -> None:
    p = small()
    unit = p.units[0]
    before = columns(p.model, unit)
    grown, _ = parted(p, hand_plan(p.units, {unit.name: [1, 3]}))
    after = columns(grown, unit)
    for neuron, twin in ((1, 4), (3, 5)):
        torch.testing.assert_close(after[neuron] + after[twin], before[neuron])
        w = in_scale(before)[neuron]
        e = w * (after[neuron] - after[twin]) / before[neuron] / 2
        torch.testing.assert_close(e.norm(), w.norm() / 2)
        torch.testing.assert_close(e @ w, torch.zeros_like(e[0]))
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=0)


def by_definition(p: Problem) -> Tensor:  # (width, size, columns)
    """M of the last hidden layer of a tanh MLP: E[ (d sigma / d theta) (dL / d out)^T ]."""
    ((inputs, target),) = p.batches
    assert isinstance(p.model, nn.Sequential)
    with torch.no_grad():
        before = p.model[:-3](inputs)
        sigma = torch.tanh(p.model[-3](before))
        out = p.model[-1](sigma)
    out.requires_grad_()
    (delta,) = torch.autograd.grad(F.mse_loss(out, target), out)
    by_theta = torch.cat([before, torch.ones_like(before[:, :1])], dim=1)
    return torch.einsum("sk,si,sj->kij", 1 - sigma**2, by_theta, delta)


def test_columns_are_those_that_offspring_part_fastest_with() -> None:
    torch.manual_seed(0)
    p = problem(mlp(3, 4, 5, 3), (16, 3), batches=1)
    unit, M = p.units[1], by_definition(p)
    plan = hand_plan(p.units, {unit.name: list(range(5))})
    grown, receipt = parted(p, plan)
    before, after = columns(p.model, unit), columns(grown, unit)
    scale = before.square().mean(dim=0).sqrt()
    for k, offspring in enumerate(receipt.offspring):
        e, w = (after[k] - after[5 + k]) / 2, before[k] / scale
        across = torch.eye(3).to(w) - torch.outer(w, w) / (w @ w)
        most = torch.linalg.svdvals(M[k] * scale @ across)[0] * w.norm() / 2
        assert (M[k] @ e).norm() > 0.98 * most
        expected = float(2 * plan[k].direction @ M[k] @ e)
        assert offspring.slope == pytest.approx(expected, rel=1e-6)


def test_a_step_is_along_or_against_the_direction_as_the_loss_falls() -> None:
    p = small()
    _, receipt = parted(p, hand_plan(p.units, {u.name: list(range(u.width)) for u in p.units}))
    steps = [offspring.step for offspring in receipt.offspring]
    assert min(steps) == -STEP
    assert max(steps) == STEP
    assert all(offspring.predicted < 0 for offspring in receipt.offspring)


def test_a_searched_step_lowers_the_loss_where_halved_columns_have_none() -> None:
    """Random directions of an untrained net, half of them of positive curvature."""
    p = small()
    plan = hand_plan(p.units, {u.name: list(range(u.width)) for u in p.units})
    _, receipt = parted(p, plan, step=None)
    assert receipt.measured is not None
    assert receipt.measured < 0
    assert receipt.searched


def test_offspring_part_in_training_that_with_halves_stay_alike() -> None:
    p = small()
    p.model.requires_grad_()
    grown, _ = parted(p, hand_plan(p.units, {"2": [0]}), step=1e-12)
    halved = copy.deepcopy(p.model)
    sg.split(halved, hand_plan(p.units, {"2": [0]}), step=1e-12)
    apart = []
    for model in (grown, halved):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mse(model, p.batches[0]).backward()
        optimizer.step()
        weight = dict(model.named_parameters())["2.weight"]
        apart.append(float((weight[0] - weight[5]).detach().norm()))
    assert apart[0] > 1e-3
    assert apart[1] < 1e-9


def test_the_same_split_twice_is_the_same() -> None:
    p = small()
    plan = hand_plan(p.units, {"0": [2], "2": [0, 4]})
    one, other = (parted(p, plan)[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


class Masses(nn.Module):
    """Hidden neurons that a buffer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.register_buffer("mass", torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x)) @ self.mass


def test_what_is_not_trained_reads_both_alike() -> None:
    p = problem(Masses(), (8, 3))
    grown, receipt = parted(p, hand_plan(p.units, {"hidden": [1]}))
    mass = dict(grown.named_buffers())["mass"]
    assert torch.equal(mass[1], mass[4])
    assert receipt.offspring[0].slope == 0


def test_frozen_columns_read_both_alike() -> None:
    p = small()
    dict(p.model.named_parameters())["4.weight"].requires_grad_(False)
    grown, receipt = parted(p, hand_plan(p.units, {"0": [1], "2": [3]}))
    weight = dict(grown.named_parameters())["4.weight"]
    assert torch.equal(weight[:, 3], weight[:, 5])
    slopes = {offspring.unit: offspring.slope for offspring in receipt.offspring}
    assert slopes["2"] == 0
    assert slopes["0"] != 0


@pytest.mark.parametrize("step", [STEP, None])
def test_what_one_number_reads_is_halved(step: float | None) -> None:
    torch.manual_seed(0)
    p = problem(mlp(3, 4, 1), (16, 3))
    plan = sg.select(sg.score(p.model, p.loss_fn, p.batches, units=p.units), count=2)
    grown, receipt = parted(p, plan, step=step)
    halved = copy.deepcopy(p.model)
    same = sg.split(halved, plan, step=step, loss_fn=p.loss_fn, batches=p.batches)
    assert receipt.predicted == same.predicted
    for name, tensor in halved.state_dict().items():
        torch.testing.assert_close(grown.state_dict()[name], tensor)


def test_of_two_logits_columns_are_along_their_difference() -> None:
    """Their sum does nothing to the loss, and at an optimum only w itself would be left."""
    torch.manual_seed(0)
    model = mlp(3, 4, 2).double()
    inputs, labels = torch.randn(32, 3).double(), torch.randint(2, (32,))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    p = Problem(model, [(inputs, labels)], sg.find_units(model, (inputs,)), loss_fn)
    (unit,) = p.units
    before = columns(p.model, unit)
    after = columns(parted(p, hand_plan(p.units, {unit.name: [0, 1, 2, 3]}))[0], unit)
    e = (after[:4] - after[4:]) / 2
    assert (e.norm(dim=1) > 0.1 * before.norm(dim=1)).all()
    assert ((before + 2 * e).norm(dim=1) > 1e-3).all()  # no offspring is left out
    assert ((before - 2 * e).norm(dim=1) > 1e-3).all()


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_an_output_whose_scale_means_nothing_weighs_no_more(factor: float) -> None:
    """Batch norm behind the columns takes any scale of theirs out again."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)
    ).double()
    x = torch.randn(32, 3).double()
    rescaled = copy.deepcopy(model)
    with torch.no_grad():
        rescaled[2].weight[1] *= factor
    parts = []
    for net in (model, rescaled):
        with torch.no_grad():  # running statistics are those of the data
            net[3].momentum, net[3].eps = 1.0, 1e-30
            net.train()(x)
        p = Problem(net, [(x, torch.ones(32, 2).double())], sg.find_units(net, (x,)))
        plan = hand_plan(p.units, {"0": [2]})
        after = columns(parted(p, plan)[0], p.units[0])
        parts.append((after[2] - after[4]) / columns(p.model, p.units[0])[2])
    torch.testing.assert_close(parts[0], parts[1], rtol=1e-4, atol=1e-6)


class TwoNames(nn.Module):
    """Layers that are registered twice, alone and in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.layers = nn.Sequential(self.first, nn.Tanh(), self.last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_modules_of_two_names_stay_the_ones_they_are() -> None:
    torch.manual_seed(0)
    p = problem(TwoNames(), (8, 3))
    weight = p.model.first.weight
    plan = hand_plan(p.units, {p.units[0].name: [1]})
    sg.split(
        p.model, plan, step=1e-4, columns="parted", loss_fn=p.loss_fn, batches=p.batches
    )  # fmt: skip
    assert p.model.first.weight is weight
    assert p.model.layers[0].weight is weight
    assert weight.shape == (5, 3)
    assert isinstance(weight, nn.Parameter)
    assert not torch.equal(weight[1], weight[4])  # they have moved


def test_what_goes_past_the_call_of_the_model_counts_too() -> None:
    p = small()
    assert isinstance(p.model, nn.Sequential)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + model[2](torch.tanh(model[0](batch[0]))).square().mean()

    p = Problem(p.model, p.batches, p.units, loss_fn)
    _, receipt = parted(p, hand_plan(p.units, {"0": [1]}))
    assert receipt.measured == pytest.approx(receipt.predicted, rel=1e-3)


def test_growing_with_parted_columns() -> None:
    p = small()
    result = sg.grow(
        p.model, train=sg.Trainer(p.batches, mse, epochs=20), loss_fn=mse, batches=p.batches,
        policy=sg.Policy(fraction=0.5, columns="parted"), until=sg.Budget(phases=2),
    )  # fmt: skip
    found = result.history.phases[0].split
    assert found is not None
    assert found.measured is not None
    assert found.measured < 0
    assert found.predicted is not None
    assert found.predicted < 0


# ---- errors --------------------------------------------------------------------------------------


def test_columns_are_halved_or_parted() -> None:
    p = small()
    with pytest.raises(sg.InputError, match=r"columns: expected one of .*'parted'.*got 'whole'"):
        sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=0.1, columns="whole")  # type: ignore[arg-type]
    with pytest.raises(sg.InputError, match=r"columns: expected one of .*got 'whole'"):
        sg.Policy(fraction=0.5, columns="whole")  # type: ignore[arg-type]


def test_parted_columns_need_data() -> None:
    p = small()
    with pytest.raises(sg.InputError, match=r'columns: "parted" .*loss_fn= and batches='):
        sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=0.1, columns="parted")


def test_gradients_that_are_not_finite_or_not_there() -> None:
    p = small()
    plan = hand_plan(p.units, {"0": [1]})

    def rooted(model: Any, batch: Any) -> Tensor:
        return mse(model, batch) + (model(batch[0]) * 0).square().sum().sqrt()

    with pytest.raises(sg.LossError, match=r"gradient of the loss by .* is not finite"):
        parted(Problem(p.model, p.batches, p.units, rooted), plan)

    def detached(model: Any, batch: Any) -> Tensor:
        return mse(model, batch).detach()

    with pytest.raises(sg.LossError, match="does not depend on the model's outputs"):
        parted(Problem(p.model, p.batches, p.units, detached), plan)


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_failure_at_any_moment_changes_nothing(fails_at: int) -> None:
    p = small()
    optimizer = torch.optim.Adam(p.model.parameters())
    mse(p.model, p.batches[0]).backward()
    optimizer.step()
    calls = 0

    def loss_fn(model: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return mse(model, batch) * (float("nan") if calls == fails_at else 1.0)

    plan = hand_plan(p.units, {"0": [1], "2": [3]})
    before = Snapshot(p.model, optimizer)
    with pytest.raises(sg.LossError, match="nan"):
        sg.split(
            p.model, plan, step=0.1, columns="parted", optimizer=optimizer, loss_fn=loss_fn,
            batches=p.batches,
        )  # fmt: skip
    before.assert_same()
