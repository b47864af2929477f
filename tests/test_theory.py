"""The promises of the theory, measured: what a split predicts is what the loss does.

    change of loss = eps^2 / 2 * sum over split neurons of <v, S v>  +  O(eps^4)

Theorem 2 of Liu et al. 2019 prints the optimal change with the opposite sign; below, a negative
lambda means that the loss falls. Everything is float64, and splits are made by `splitgrow.split`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
import splitgrow as sg
from cases import (
    CASES,
    LOSSES,
    MLP,
    MOBILENET_V1,
    PRELU,
    RESNET,
    STREAM_TO_STREAM,
    TRANSFORMER_GATED,
    UNET,
    VGG,
    Case,
)
from helpers_score import (
    batch_of,
    entries_of,
    entry,
    fresh,
    model_of,
    oracle_matrices,
    scores_of,
    slope,
    unit_vector,
    units_of,
)
from oracle import Slot, UnitSpec
from splitgrow import zoo

every_loss = pytest.mark.parametrize("loss", sorted(LOSSES))


def curved(case: Case) -> list[UnitSpec]:
    """The units that a split can change the loss of."""
    return [spec for spec in case.units if not spec.flat]


class _AverageUNet(zoo.UNet):
    """Average for max pooling: where a maximum changes place the loss has a kink."""

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.downs:
            skips.append(down(x))
            x = F.avg_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, merge in zip(self.ups, self.merges, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _average_unet() -> nn.Module:
    model = UNET.build()
    model.__class__ = _AverageUNet
    return model


def _average_vgg() -> nn.Module:
    model = VGG.build()
    for i, module in enumerate(model.features):
        if isinstance(module, nn.MaxPool2d):
            model.features[i] = nn.AvgPool2d(2)
    return model


VGG_SMOOTH = replace(VGG, name="vgg_bn_smooth", build=_average_vgg)
UNET_SMOOTH = replace(UNET, name="unet_smooth", build=_average_unet)
KINKED = (VGG, UNET, PRELU)
SMOOTH = (*(case for case in CASES if case not in KINKED), VGG_SMOOTH, UNET_SMOOTH)

every_smooth_case = pytest.mark.parametrize("case", SMOOTH, ids=str)


def best_of(case: Case, loss: str, spec: UnitSpec) -> sg.Entry:
    """The neuron of a unit with the most negative splitting index."""
    found = scores_of(case, loss)[spec.name]
    (only,) = entries_of(found, [int(found.values.argmin())])
    return only


def split_by(case: Case, loss: str, entries: Sequence[sg.Entry], step: float) -> sg.Receipt:
    plan = sg.SplitPlan(entries, units_of(case))
    batches = [batch_of(case, loss)]
    return sg.split(fresh(case), plan, step=step, loss_fn=LOSSES[loss], batches=batches)


def measured(case: Case, loss: str, entries: Sequence[sg.Entry], step: float) -> float:
    change = split_by(case, loss, entries, step).measured
    assert change is not None
    return change


# --- slope 4 ------------------------------------------------------------------------------


def order_of(error: Callable[[float], float]) -> float:
    """The power of eps with which an error falls, over one decade of eps.

    The decade ends where the error is 1e-10 at least, so that it begins well above rounding.
    """
    error, last = cache(error), 0.05
    while error(last) < 1e-10:
        last *= 2
        assert last < 2, "no error to measure"
    steps = [last * 10 ** (-i / 4) for i in range(5)]
    return slope(steps, [error(step) for step in steps])


def assert_slope_4(case: Case, loss: str, entries: Sequence[sg.Entry]) -> None:
    def error(step: float) -> float:
        receipt = split_by(case, loss, entries, step)
        assert receipt.measured is not None
        return abs(receipt.measured - receipt.predicted)

    assert 3.7 < order_of(error) < 4.3


@every_smooth_case
def test_slope_of_single_neurons(case: Case) -> None:
    for spec in curved(case):
        assert_slope_4(case, "ce", [best_of(case, "ce", spec)])


@every_smooth_case
def test_slope_of_all_the_neurons_of_one_layer(case: Case) -> None:
    for spec in curved(case):
        assert_slope_4(case, "mse", entries_of(scores_of(case, "mse")[spec.name]))


@every_loss
@every_smooth_case
def test_slope_of_all_layers_at_once(case: Case, loss: str) -> None:
    """Every neuron of every unit, flat ones too: all neighbours are split together."""
    scores = scores_of(case, loss)
    assert_slope_4(case, loss, [e for spec in case.units for e in entries_of(scores[spec.name])])


@every_smooth_case
def test_slope_of_any_directions(case: Case) -> None:
    """Not only eigenvectors: along any v the change is eps^2 / 2 * <v, S v>, of either sign."""
    generator = torch.Generator().manual_seed(0)
    entries = []
    for spec in case.units:
        unit, S = units_of(case)[spec.name], oracle_matrices(case, "ce", spec)
        for k in range(unit.width):
            v = unit_vector(unit.size, generator)
            entries.append(entry(unit, k, (v @ S[k] @ v).item(), v))
    assert_slope_4(case, "ce", entries)


@pytest.mark.parametrize("case", [c for c in SMOOTH if len(curved(c)) > 1], ids=str)
def test_effects_of_several_units_add(case: Case) -> None:
    """One neuron of each unit: the joint change is the sum of the single ones to O(eps^4)."""
    entries = [best_of(case, "mse", spec) for spec in curved(case)]

    def error(step: float) -> float:
        alone = sum(measured(case, "mse", [e], step) for e in entries)
        return abs(measured(case, "mse", entries, step) - alone)

    assert 3.7 < order_of(error) < 4.3
    joint = measured(case, "mse", entries, 1e-3)
    assert error(1e-3) < 1e-3 * abs(joint)


# --- Theorem 2 ----------------------------------------------------------------------------

EPS = 1e-3
every_theorem_case = pytest.mark.parametrize(
    "case", [MLP, VGG_SMOOTH, MOBILENET_V1, RESNET, STREAM_TO_STREAM, TRANSFORMER_GATED], ids=str
)


@every_loss
@pytest.mark.parametrize("case", SMOOTH, ids=str)
def test_the_best_split_changes_the_loss_by_half_eps_squared_lambda(case: Case, loss: str) -> None:
    """With this sign: lambda < 0 and the loss falls."""
    for spec in curved(case):
        best = best_of(case, loss, spec)
        if best.lambda_ > -1e-4:  # its change of loss would be one of rounding errors
            continue
        change = measured(case, loss, [best], EPS)
        assert change < 0
        assert change == pytest.approx(EPS**2 / 2 * best.lambda_, rel=1e-3)


def random_split(size: int, around: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """2 to 5 offspring with weights of sum 1: displacements (m, size), centred, at most 1 long.

    With `around`, the offspring lie near its two ends.
    """
    m = int(torch.randint(2, 6, ()))
    weights = torch.distributions.Dirichlet(torch.ones(m, dtype=torch.float64)).sample()
    delta = torch.randn(m, size, dtype=torch.float64)
    delta /= delta.norm(dim=1, keepdim=True)
    if around is None:
        delta *= torch.rand(m, 1, dtype=torch.float64)
    else:
        tilt = 10 ** (-3 * torch.rand((), dtype=torch.float64))
        ends = torch.ones(m, dtype=torch.float64)
        ends[: m // 2] = -1
        weights[: m // 2] *= 0.5 / weights[: m // 2].sum()
        weights[m // 2 :] *= 0.5 / weights[m // 2 :].sum()
        delta = ends[:, None] * around + tilt * delta
    delta = delta - weights @ delta
    return weights, delta / delta.norm(dim=1).max()


def change_by_split(case: Case, loss: str, best: sg.Entry, weights: Tensor, delta: Tensor) -> float:
    """Of the loss of the augmented network, neuron replaced by offspring at theta + delta."""
    (spec,) = (s for s in case.units if s.name == best.unit)
    model, loss_fn, batch = model_of(case), LOSSES[loss], batch_of(case, loss)
    offspring = oracle.theta(model, spec, best.neuron) + delta
    with torch.no_grad():
        after = oracle.augmented_loss(model, loss_fn, batch, spec, best.neuron, offspring, weights)
        return (after - loss_fn(model, batch)).item()


def competitors(S: Tensor, v: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Splits of one neuron (weights, displacements of length 1 at most) to compare with +-v."""
    halves = torch.full((2,), 0.5, dtype=torch.float64)
    others = [*torch.linalg.eigh(S).eigenvectors.T, *(unit_vector(len(v)) for _ in range(20))]
    symmetric = [(halves, torch.stack([u, -u])) for u in others]
    anywhere = [random_split(len(v)) for _ in range(count)]
    return symmetric + anywhere + [random_split(len(v), around=v) for _ in range(count)]


