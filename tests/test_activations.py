"""Activations: every class in torch.nn, and the smooth stand-in for those with kinks."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from promises import check_model, check_refused

# Not functions of one entry at a time, and why.
NOT_ELEMENTWISE = {
    "GLU": "the second half of a dimension gates the first: tested with the rules",
    "LogSoftmax": "normalises over a dimension",
    "MultiheadAttention": "contracts queries with keys",
    "Softmax": "normalises over a dimension",
    "Softmax2d": "normalises over the channels",
    "Softmin": "normalises over a dimension",
}

# With a corner somewhere, and straight (or curved) in between.
STRAIGHT = {
    "Hardshrink", "Hardsigmoid", "Hardtanh", "LeakyReLU", "PReLU", "RReLU", "ReLU", "ReLU6",
    "Softshrink", "Threshold",
}  # fmt: skip
BENT = {"Hardswish", "SELU"}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "CELU": [{}, {"alpha": 0.5}],
    "ELU": [{}, {"alpha": 1.0, "inplace": True}],
    "GELU": [{}, {"approximate": "tanh"}],
    "Hardshrink": [{}, {"lambd": 0.3}],
    "Hardtanh": [{}, {"min_val": -0.4, "max_val": 0.7}],
    "LeakyReLU": [{}, {"negative_slope": 0.3}],
    "RReLU": [{}, {"lower": 0.2, "upper": 0.6}],
    "ReLU": [{}, {"inplace": True}],
    "Softplus": [{}, {"beta": 2.0}],
    "Softshrink": [{}, {"lambd": 0.3}],
    "Threshold": [{"threshold": 0.2, "value": -0.5}, {"threshold": 0.0, "value": 0.0}],
}


def _classes() -> Iterator[type[nn.Module]]:
    home = nn.modules.activation
    for _, kind in inspect.getmembers(home, inspect.isclass):
        if issubclass(kind, nn.Module) and kind.__module__ == home.__name__:
            yield kind


ALL = {kind.__name__: kind for kind in _classes()}


def _instances(names: set[str]) -> list[Any]:
    return [
        pytest.param(lambda kind=ALL[name], options=options: kind(**options),
                     id=f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})")
        for name in sorted(names)
        for options in OPTIONS.get(name, [{}])
    ]  # fmt: skip


ELEMENTWISE = set(ALL) - set(NOT_ELEMENTWISE)
SMOOTH = ELEMENTWISE - STRAIGHT - BENT
Make = Callable[[], nn.Module]


def test_the_lists_name_what_torch_has() -> None:
    assert set(NOT_ELEMENTWISE) <= set(ALL)
    assert STRAIGHT <= ELEMENTWISE
    assert BENT <= ELEMENTWISE
    assert len(ELEMENTWISE) > 20


# ---- every class: units, parity, prediction --------------------------------------------------


class SideBySide(nn.Module):
    """For each activation two layers with it in between, or as a gate; one output each.

    As a gate its derivatives are not taken in closed form.
    """

    def __init__(self, activations: dict[str, nn.Module], *, gated: bool = False) -> None:
        super().__init__()
        self.activations = nn.ModuleDict(activations)
        self.first = nn.ModuleDict({name: nn.Linear(5, 4) for name in activations})
        self.gate = nn.ModuleDict({name: nn.Linear(5, 4) for name in activations if gated})
        self.head = nn.ModuleDict({name: nn.Linear(4, 2) for name in activations})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self._branch(name, x) for name in self.activations}

    def _branch(self, name: str, x: Tensor) -> Tensor:
        hidden = self.activations[name](self.first[name](x))
        if name in self.gate:
            hidden = hidden * self.gate[name](x).tanh()
        return self.head[name](hidden)


def _side_by_side(names: set[str], *, gated: bool = False) -> SideBySide:
    made = {f"{name}{i}": ALL[name](**options) for name in sorted(names)
            for i, options in enumerate(OPTIONS.get(name, [{}]))}  # fmt: skip
    return SideBySide(made, gated=gated)


def _check_side_by_side(model: SideBySide, *, curved: bool, step: float) -> None:
    units = {f"first.{name}": 4 for name in model.activations}
    refused = {f"head.{name}": "output" for name in model.activations}
    check_model(model, torch.randn(9, 5), units, refused, curved=curved, step=step)


def test_smooth_activations_keep_every_promise() -> None:
    _check_side_by_side(_side_by_side(SMOOTH), curved=True, step=1e-3)


def test_activations_with_corners_keep_every_promise() -> None:
    """Within a step so small that no sample crosses a corner."""
    _check_side_by_side(_side_by_side(STRAIGHT), curved=False, step=1e-5)
    _check_side_by_side(_side_by_side(BENT), curved=True, step=1e-4)


def test_an_activation_may_be_a_gate() -> None:
    _check_side_by_side(_side_by_side(ELEMENTWISE, gated=True), curved=True, step=1e-5)


@pytest.mark.parametrize("name", sorted(set(NOT_ELEMENTWISE) - {"GLU", "MultiheadAttention"}))
def test_an_activation_that_mixes_neurons_is_refused(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 6, 1)
            self.activation = ALL[name]() if name == "Softmax2d" else ALL[name](dim=1)
            self.head = nn.Conv2d(6, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.activation(self.first(x)))

    units = sg.find_units(Net(), torch.randn(3, 2, 2, 2))
    assert not len(units)
    check_refused(units, {"first": "activation", "head": "output"})


# ---- the second derivative that scoring uses -------------------------------------------------

GRID = torch.linspace(-7.03, 7.01, 141, dtype=torch.float64)


class OneParameterEach(nn.Module):
    """sum_k f(theta_k): with the output as the loss, S_k is the number f''(theta_k)."""

    def __init__(self, function: Callable[[Tensor], Tensor], grid: Tensor = GRID) -> None:
        super().__init__()
        self.first = nn.Linear(1, len(grid), bias=False, dtype=grid.dtype)
        self.function = function
        self.head = nn.Linear(len(grid), 1, bias=False, dtype=grid.dtype)
        with torch.no_grad():
            self.first.weight.copy_(grid[:, None])
            self.head.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.first(x)))


@functools.cache
def prepared(function: Callable[[Tensor], Tensor], grid: Tensor) -> tuple[nn.Module, sg.Units]:
    model = OneParameterEach(function, grid)
    return model, sg.find_units(model, torch.ones(1, 1, dtype=grid.dtype))


def second_derivative(
    function: Callable[[Tensor], Tensor], stand_in: sg.Softplus | None, grid: Tensor = GRID
) -> Tensor:
    """f'' on the grid, as ``score`` sees it."""
    model, units = prepared(function, grid)
    batches = [torch.ones(1, 1, dtype=grid.dtype)]
    scores = sg.score(model, lambda m, b: m(b).sum(), batches, units=units, stand_in=stand_in)
    return scores["first"].values


def slope(function: Callable[[Tensor], Tensor], at: Tensor, order: int = 1) -> Tensor:
    """f' or f'' by autograd, which sees nothing at a corner."""
    if order == 2 and type(function).__name__ in STRAIGHT:
        return torch.zeros_like(at)
    at = at.clone().requires_grad_()
    value = function(at.clone())
    for _ in range(order):
        if not value.requires_grad:
            return torch.zeros_like(at)
        value = torch.autograd.grad(value.sum(), at, create_graph=True, allow_unused=True)[0]
        value = torch.zeros_like(at) if value is None else value
    return value.detach()


