"""Bad input: every mistake has a message that names the place, the cause and the way out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from helpers_split import Problem, Snapshot, hand_plan, mlp, mse, problem
from splitgrow.plan import SplitPlan

Verb = Callable[..., Any]


@cache
def _template() -> tuple[Problem, SplitPlan]:
    torch.manual_seed(0)
    p = problem(mlp(3, 4, 5, 2), (6, 3), batches=3)
    return p, sg.select(p.scores(), count=2)


@pytest.fixture
def p() -> Problem:
    template, _ = _template()
    return Problem(copy.deepcopy(template.model), list(template.batches), template.units)


@pytest.fixture
def plan() -> SplitPlan:
    return _template()[1]


def score(p: Problem, loss_fn: Any, batches: Any) -> Any:
    return sg.score(p.model, loss_fn, batches, units=p.units)


def score_from_nothing(p: Problem, loss_fn: Any, batches: Any) -> Any:
    return sg.score(p.model, loss_fn, batches)


def split(p: Problem, loss_fn: Any, batches: Any) -> Any:
    return sg.split(p.model, _template()[1], loss_fn=loss_fn, batches=batches)


def split_with_step(p: Problem, loss_fn: Any, batches: Any) -> Any:
    return sg.split(p.model, _template()[1], loss_fn=loss_fn, batches=batches, step=1e-2)


VERBS = [score, score_from_nothing, split, split_with_step]
every_verb = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)


def assert_refused(
    kind: type[Exception], message: str, p: Problem, verb: Verb, loss_fn: Any, batches: Any
) -> None:
    snapshot = Snapshot(p.model)
    with pytest.raises(kind, match=message) as raised:
        verb(p, loss_fn, batches)
    assert type(raised.value) is kind
    snapshot.assert_same()


# --- losses -------------------------------------------------------------------------------


@every_verb
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_loss_that_is_not_finite(p: Problem, verb: Verb, bad: float, index: int) -> None:
    x, y = p.batches[index]
    p.batches[index] = (x, torch.full_like(y, bad))
    message = rf"the loss of batches\[{index}\] is {bad}"
    assert_refused(sg.LossError, message, p, verb, mse, p.batches)


@every_verb
def test_a_loss_that_is_no_scalar(p: Problem, verb: Verb) -> None:
    def per_sample(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)

    message = r"as a scalar tensor, got torch.float64 of shape \(6,\)\. Average it: loss\.mean\(\)"
    assert_refused(sg.LossError, message, p, verb, per_sample, p.batches)
    number = lambda model, batch: mse(model, batch).item()  # noqa: E731
    assert_refused(sg.LossError, "as a scalar tensor, got float", p, verb, number, p.batches)
    whole = lambda model, batch: model(batch[0]).argmax()  # noqa: E731
    assert_refused(sg.LossError, r"got torch\.int64 of shape", p, verb, whole, p.batches)


@pytest.mark.parametrize("verb", [score, score_from_nothing])
def test_a_loss_that_is_detached(p: Problem, verb: Verb) -> None:
    def detached(model: Any, batch: Any) -> Tensor:
        return mse(model, batch).detach()

    def without_graph(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            return mse(model, batch)

    for loss_fn in (detached, without_graph):
        assert_refused(
            sg.LossError, "does not depend on the model's outputs", p, verb, loss_fn, p.batches
        )


@every_verb
def test_a_loss_that_never_calls_the_model(p: Problem, verb: Verb) -> None:
    own = copy.deepcopy(p.model)
    assert_refused(
        sg.LossError,
        "did not call the model it was given",
        p,
        verb,
        lambda model, batch: mse(own, batch),
        p.batches,
    )


@every_verb
def test_what_loss_fn_raises_comes_through(p: Problem, verb: Verb) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise ZeroDivisionError("mine")

    assert_refused(ZeroDivisionError, "mine", p, verb, broken, p.batches)


# --- batches ------------------------------------------------------------------------------


@every_verb
@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda p: [], "batches: there are none"),
        (lambda p: (b for b in p.batches), r"a generator can be read only once.*list\(batches\)"),
        (lambda p: iter(p.batches), "a generator can be read only once"),
        (lambda p: map(tuple, p.batches), "a generator can be read only once"),
        (lambda p: p.batches[0][0], r"got a single tensor\. Give a list of batches: \[tensor\]"),
        (lambda p: {"x": p.batches[0][0]}, r"got dict\. One batch alone goes into a list"),
        (lambda p: "batches", "expected a list of batches or a DataLoader, got str"),
        (lambda p: 3, "expected a list of batches or a DataLoader, got int"),
    ],
    ids=["empty", "generator", "iterator", "map", "tensor", "dict", "string", "number"],
)
def test_batches_that_cannot_be_read(
    p: Problem, verb: Verb, batches: Callable[[Problem], Any], message: str
) -> None:
    assert_refused(sg.InputError, message, p, verb, mse, batches(p))


@every_verb
def test_a_batch_without_samples(p: Problem, verb: Verb) -> None:
    nothing = [(x[:0], y[:0]) for x, y in p.batches]

    def total(model: Any, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    message = "one of them has no samples in it"
    assert_refused(sg.InputError, message, p, verb, total, [p.batches[0], *nothing])
    assert_refused(sg.LossError, "is nan", p, verb, mse, nothing)


@every_verb
def test_something_that_runs_dry(p: Problem, verb: Verb) -> None:
    """Iterable, but with the same generator every time."""

    class Once:
        def __init__(self) -> None:
            self.left = iter(p.batches)

        def __iter__(self) -> Iterator[Any]:
            return self.left

    if verb in (score, score_from_nothing):
        verb(p, mse, Once())  # one pass is enough here
        return
    assert_refused(sg.InputError, "there are none.*read several times", p, verb, mse, Once())


# --- arguments of split -------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 0.0, -1e-3, float("nan"), float("inf"), "big", [1.0]])
def test_steps_that_are_none(p: Problem, plan: SplitPlan, step: Any) -> None:
    snapshot = Snapshot(p.model)
    with pytest.raises(sg.InputError, match="step: expected a positive number, got"):
        sg.split(p.model, plan, step=step)
    with pytest.raises(sg.InputError, match="step: expected a positive number, got"):
        sg.split(p.model, plan, step=step, loss_fn=mse, batches=p.batches)
    snapshot.assert_same()


@pytest.mark.parametrize("step", [None, 1e-3])
def test_loss_and_batches_go_together(p: Problem, plan: SplitPlan, step: float | None) -> None:
    snapshot = Snapshot(p.model)
    for given in ({"loss_fn": mse}, {"batches": p.batches}):
        with pytest.raises(sg.InputError, match="give loss_fn= and batches= together, or neither"):
            sg.split(p.model, plan, step=step, **given)
    with pytest.raises(sg.InputError, match="loss_fn: expected a function, got list"):
        sg.split(p.model, plan, step=step, loss_fn=[mse], batches=p.batches)
    snapshot.assert_same()


def test_neither_step_nor_data(p: Problem, plan: SplitPlan) -> None:
    with pytest.raises(sg.InputError, match=r"give loss_fn= and batches=; or set it yourself"):
        sg.split(p.model, plan)


def test_an_empty_plan(p: Problem) -> None:
    with pytest.raises(sg.PlanError, match=r"the plan is empty.*splitting stable; train on"):
        sg.split(p.model, SplitPlan([], p.units), step=1e-3)


def test_things_that_are_no_plan_and_no_model(p: Problem, plan: SplitPlan) -> None:
    with pytest.raises(sg.InputError, match=r"plan: expected what select\(\) returned, got list"):
        sg.split(p.model, list(plan), step=1e-3)
    with pytest.raises(sg.InputError, match=r"model: expected a torch\.nn\.Module, got function"):
        sg.split(lambda x: x, plan, step=1e-3)


# --- another model ------------------------------------------------------------------------


def test_a_plan_for_another_model(plan: SplitPlan) -> None:
    for other in (mlp(3, 4, 6, 2), mlp(3, 4, 2), nn.Sequential(nn.Conv1d(1, 2, 3))):
        snapshot = Snapshot(other)
        with pytest.raises(sg.PlanError, match=r"another one, or it has been split since\. Call"):
            sg.split(other, plan, step=1e-3)
        snapshot.assert_same()


def test_a_plan_for_an_already_split_model(p: Problem, plan: SplitPlan) -> None:
    sg.split(p.model, plan, step=1e-3)
    snapshot = Snapshot(p.model)
    with pytest.raises(sg.PlanError, match=r"had shape .* when the units were found and now has"):
        sg.split(p.model, plan, step=1e-3)
    snapshot.assert_same()


def test_units_of_another_model(p: Problem) -> None:
    for other in (mlp(3, 4, 2), nn.Sequential(nn.Identity(), mlp(3, 4, 5, 2))):
        with pytest.raises(sg.PlanError, match=r"(has shape|is missing).*: the model is another"):
            sg.score(other.double(), mse, p.batches, units=p.units)
    sg.split(p.model, hand_plan(p.units, {"0": [1]}), step=1e-3)
    with pytest.raises(sg.PlanError, match="Call find_units again"):
        sg.score(p.model, mse, p.batches, units=p.units)


def test_a_model_that_was_converted_since(p: Problem, plan: SplitPlan) -> None:
    p.model.float()
    snapshot = Snapshot(p.model)
    with pytest.raises(sg.PlanError, match=r"Was it converted since\? Call find_units again"):
        sg.split(p.model, plan, step=1e-3)
    snapshot.assert_same()


# --- models that cannot be captured -------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # LINE
            return self.net(x)
        return -self.net(x)


def test_a_model_that_cannot_be_exported_names_the_line() -> None:
    with open(__file__) as file:  # noqa: PTH123
        line = next(i for i, text in enumerate(file, 1) if text.rstrip().endswith("# LINE"))
    model, x = Branching(), torch.randn(5, 3)
    snapshot = Snapshot(model)
    with pytest.raises(sg.CaptureError) as raised:
        sg.find_units(model, x)
    message = str(raised.value)
    assert f'test_errors.py", line {line}, in forward: `if x.sum() > 0:' in message
    assert "torch.where" in message
    snapshot.assert_same()


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(sg.CaptureError, match="cannot be multiplied"):
        sg.find_units(mlp(3, 4, 2), torch.randn(5, 7))
    with pytest.raises(sg.InputError, match="example_inputs: expected a tuple"):
        sg.find_units(mlp(3, 4, 2), 3)


# --- the kinds ----------------------------------------------------------------------------


def test_every_error_is_a_splitgrow_error() -> None:
    kinds = [sg.CaptureError, sg.InputError, sg.LossError, sg.OptimizerError, sg.PlanError]
    assert all(issubclass(kind, sg.SplitgrowError) for kind in [*kinds, sg.SplitRefused])
    assert issubclass(sg.InputError, ValueError)


def test_a_loss_of_the_models_derivatives_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def penalty(model: Any, batch: Tensor) -> Tensor:
        inputs = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return slope.square().mean()

    units = sg.find_units(model, torch.randn(2, 3))
    with pytest.raises(sg.LossError, match="differentiates the model by its inputs"):
        sg.score(model, penalty, [torch.randn(5, 3)], units=units)


def test_scoring_works_inside_inference_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batch = torch.randn(5, 3)

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    plain = sg.score(model, loss_fn, [batch])
    with torch.inference_mode():
        inside = sg.score(model, loss_fn, [batch])
    assert torch.equal(plain["0"].values, inside["0"].values)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": lambda x: x}, "model: expected a torch.nn.Module"),
        ({"loss_fn": None}, "loss_fn: expected a function"),
        ({"units": ["0"]}, "units: expected what find_units"),
        ({"steps": 0}, "steps: expected at least 1"),
    ],
)
def test_wrong_arguments_of_score_are_named(arguments: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "loss_fn": lambda m, b: m(b).mean(),
        "batches": [torch.randn(2, 2)],
    }
    with pytest.raises(sg.InputError, match=words):
        sg.score(**(given | arguments))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.nn.functional.mse_loss, "takes outputs and targets"),
        (nn.MSELoss(), "takes outputs and targets"),
        (lambda model: model, "is called as loss_fn(model, batch)"),
        (3, "expected a function, got int"),
    ],
)
def test_a_loss_of_outputs_and_targets_is_not_a_loss_fn(wrong: Any, words: str) -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(4, 2)
    with pytest.raises(sg.InputError) as caught:
        sg.score(model, wrong, [(x, x)])
    assert words in str(caught.value)


def test_one_batch_in_place_of_a_list_of_batches() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(4, 2)
    with pytest.raises(sg.InputError, match=r"Put it into a list: \[\(inputs, targets\)\]"):
        sg.score(model, lambda m, b: m(b[0]).mean(), (x, x))


def test_lazy_modules_are_explained_and_left_alone() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(sg.CaptureError, match="Run the model on one batch"):
        sg.find_units(model, torch.randn(2, 4))
    assert isinstance(model[0], nn.LazyLinear)


def test_scripted_models_are_explained() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))
    with pytest.raises(sg.InputError, match="Give the one it came from"):
        sg.find_units(model, torch.randn(2, 2))


def test_a_branch_on_values_is_explained_without_noise(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return h if h.sum() > 0 else -h

    with pytest.raises(sg.CaptureError, match=r"line \d+, in forward"):
        sg.find_units(Branch(), torch.randn(2, 2))
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out == ""


@pytest.mark.parametrize("wrong", [{"fraction": "0.3"}, {"count": "3"}, {"threshold": "low"}])
def test_selections_of_the_wrong_type_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(sg.InputError, match=next(iter(wrong))):
        sg.Policy(**wrong)