@every_loss
@every_theorem_case
def test_no_other_split_is_better(case: Case, loss: str) -> None:
    """Within the same eps; among other directions, weights and numbers of offspring.

    The slack is 50 |lambda| eps^4, 1e-4 of the gain: offspring that are not symmetric have terms
    of third order, with which tilting them may win that much but no more.
    """
    spec = min(curved(case), key=lambda s: best_of(case, loss, s).lambda_)
    best = best_of(case, loss, spec)
    assert best.lambda_ < -1e-3
    chosen = measured(case, loss, [best], EPS)
    slack = 50 * abs(best.lambda_) * EPS**4
    S = oracle_matrices(case, loss, spec)[best.neuron]
    closest = float("inf")
    for weights, delta in competitors(S, best.direction, 80):
        assert torch.allclose(weights @ delta, torch.zeros_like(delta[0]), atol=1e-12)
        assert delta.norm(dim=1).max() <= 1 + 1e-12
        change = change_by_split(case, loss, best, weights, EPS * delta)
        assert change >= chosen - slack
        closest = min(closest, change)
    assert closest < 0.99 * chosen  # some came close, so there was something to win


# --- stable neurons -----------------------------------------------------------------------

NEURON = UnitSpec("0", 1, theta=(Slot("0.weight", 0),), copies=(), consumers=(Slot("2.weight", 1),))
LAYER = replace(NEURON, width=3, theta=(*NEURON.theta, Slot("0.bias", 0)))
mse = LOSSES["mse"]
Problem = tuple[nn.Module, UnitSpec, tuple[Tensor, Tensor]]


