"""The oracle and the hand-written units are sound: before anything is compared with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cases import CASES, LOSSES, MLP, RBF, TRANSFORMER_FUSED, Case, make_batch, mse_loss_fn
from oracle import (
    Slot,
    UnitSpec,
    augmented_loss,
    augmented_model,
    augmented_state,
    splitting_matrix,
    theta,
)

EPS = 1e-3

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_loss = pytest.mark.parametrize("loss", sorted(LOSSES))
every_unit = pytest.mark.parametrize(
    ("case", "spec"),
    [pytest.param(c, u, id=f"{c.name}-{u.name}") for c in CASES for u in c.units],
)


def halves(offspring: Tensor) -> Tensor:
    return offspring.new_full((len(offspring),), 1 / len(offspring))


# --- the units ----------------------------------------------------------------------------


@every_unit
def test_equal_offspring_leave_every_output_as_it_was(case: Case, spec: UnitSpec) -> None:
    model, inputs = case.build(), case.inputs()
    with torch.no_grad():
        before = model(*inputs)
        for k in range(spec.width):
            same = theta(model, spec, k).expand(3, -1)
            weights = same.new_tensor([0.2, 0.5, 0.3])
            after = augmented_model(model, spec, k, same, weights)(*inputs)
            torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@every_loss
@every_unit
def test_predicted_change_of_loss_is_the_measured_one(
    case: Case, spec: UnitSpec, loss: str
) -> None:
    """Along the eigenvector of largest |lambda| the loss changes by eps^2/2 * lambda."""
    model, loss_fn, batch = case.build(), LOSSES[loss], make_batch(case, loss)
    k = spec.width // 2
    S = splitting_matrix(model, loss_fn, batch, spec, k)
    torch.testing.assert_close(S, S.T, rtol=0, atol=1e-12)
    values, vectors = torch.linalg.eigh(S)
    largest = values.abs().argmax()
    step = EPS * vectors[:, largest]
    parent = theta(model, spec, k)
    offspring = torch.stack([parent + step, parent - step])
    with torch.no_grad():
        before = loss_fn(model, batch)
        after = augmented_loss(model, loss_fn, batch, spec, k, offspring, halves(offspring))
    if spec.flat:
        assert values[largest].abs() < 1e-15
        assert (after - before).abs() < 1e-14
    else:
        assert values[largest].abs() > 1e-5  # else the ratio below would be one of rounding errors
        ratio = (after - before) / (EPS**2 / 2 * values[largest])
        assert ratio.item() == pytest.approx(1.0, abs=1e-4)


@every_case
def test_units_are_named_by_their_first_parameter(case: Case) -> None:
    for spec in case.units:
        first = spec.theta[0].name
        assert spec.name == (first.rpartition(".")[0] or first)
    names = [*(spec.name for spec in case.units), *case.skipped]
    assert len(set(names)) == len(names)


class _FirstUses(TorchFunctionMode):
    """Notes the names of tensors in the order in which functions first take them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            name = self.names.get(id(argument))
            if name is not None and name not in self.seen:
                self.seen.append(name)
        return func(*args, **kwargs)


@every_case
def test_parameters_are_listed_in_the_order_of_the_forward_pass(case: Case) -> None:
    model, inputs = case.build(), case.inputs()
    with _FirstUses(model) as uses:
        model(*inputs)
    for spec in case.units:
        listed = [slot.name for slot in spec.theta]
        assert listed == sorted(listed, key=uses.seen.index)
    firsts = [uses.seen.index(spec.theta[0].name) for spec in case.units]
    assert firsts == sorted(firsts)


def _is_free(model: nn.Module, name: str) -> bool:
    """Is the parameter of no neuron's own by rule: a normalisation's, or one number for all?"""
    owner = model.get_submodule(name.rpartition(".")[0])
    kinds = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
    return isinstance(owner, kinds) or (isinstance(owner, nn.PReLU) and owner.num_parameters == 1)


@every_case
def test_every_parameter_is_in_one_unit_or_skipped(case: Case) -> None:
    model = case.build()
    in_units = [slot.name for spec in case.units for slot in spec.theta]
    skipped = [
        name
        for name, _ in model.named_parameters()
        if name in case.skipped or name.rpartition(".")[0] in case.skipped
    ]
    listed = sorted(in_units + skipped)
    assert listed == sorted(n for n, _ in model.named_parameters() if not _is_free(model, n))


@every_unit
def test_a_slot_gives_each_neuron_entries_of_its_own(case: Case, spec: UnitSpec) -> None:
    state = case.build().state_dict()
    for slot in (*spec.theta, *spec.copies, *spec.consumers):
        entries = [p for k in range(spec.width) for p in slot.positions(k)]
        assert len(set(entries)) == len(entries)
        assert set(entries) <= set(range(state[slot.name].shape[slot.dim]))
        assert slot not in spec.theta or len(entries) == state[slot.name].shape[slot.dim]