def logistic(x: Tensor, beta: float) -> Tensor:
    """softplus_beta'': the density that smooths a corner."""
    s = torch.sigmoid(beta * x)
    return beta * s * (1 - s)


def smoothed_corners(function: Callable[[Tensor], Tensor], beta: float, at: Tensor) -> Tensor:
    """What smoothing adds: (f' * density)' less f'' * density, by numerical integration.

    For a slope that jumps by j at t it is j density(x - t), whatever f is between its corners.
    """
    step = 1e-3
    t = torch.arange(-15, 15, step, dtype=torch.float64) + step / 2
    distance = at[:, None] - t
    s = torch.sigmoid(beta * distance)
    density = beta * s * (1 - s)
    change = beta * (1 - 2 * s) * density
    total = (change * slope(function, t)).sum(1) * step
    return total - (density * slope(function, t, order=2)).sum(1) * step


def _functions(names: set[str]) -> list[Any]:
    return [
        pytest.param(_activation(param.id, param.values[0]), id=param.id)
        for param in _instances(names)
    ]


_MADE: dict[str, nn.Module] = {}


def _activation(name: str, make: Make) -> nn.Module:
    """One instance for all tests, so that its units are found once."""
    activation = _MADE.setdefault(name, make().double().eval())
    return activation.requires_grad_(False)  # PReLU's slope is not part of theta here


