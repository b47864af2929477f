"""Units, splitting matrices and eigenpairs equal those of the definition, for every case.

The oracle builds the network with real extra neurons and takes the Hessian of its loss. Tolerances
are relative to the spectral norm of each neuron's own S.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oracle
import splitgrow as sg
from cases import CASES, LOSSES, MLP, PRELU, Batch, Case
from helpers_score import (
    FLOAT32,
    Counted,
    as_dense,
    batch_of,
    float32_units_of,
    fresh,
    matrices_by_definition,
    model_of,
    norms,
    only,
    operators,
    oracle_matrices,
    parts_of,
    scores_of,
    units_of,
)
from oracle import UnitSpec
from splitgrow import stream
from splitgrow.eigen import lanczos
from splitgrow.units import named_tensors

TOLERANCE = 1e-9
FLOOR = 1e-15  # what is left of an S that is 0 by theory, as in the tests of the oracle

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_loss = pytest.mark.parametrize("loss", sorted(LOSSES))


def assert_same_matrices(found: Tensor, expected: Tensor) -> None:
    """To 1e-9 of each matrix's norm; both (width, d, d)."""
    assert found.shape == expected.shape
    error = torch.linalg.matrix_norm(found - expected)
    assert (error <= TOLERANCE * norms(expected) + FLOOR).all(), error / norms(expected)


def assert_smallest_eigenpairs(found: sg.UnitScores, S: Tensor) -> None:
    """lambda is the smallest eigenvalue of S (width, d, d) and v its eigenvector.

    v is the same up to sign wherever the gap to the next eigenvalue tells it apart: by Davis and
    Kahan a perturbation dS turns it by at most about ||dS|| / gap.
    """
    allowed = TOLERANCE * norms(S) + FLOOR
    values, vectors = torch.linalg.eigh(S)
    assert found.values.shape == values[:, 0].shape
    assert ((found.values - values[:, 0]).abs() <= allowed).all()
    v, u = found.vectors, vectors[:, :, 0]
    torch.testing.assert_close(v.norm(dim=1), torch.ones(len(v), dtype=v.dtype))
    residual = (torch.einsum("kij,kj->ki", S, v) - found.values[:, None] * v).norm(dim=1)
    assert (residual <= allowed).all()
    assert ((found.residuals - residual).abs() <= allowed).all()
    turned = torch.minimum((v - u).norm(dim=1), (v + u).norm(dim=1))
    if values.shape[1] > 1:
        assert (turned * (values[:, 1] - values[:, 0]) <= 10 * allowed).all()


# --- units --------------------------------------------------------------------------------


@every_case
def test_exactly_the_stated_units_are_found(case: Case) -> None:
    units, model = units_of(case), model_of(case)
    sizes = [len(oracle.theta(model, spec, 0)) for spec in case.units]
    expected = [(s.name, s.width, size) for s, size in zip(case.units, sizes, strict=True)]
    assert [(u.name, u.width, u.size) for u in units] == expected


@every_case
def test_every_slot_is_the_stated_one(case: Case) -> None:
    for spec in case.units:
        unit = units_of(case)[spec.name]
        assert unit.parameters == tuple(slot.name for slot in spec.theta)  # in this order
        assert _places(unit.theta) == _stated(spec.theta, spec)
        assert _places(unit.copies) == _stated(spec.copies, spec)
        assert _places(unit.consumers) == _stated(spec.consumers, spec)


Place = tuple[str, int, list[list[int]]]


def _places(slots: tuple[sg.Slot, ...]) -> list[Place]:
    """(name, dim, entries of each neuron), sorted."""
    return sorted((slot.name, slot.dim, slot.positions.tolist()) for slot in slots)


def _stated(slots: tuple[oracle.Slot, ...], spec: UnitSpec) -> list[Place]:
    neurons = range(spec.width)
    return sorted((s.name, s.dim, [list(s.positions(k)) for k in neurons]) for s in slots)