def test_building_a_case_is_deterministic_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    states = [RBF.build().state_dict() for _ in range(2)]
    batches = [make_batch(RBF, "ce") for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))


# --- the oracle ---------------------------------------------------------------------------


def test_splitting_matrix_of_a_perceptron_is_equation_3_of_the_paper() -> None:
    """S = E[ dL/dsigma * sigma''(theta . h) * h h^T ], every factor written out."""
    model, batch = MLP.build(), make_batch(MLP, "mse")
    x, target = batch
    fc1, fc2, fc3 = (model.layers[i] for i in (0, 2, 4))
    h = torch.tanh(fc1(x))
    sigma = torch.tanh(fc2(h))
    residual = fc3(sigma) - target  # (B, outputs)
    g = 2 * residual @ fc3.weight / residual.numel()  # (B, n)
    curvature = -2 * sigma * (1 - sigma**2)  # tanh''
    inputs = torch.cat([h, torch.ones(len(h), 1, dtype=h.dtype)], 1)  # (B, d), the bias last
    for k in range(fc2.out_features):
        expected = torch.einsum("b,bi,bj->ij", g[:, k] * curvature[:, k], inputs, inputs)
        S = splitting_matrix(model, mse_loss_fn, batch, MLP.units[1], k)
        torch.testing.assert_close(S, expected.detach(), rtol=1e-12, atol=1e-14)


def test_any_centred_split_changes_the_loss_by_its_second_moment() -> None:
    """m offspring with weights w and sum w_i delta_i = 0: sum w_i <delta_i, S delta_i> / 2."""
    model, batch, spec = MLP.build(), make_batch(MLP, "mse"), MLP.units[0]
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    parent = theta(model, spec, 1)
    delta = torch.randn(4, len(parent), dtype=torch.float64)
    delta = 1e-4 * (delta - weights @ delta)
    S = splitting_matrix(model, mse_loss_fn, batch, spec, 1)
    predicted = 0.5 * torch.einsum("m,mi,ij,mj->", weights, delta, S, delta)
    after = augmented_loss(model, mse_loss_fn, batch, spec, 1, parent + delta, weights)
    measured = (after - mse_loss_fn(model, batch)).detach()
    torch.testing.assert_close(measured, predicted, rtol=1e-3, atol=0)


def test_offspring_stand_at_the_end_of_each_block_of_their_unit() -> None:
    """Gate and up share one layer of 3 + 3 rows: with one neuron more it is 4 + 4."""
    model, spec = TRANSFORMER_FUSED.build(), TRANSFORMER_FUSED.units[0]
    parent = theta(model, spec, 1)
    offspring = torch.stack([parent + 1, parent + 2])
    weights = parent.new_tensor([0.25, 0.75])
    state = augmented_state(model, spec, 1, offspring, weights)
    bias = model.state_dict()["blocks.0.mlp.gate_up.bias"]
    expected = bias[[0, 1, 2, 1, 3, 4, 5, 4]] + bias.new_tensor([0, 1, 0, 2, 0, 1, 0, 2])
    assert torch.equal(state["blocks.0.mlp.gate_up.bias"], expected)
    down = model.state_dict()["blocks.0.mlp.down.weight"]
    expected = down[:, [0, 1, 2, 1]] * down.new_tensor([1, 0.25, 1, 0.75])
    assert torch.equal(state["blocks.0.mlp.down.weight"], expected)


def test_rows_move_before_columns_are_copied() -> None:
    """Both copies of a neuron read themselves with half of their own moved weight."""
    model = nn.Linear(2, 2, bias=False).double()
    slots = (Slot("weight", 0), Slot("weight", 1))
    spec = UnitSpec("", 2, theta=slots[:1], copies=(), consumers=slots[1:])
    (a, b), (c, d) = model.weight.detach()
    parent = theta(model, spec, 0)
    offspring = torch.stack([parent + 0.1, parent - 0.1])
    state = augmented_state(model, spec, 0, offspring, halves(offspring))
    expected = [
        [(a + 0.1) / 2, b + 0.1, (a + 0.1) / 2],
        [c / 2, d, c / 2],
        [(a - 0.1) / 2, b - 0.1, (a - 0.1) / 2],
    ]
    torch.testing.assert_close(state["weight"], torch.tensor(expected, dtype=torch.float64))


def test_the_model_itself_is_left_alone() -> None:
    for case in CASES:
        model = case.build()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        printed = str(model)
        splitting_matrix(model, mse_loss_fn, make_batch(case, "mse"), case.units[0], 0)
        assert str(model) == printed
        assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
        assert all(p.grad is None for p in model.parameters())