@cache
def convex_problem() -> Problem:
    """softplus'' > 0, positive head, targets below the outputs: every S is positive definite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Softplus(), nn.Linear(3, 1)).double()
    x = torch.randn(20, 2, dtype=torch.float64)
    with torch.no_grad():
        model[2].weight.abs_()
        return model, LAYER, (x, model(x) - 1)


def trained_problem(target: Callable[[Tensor], Tensor]) -> Problem:
    """One neuron softplus(w x) at the optimum of its own parameters, its head fixed at 1."""
    torch.manual_seed(0)
    hidden, head = nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)
    model = nn.Sequential(hidden, nn.Softplus(), head).double()
    x = torch.randn(60, 2, dtype=torch.float64)
    batch = (x, target(x[:, :1] + 0.5 * x[:, 1:]))
    nn.init.ones_(head.weight)
    optimizer = torch.optim.LBFGS(
        [hidden.weight],
        max_iter=200,
        tolerance_grad=1e-14,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        model.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    closure()
    assert hidden.weight.grad.abs().max() < 1e-9
    model.zero_grad()
    return model, NEURON, batch


@cache
def stable_problem() -> Problem:
    """The target bends more sharply than a softplus can: the neuron overshoots at the bend."""
    return trained_problem(F.relu)


@cache
def unstable_problem() -> Problem:
    """The target bends less sharply."""
    return trained_problem(lambda z: F.softplus(z, beta=0.5))


def score_problem(problem: Problem) -> tuple[sg.Units, sg.Scores]:
    model, _, batch = problem
    units = sg.find_units(model, batch[:1])
    return units, sg.score(model, mse, [batch], units=units)


def change_of_problem(problem: Problem, k: int, weights: Tensor, delta: Tensor) -> float:
    model, spec, batch = problem
    offspring = oracle.theta(model, spec, k) + delta
    with torch.no_grad():
        after = oracle.augmented_loss(model, mse, batch, spec, k, offspring, weights)
        return (after - mse(model, batch)).item()


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_a_stable_neuron_is_not_improved_by_1000_random_splits(eps: float) -> None:
    problem = convex_problem()
    _, scores = score_problem(problem)
    assert (scores["0"].values > 0).all()
    for i in range(1000):
        weights, delta = random_split(3)
        assert change_of_problem(problem, i % 3, weights, eps * delta) > 0


@pytest.mark.parametrize("eps", [1e-2, 1e-3])
def test_a_stable_neuron_at_its_optimum_is_not_improved_by_any_random_split(eps: float) -> None:
    """There the offspring need not be centred around their parent."""
    problem = stable_problem()
    _, scores = score_problem(problem)
    assert scores["0"].values.item() > 1e-3
    for _ in range(1000):
        weights, delta = random_split(2)
        delta = delta + 0.5 * torch.randn(2, dtype=torch.float64)
        assert change_of_problem(problem, 0, weights, eps * delta) > 0


def test_only_a_split_leaves_an_optimum_with_negative_lambda() -> None:
    """No small move of the neuron itself lowers the loss, and its split does."""
    problem = unstable_problem()
    model, _, batch = problem
    units, scores = score_problem(problem)
    lambda_ = scores["0"].values.item()
    assert lambda_ < -1e-3
    one = torch.ones(1, dtype=torch.float64)
    moves = [EPS * unit_vector(2)[None] for _ in range(200)]
    assert all(change_of_problem(problem, 0, one, move) > 0 for move in moves)
    receipt = sg.split(
        copy.deepcopy(model), sg.select(scores, count=1), step=EPS, loss_fn=mse, batches=[batch]
    )
    assert receipt.measured == pytest.approx(EPS**2 / 2 * lambda_, rel=1e-3)
    assert units["0"].width == 1


@pytest.mark.parametrize("problem", [convex_problem, stable_problem])
def test_a_stable_model_is_left_alone(problem: Callable[[], Problem]) -> None:
    """select takes nothing; a split forced by hand costs eps^2 / 2 * lambda, and is refused."""
    model, spec, batch = problem()
    units, scores = score_problem(problem())
    assert len(sg.select(scores, fraction=1.0)) == 0
    plan = sg.SplitPlan(entries_of(scores["0"]), units)
    receipt = sg.split(copy.deepcopy(model), plan, step=EPS, loss_fn=mse, batches=[batch])
    assert receipt.predicted > 0
    assert receipt.measured == pytest.approx(receipt.predicted, rel=1e-3)
    before: dict[str, Any] = copy.deepcopy(model.state_dict())
    with pytest.raises(sg.SplitRefused):
        sg.split(model, plan, loss_fn=mse, batches=[batch])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model[0].out_features == spec.width