@every_case
def test_a_neurons_vector_has_the_stated_order(case: Case) -> None:
    model = model_of(case)
    for spec in case.units:
        vectors = units_of(case)[spec.name].vectors(named_tensors(model))
        expected = [oracle.theta(model, spec, k) for k in range(spec.width)]
        assert torch.equal(vectors, torch.stack(expected))


@every_case
def test_what_cannot_be_split_is_named_with_a_reason(case: Case) -> None:
    units = units_of(case)
    assert not set(case.skipped) & {unit.name for unit in units}
    assert {s.name for s in units.skipped} == set(case.skipped)
    for skipped in units.skipped:
        assert skipped.reason.strip()
        assert skipped.name in str(units)


# --- S and its eigenpairs -----------------------------------------------------------------


@every_loss
@every_case
def test_splitting_matrices_are_those_of_the_definition(case: Case, loss: str) -> None:
    for spec, unit, apply in operators(case, loss):
        assert_same_matrices(as_dense(unit, apply), oracle_matrices(case, loss, spec))


@every_loss
@every_case
def test_closed_form_and_general_path_agree(case: Case, loss: str) -> None:
    general = operators(case, loss, closed_form=False)
    for (spec, unit, closed), (_, _, other) in zip(operators(case, loss), general, strict=True):
        if unit.subgraph.diagonal:
            assert_same_matrices(as_dense(unit, closed), as_dense(unit, other))
            assert_same_matrices(as_dense(unit, other), oracle_matrices(case, loss, spec))


def test_both_paths_are_used() -> None:
    units = [unit for case in CASES for unit in units_of(case)]
    assert sum(unit.subgraph.diagonal for unit in units) >= 20
    assert sum(not unit.subgraph.diagonal for unit in units) >= 20


@every_loss
@every_case
def test_scores_are_the_smallest_eigenpairs(case: Case, loss: str) -> None:
    scores = scores_of(case, loss)
    assert list(scores) == [spec.name for spec in case.units]
    for spec in case.units:
        assert_smallest_eigenpairs(scores[spec.name], oracle_matrices(case, loss, spec))


@every_loss
@every_case
def test_a_neuron_that_is_affine_in_theta_is_never_worth_a_split(case: Case, loss: str) -> None:
    """S = 0 there: a lambda of -1e-18 would be a split for nothing."""
    for spec in case.units:
        if spec.flat:
            assert (scores_of(case, loss)[spec.name].values == 0).all()


@every_loss
@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32_scores_are_close(case: Case, loss: str) -> None:
    """lambda to 1e-4 of the norm of S: the whole pass is in float32, only eigh in float64."""
    model = fresh(case).float()
    batch = tuple(t.float() if t.is_floating_point() else t for t in batch_of(case, loss))
    scores = sg.score(model, LOSSES[loss], [batch], units=float32_units_of(case), stand_in=None)
    for spec in case.units:
        found, S = scores[spec.name], oracle_matrices(case, loss, spec)
        assert found.values.dtype == found.vectors.dtype == torch.float32
        error = (found.values - torch.linalg.eigvalsh(S)[:, 0]).abs()
        assert (error <= 1e-4 * norms(S) + 1e-7).all()


# --- Lanczos ------------------------------------------------------------------------------


def _random_start(unit: sg.Unit) -> Tensor:  # (width, d)
    return torch.randn(unit.width, unit.size, dtype=torch.float64)


def _by_lanczos(case: Case, loss: str, spec: UnitSpec, steps: int) -> sg.UnitScores:
    units = only(units_of(case), spec.name)
    scores = sg.score(
        model_of(case), LOSSES[loss], [batch_of(case, loss)], units=units, steps=steps,
        stand_in=None,
    )  # fmt: skip
    assert scores[spec.name].method in {"lanczos", "span", "zero"}
    return scores[spec.name]