MORE = [
    pytest.param(nn.ELU(0.5), id="ELU(alpha=0.5)"),
    pytest.param(nn.SELU(), id="SELU()"),
    pytest.param(torch.abs, id="abs"),
    pytest.param(lambda x: x.clamp(-0.5, 2.0), id="clamp"),
    pytest.param(lambda x: x.clamp(min=0.3), id="clamp min"),
    pytest.param(lambda x: x.clamp(max=0.3), id="clamp max"),
    pytest.param(lambda x: torch.clamp_min(x, -0.3), id="clamp_min"),
    pytest.param(lambda x: torch.clamp_max(x, 0.3), id="clamp_max"),
    pytest.param(lambda x: F.relu(x - 1.0) + F.relu(-x), id="two relus"),
]


@pytest.mark.parametrize("beta", [3.0, 8.0])
@pytest.mark.parametrize("function", _functions(STRAIGHT | BENT - {"SELU"}) + MORE)
def test_the_stand_in_is_the_smoothed_corner(
    function: Callable[[Tensor], Tensor], beta: float
) -> None:
    own = slope(function, GRID, order=2)
    found = (second_derivative(function, sg.Softplus(beta)) - own)[::4]
    expected = smoothed_corners(function, beta, GRID[::4])
    assert expected.abs().max() > 0.1  # there is a corner to see
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("function", _functions(ELEMENTWISE))
def test_without_a_stand_in_curvature_is_the_activations_own(
    function: Callable[[Tensor], Tensor],
) -> None:
    found = second_derivative(function, None)
    torch.testing.assert_close(found, slope(function, GRID, order=2), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", _functions(SMOOTH))
def test_a_smooth_activation_needs_no_stand_in(function: Callable[[Tensor], Tensor]) -> None:
    found = second_derivative(function, sg.Softplus())
    torch.testing.assert_close(found, slope(function, GRID, order=2), rtol=1e-10, atol=1e-12)


def test_power_average_pooling_needs_no_stand_in() -> None:
    def pooled(x: Tensor) -> Tensor:
        return F.lp_pool1d(torch.stack([x, x + 0.5], -1), 3.0, 2).squeeze(-1)

    at = GRID[GRID > 0.5]
    found = second_derivative(pooled, sg.Softplus(), at)
    torch.testing.assert_close(found, slope(pooled, at, order=2), rtol=1e-9, atol=1e-11)


def test_the_default_is_softplus_with_beta_3() -> None:
    assert sg.Softplus() == sg.Softplus(beta=3.0)
    assert inspect.signature(sg.score).parameters["stand_in"].default == sg.Softplus(3.0)
    found = second_derivative(F.relu, sg.Softplus())
    torch.testing.assert_close(found, logistic(GRID, 3.0))
    twice = torch.autograd.functional.hessian(
        lambda x: F.softplus(x, beta=3.0).sum(), GRID[::20]
    ).diagonal()
    torch.testing.assert_close(found[::20], twice, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_beta_must_be_positive(beta: float) -> None:
    with pytest.raises(sg.InputError, match="beta must be positive"):
        sg.Softplus(beta)


def test_relu_without_a_stand_in_has_no_curvature() -> None:
    model, x = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(9, 5)
    scores = sg.score(model, lambda m, b: m(b).square().mean(), [x],
                      units=sg.find_units(model, x), stand_in=None)  # fmt: skip
    assert torch.equal(scores["0"].values, torch.zeros(6))


# ---- value and slope are the model's own -----------------------------------------------------

COMPOSED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    # f(relu(x))'' = f''(relu(x)) relu'(x)^2 + f'(relu(x)) density(x), relu and relu' unsmoothed
    "tanh of relu": (
        lambda x: F.relu(x).tanh(),
        lambda x, d: (1 - (t := F.relu(x).tanh()) ** 2) * (d - 2 * t * (x > 0)),
    ),
    "square of relu": (lambda x: F.relu(x).square(), lambda x, d: 2 * (x > 0) + 2 * F.relu(x) * d),
    "gate by relu": (lambda x: F.relu(x) * x, lambda x, d: 2 * (x > 0) + x * d),
    "relu of tanh": (
        lambda x: F.relu(x.tanh()),
        lambda x, d: (
            logistic(x.tanh(), 3.0) * (1 - x.tanh() ** 2) ** 2
            - 2 * (x > 0) * x.tanh() * (1 - x.tanh() ** 2)
        ),
    ),
    "relu of relu": (
        lambda x: F.relu(F.relu(x) - 1),
        lambda x, d: (x > 1) * d + logistic(F.relu(x) - 1, 3.0) * (x > 0),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_only_the_second_derivative_is_smoothed(name: str) -> None:
    function, expected = COMPOSED[name]
    found = second_derivative(function, sg.Softplus(3.0))
    torch.testing.assert_close(found, expected(GRID, logistic(GRID, 3.0)), rtol=1e-9, atol=1e-12)


def test_the_forward_pass_is_untouched() -> None:
    model, x = _side_by_side(ELEMENTWISE).double().eval(), torch.randn(9, 5, dtype=torch.float64)
    seen: list[dict[str, Tensor]] = []

    def loss_fn(callee: Callable[[Tensor], dict[str, Tensor]], batch: Tensor) -> Tensor:
        seen.append(callee(batch))
        return torch.stack(list(seen[-1].values())).square().mean()

    scores = sg.score(model, loss_fn, [x], units=sg.find_units(model, x))
    expected = model(x)
    assert seen
    for outputs in seen:
        assert all(torch.equal(outputs[name], expected[name]) for name in expected)
    assert scores.loss == torch.stack(list(expected.values())).square().mean().item()


def test_the_gradient_that_enters_is_the_models_own() -> None:
    """S = g f''(theta): g is the derivative through the ReLU behind, as autograd has it."""
    torch.manual_seed(1)
    second, third = nn.Linear(141, 4).double(), nn.Linear(4, 1).double()

    class Deep(OneParameterEach):
        def __init__(self) -> None:
            super().__init__(torch.tanh)
            self.head, self.last = second, third

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.relu(self.head(self.first(x).tanh())))

    model, x = Deep(), torch.ones(1, 1, dtype=torch.float64)
    scores = sg.score(model, lambda m, b: m(b).sum(), [x], units=sg.find_units(model, x))
    hidden = GRID.tanh().requires_grad_()
    (g,) = torch.autograd.grad(third(F.relu(second(hidden))).sum(), hidden)
    expected = g * slope(torch.tanh, GRID, order=2)
    torch.testing.assert_close(scores["first"].values, expected, rtol=1e-9, atol=1e-12)