def _true_residuals(S: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    return (torch.einsum("kij,kj->ki", S, vectors) - values[:, None] * vectors).norm(dim=1)


@every_loss
@every_case
def test_all_steps_of_lanczos_are_exact(case: Case, loss: str) -> None:
    for spec, unit, apply in operators(case, loss):
        S = oracle_matrices(case, loss, spec)
        pairs = lanczos(apply, _random_start(unit), unit.size)
        allowed = TOLERANCE * norms(S) + FLOOR
        assert ((pairs.values - torch.linalg.eigvalsh(S)[:, 0]).abs() <= allowed).all()
        assert (_true_residuals(S, pairs.values, pairs.vectors) <= allowed).all()
        assert (pairs.residuals <= allowed).all()


@every_loss
@every_case
def test_lanczos_reports_its_true_residual(case: Case, loss: str) -> None:
    """From size - 1 steps down to 2, asked for through score(steps=)."""
    for spec in case.units:
        S = oracle_matrices(case, loss, spec)
        values, allowed = torch.linalg.eigvalsh(S), TOLERANCE * norms(S) + FLOOR
        for steps in sorted({S.shape[1] - 1, S.shape[1] // 2, 2} - {S.shape[1]}):
            found = _by_lanczos(case, loss, spec, steps)
            true = _true_residuals(S, found.values, found.vectors)
            assert ((found.residuals - true).abs() <= allowed).all()
            # Some eigenvalue is no further away than the residual.
            nearest = (values - found.values[:, None]).abs().amin(dim=1)
            assert (nearest <= true + allowed).all()
            assert (found.values >= values[:, 0] - allowed).all()


@every_loss
@every_case
def test_size_minus_one_steps_agree_with_dense(case: Case, loss: str) -> None:
    """error * (lambda_2 - lambda) <= residual^2 (Temple and Kato), and 1e-5 where d is not tiny."""
    for spec in case.units:
        S = oracle_matrices(case, loss, spec)
        values, norm = torch.linalg.eigvalsh(S), norms(S)
        found = _by_lanczos(case, loss, spec, S.shape[1] - 1)
        error = (found.values - values[:, 0]).abs()
        gap = (values[:, 1] - found.values).clamp_min(0)
        assert (error * gap <= found.residuals**2 + TOLERANCE * norm**2 + FLOOR).all()
        if S.shape[1] > 16:
            assert (error <= 1e-5 * norm + FLOOR).all()


@every_loss
@every_case
def test_few_steps_never_promise_too_much(case: Case, loss: str) -> None:
    """A Ritz value is never below the smallest eigenvalue, and never rises with more steps."""
    model, batches = model_of(case), [batch_of(case, loss)]
    before: dict[str, Tensor] = {}
    for steps in (1, 2, 4, 8):
        scores = sg.score(
            model, LOSSES[loss], batches, units=units_of(case), steps=steps, stand_in=None
        )
        for spec in case.units:
            S, found = oracle_matrices(case, loss, spec), scores[spec.name]
            allowed = TOLERANCE * norms(S) + FLOOR
            assert (found.values >= torch.linalg.eigvalsh(S)[:, 0] - allowed).all()
            if spec.name in before:
                assert (found.values <= before[spec.name] + allowed).all()
            before[spec.name] = found.values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_lanczos_stops_where_the_krylov_space_does(rank: int, dtype: torch.dtype) -> None:
    """Few active samples give an S of low rank: after rank + 1 steps only rounding is left.

    Among 500 matrices some have a small beta on the way, which costs orthogonality.
    """
    n, d, tolerance = 500, 64, 1e-9 if dtype is torch.float64 else 1e-4
    A = torch.randn(n, d, rank, dtype=torch.float64)
    S = torch.einsum("kir,kr,kjr->kij", A, torch.randn(n, rank, dtype=torch.float64), A).to(dtype)
    start = torch.randn(d, dtype=torch.float64).to(dtype).expand(n, d)
    values = torch.linalg.eigvalsh(S.double())
    allowed = tolerance * values.abs().amax(dim=1)
    for steps in (rank + 1, 8, 12, 16, 24):
        pairs = lanczos(lambda v: torch.einsum("kij,kj->ki", S, v), start, steps)
        below = (values[:, 0] - pairs.values > allowed).sum()
        assert below == 0, f"{steps} steps: {below} of {n} below the smallest eigenvalue"
        true = _true_residuals(S.double(), pairs.values.double(), pairs.vectors.double())
        assert ((pairs.residuals - true).abs() <= 10 * allowed).all()


# --- several batches, several calls -------------------------------------------------------


@every_loss
@every_case
def test_scores_of_batches_are_those_of_all_their_samples(case: Case, loss: str) -> None:
    parts = parts_of(batch_of(case, loss))
    scores = sg.score(model_of(case), LOSSES[loss], parts, units=units_of(case), stand_in=None)
    with torch.no_grad():
        whole = LOSSES[loss](model_of(case), batch_of(case, loss)).item()
    assert scores.loss == pytest.approx(whole, rel=1e-12)
    assert scores.samples == len(batch_of(case, loss)[0])
    for spec in case.units:
        assert_smallest_eigenpairs(scores[spec.name], oracle_matrices(case, loss, spec))


@every_case
def test_little_memory_means_more_passes_and_the_same_bits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "pays", lambda *_, **__: False)
    ample, tight = (Counted(parts_of(batch_of(case, "mse"))) for _ in range(2))
    model, units = model_of(case), units_of(case)
    one = sg.score(model, LOSSES["mse"], ample, units=units, stand_in=None)
    many = sg.score(model, LOSSES["mse"], tight, units=units, stand_in=None, memory=1)
    assert (ample.passes, tight.passes) == (1, len(units))
    assert (one.loss, one.samples) == (many.loss, many.samples)
    for name in one:
        assert torch.equal(one[name].values, many[name].values)
        assert torch.equal(one[name].vectors, many[name].vectors)
        assert torch.equal(one[name].residuals, many[name].residuals)


def _two_calls(loss: str) -> Callable[[Any, Batch], Tensor]:
    """0.25 of the loss on some inputs and 0.75 of that on others, and more of them."""

    def loss_fn(model: Any, batch: Batch) -> Tensor:
        first, second = tuple(t[:2] for t in batch), tuple(t[1:] for t in batch)
        return 0.25 * LOSSES[loss](model, first) + 0.75 * LOSSES[loss](model, second)

    return loss_fn


@every_case
def test_a_loss_may_call_the_model_twice(case: Case) -> None:
    batch, loss_fn = batch_of(case, "ce"), _two_calls("ce")
    scores = sg.score(model_of(case), loss_fn, [batch], units=units_of(case), stand_in=None)
    for spec in case.units:
        S = matrices_by_definition(case, loss_fn, batch, spec)
        assert_smallest_eigenpairs(scores[spec.name], S)


def test_a_loss_may_compare_two_outputs() -> None:
    """The two calls are not separable: each one's g depends on the other's output."""

    def agreement(model: Any, batch: Batch) -> Tensor:
        x, _ = batch
        return F.mse_loss(model(x), model(x.flip(1)))

    batch = batch_of(MLP, "mse")
    scores = sg.score(model_of(MLP), agreement, [batch], units=units_of(MLP), stand_in=None)
    for spec in MLP.units:
        S = matrices_by_definition(MLP, agreement, batch, spec)
        assert_smallest_eigenpairs(scores[spec.name], S)


def test_the_stand_in_is_what_none_leaves_out() -> None:
    """PReLU has a kink: S with the stand-in differs from the definition's, without it not."""
    batches = [batch_of(PRELU, "mse")]
    smooth = sg.score(model_of(PRELU), LOSSES["mse"], batches, units=units_of(PRELU))
    plain = scores_of(PRELU, "mse")
    assert (smooth["6"].values != 0).any()
    assert (plain["6"].values == 0).all()
