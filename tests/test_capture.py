"""Capture: any model that torch.export can trace, called in any way, returning anything."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from promises import check_model, check_unit, double, lively, regression
from splitgrow.capture import Call, capture, output_tensors


class Two(nn.Module):
    """linear -> tanh -> linear; the parts that most models here are built around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).tanh())


def batch_of(n: int, *shape: int) -> Tensor:
    return torch.randn(n, *shape or (5,), dtype=torch.float64)


def score_all(model: nn.Module, units: sg.Units, batch: Any, call: Callable[..., Any]) -> sg.Scores:
    """Score with ``call(model, batch)``, and check what the first unit promises."""

    def loss_fn(callee: Callable[..., Any], data: Any) -> Tensor:
        return torch.stack([(t - 1).square().mean() for t in output_tensors(call(callee, data))
                            if t.is_floating_point()]).sum()  # fmt: skip

    scores = sg.score(model, loss_fn, [batch], units=units)
    check_unit(model, scores, units[0].name, loss_fn, [batch])
    return scores


# ---- tensors by name -------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 4), nn.BatchNorm1d(4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("offset", torch.zeros(3), persistent=False)
        self.model = nn.Linear(4, 3)  # a name that capture uses for itself

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks[1](self.blocks[0](x)) * self.scale + self.shift
        return self.model(h.tanh()) + self.offset


def test_parameters_and_buffers_are_known_by_their_names() -> None:
    graph = capture(Nested(), Call((torch.randn(3, 5),), {}))
    assert set(graph.parameters) == {
        "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "scale",
        "model.weight", "model.bias",
    }  # fmt: skip
    assert set(graph.tensors.values()) - set(graph.parameters) >= {
        "blocks.1.running_mean", "blocks.1.running_var", "shift", "offset",
    }  # fmt: skip


def test_buffers_follow_their_neurons() -> None:
    found = check_model(Nested(), torch.randn(3, 5), {"blocks.0": 4}, {"model": "output"})
    copies = {slot.name for slot in found["blocks.0"].copies}
    assert copies == {"blocks.1.weight", "blocks.1.bias", "blocks.1.running_mean",
                      "blocks.1.running_var", "shift"}  # fmt: skip
    assert found["blocks.0"].parameters == ("blocks.0.weight", "blocks.0.bias", "scale")


def test_places_are_module_paths_with_their_class() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(5, 4), nn.Softmax(-1), nn.Linear(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    units = sg.find_units(Net(), torch.randn(3, 5))
    assert units.skipped[0].name == "model.0"
    assert units.skipped[0].reason == "model.1 (Softmax): is normalised over (softmax)"


# ---- batch size ------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("norm", [False, True])
def test_an_example_of_any_size_serves_batches_of_any_size(samples: int, norm: bool) -> None:
    layers = [nn.Conv2d(2, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.GELU(), nn.Flatten(),
              nn.Linear(16, 3)]  # fmt: skip
    model = lively(nn.Sequential(*layers))
    units = sg.find_units(model, batch_of(samples, 2, 4, 4))
    assert [unit.name for unit in units] == ["0"]
    for n in (1, 2, 7):
        score_all(model, units, batch_of(n, 2, 4, 4), lambda m, x: m(x))


def test_the_size_of_the_example_does_not_change_the_scores() -> None:
    model, batch = lively(Two()), batch_of(7)
    scores = [
        score_all(model, sg.find_units(model, batch_of(n)), batch, lambda m, x: m(x))[
            "first"
        ].values
        for n in (1, 4)
    ]
    assert torch.equal(*scores)


def test_a_leading_one_that_is_broadcast_is_left_alone() -> None:
    class Masked(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask)

    model = lively(Masked())
    units = sg.find_units(model, (batch_of(4), batch_of(1)))
    score_all(model, units, (batch_of(7), batch_of(1)), lambda m, b: m(*b))


def test_one_sample_with_a_leading_one_beside_it() -> None:
    class Masked(Two):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask)

    model = lively(Masked())
    units = sg.find_units(model, (batch_of(1), batch_of(1)))
    score_all(model, units, (batch_of(7), batch_of(7)), lambda m, b: m(*b))


class FixedBatch(Two):
    """A reshape to a number fixes the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(3, 5))


def test_a_fixed_batch_size_works_for_batches_of_that_size() -> None:
    model = lively(FixedBatch())
    units = sg.find_units(model, batch_of(3))
    score_all(model, units, batch_of(3), lambda m, x: m(x))
    with pytest.raises(sg.InputError, match=r"input of shape \(7, 5\).*captured for \(3, 5\)"):
        sg.score(model, lambda m, x: m(x).mean(), [batch_of(7)], units=units)


def test_a_fixed_batch_of_one() -> None:
    class Single(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(1, 5))

    model = lively(Single())
    units = sg.find_units(model, batch_of(1))
    score_all(model, units, batch_of(1), lambda m, x: m(x))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.randn(3, 4, 5, dtype=torch.float64), r"captured for \(any, 5\)"),
        (torch.randn(3, 6, dtype=torch.float64), r"input of shape \(3, 6\)"),
        (torch.randn(3, 5), "input of torch.float32, but example_inputs had torch.float64"),
    ],
)
def test_a_batch_of_another_kind_is_an_error(batch: Tensor, message: str) -> None:
    model = lively(Two())
    units = sg.find_units(model, batch_of(3))
    with pytest.raises(sg.InputError, match=message):
        sg.score(model, lambda m, x: m(x).mean(), [batch], units=units)


# ---- arguments -------------------------------------------------------------------------------


class Called(Two):
    """Takes whatever a test passes, and what it needs from that."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(self.read(*args, **kwargs))


EXAMPLES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Any]]] = {
    "a tensor": (lambda x: x, lambda x: x),
    "a tuple": (lambda x: x, lambda x: (x,)),
    "a list": (lambda x: x, lambda x: [x]),
    "a dict": (lambda x: x, lambda x: {"x": x}),
    "two tensors": (lambda x, y: x * y, lambda x: (x, x + 1)),
    "two keywords": (lambda x, y: x - y, lambda x: {"y": x + 1, "x": x}),
    "a nested dict": (
        lambda inputs: inputs["a"]["b"][0] * inputs["c"],
        lambda x: ({"a": {"b": [x]}, "c": x + 1},),
    ),
    "a list of tensors": (lambda xs: xs[0] + xs[1][0], lambda x: ([x, (x + 1,)],)),
    "none": (lambda x, mask=None: x if mask is None else x * mask, lambda x: (x, None)),
    "numbers": (lambda x, a, flag, name: x * a if flag else x, lambda x: (x, 2.5, True, "cosine")),
    "numbers by name": (lambda x, a, flag: x * a, lambda x: {"x": x, "a": 2, "flag": False}),
    "integers": (lambda x, i: x + i[:, None], lambda x: (x, torch.arange(len(x)))),
    "a scalar tensor": (lambda x, t: x * t, lambda x: (x, torch.tensor(2.0))),
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_example_inputs(kind: str) -> None:
    read, make = EXAMPLES[kind]
    model = lively(Called(read))
    units = sg.find_units(model, make(batch_of(1)))
    assert [unit.name for unit in units] == ["first"]
    call = Call.from_example(make(batch_of(7)))
    score_all(model, units, call, lambda m, c: m(*c.args, **c.kwargs))


class Optional(Two):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, shift: float = 0.0
    ) -> Tensor:
        x = x * scale + shift
        return super().forward(x if mask is None else x * mask)


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "positional": lambda m, x: m(x),
    "by name": lambda m, x: m(x=x),
    "default by position": lambda m, x: m(x, None),
    "default by name": lambda m, x: m(x, scale=1.0),
    "all by name": lambda m, x: m(shift=0.0, scale=1.0, mask=None, x=x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("example", ["tuple", "dict"])
def test_the_same_call_may_be_written_in_other_ways(way: str, example: str) -> None:
    model, x = lively(Optional()), batch_of(3)
    units = sg.find_units(model, (x,) if example == "tuple" else {"x": x})
    score_all(model, units, batch_of(7), WAYS[way])


def test_arguments_in_another_order_reach_their_own_places() -> None:
    class Difference(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x - 2 * y)

    model = lively(Difference())
    x, y = batch_of(3), batch_of(3)
    units = sg.find_units(model, {"y": y, "x": x})
    seen = []

    def loss_fn(callee: Callable[..., Tensor], batch: Any) -> Tensor:
        seen.append(callee(x, y=y))
        return seen[-1].square().mean()

    sg.score(model, loss_fn, [0], units=units)
    torch.testing.assert_close(seen[0], model(x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x, x),
        lambda m, x: m(x, scale=2.0),
        lambda m, x: m(x, None, 1.0, shift=1.0),
    ],
)
def test_another_call_than_the_examples_is_an_error(call: Callable[..., Tensor]) -> None:
    model = lively(Optional())
    units = sg.find_units(model, batch_of(3))
    with pytest.raises(sg.InputError, match=r"other arguments than example_inputs had") as info:
        sg.score(model, lambda m, x: call(m, x).mean(), [batch_of(7)], units=units)
    message = str(info.value)
    assert "example_inputs: x=tensor(3, 5), mask=None, scale=1.0, shift=0.0" in message
    assert "Give find_units an example as loss_fn calls it" in message


def test_arrays_as_arguments_are_not_compared_by_truth() -> None:
    model = lively(Called(lambda x, a: x * float(a.sum())))
    array = np.ones(3)
    units = sg.find_units(model, (batch_of(3), array))
    score_all(model, units, batch_of(7), lambda m, x: m(x, array))
    with pytest.raises(sg.InputError, match="other arguments"):
        sg.score(model, lambda m, x: m(x, np.ones(3)).mean(), [batch_of(7)], units=units)


def test_variable_arguments() -> None:
    class Many(Two):
        def forward(self, *xs: Tensor, **more: Tensor) -> Tensor:
            return super().forward(sum(xs) + sum(more.values()))

    model = lively(Many())
    units = sg.find_units(model, (batch_of(3), batch_of(3)))
    score_all(model, units, (batch_of(7), batch_of(7)), lambda m, b: m(*b))


@pytest.mark.parametrize("example", [None, 3, "x", lambda x: x])
def test_example_inputs_of_another_type_are_an_error(example: Any) -> None:
    with pytest.raises(sg.InputError, match="example_inputs: expected a tuple"):
        sg.find_units(Two(), example)


def test_a_dict_without_names_is_an_error() -> None:
    with pytest.raises(sg.InputError, match=r"names of arguments, got 0.*put it into a tuple"):
        sg.find_units(Two(), {0: torch.randn(3, 5)})


def test_a_function_is_not_a_model() -> None:
    with pytest.raises(sg.InputError, match=r"model: expected a torch.nn.Module, got function"):
        sg.find_units(lambda x: x, torch.randn(3, 5))  # type: ignore[arg-type]


def test_score_finds_the_units_of_the_call_that_loss_fn_makes() -> None:
    model = lively(Optional())
    for call in (WAYS["positional"], WAYS["by name"], WAYS["default by name"]):
        scores = sg.score(model, lambda m, x, call=call: call(m, x).square().mean(), [batch_of(4)])
        assert list(scores) == ["first"]


# ---- outputs ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    logits: Tensor
    hidden: Tensor | None = None
    count: int = 3
    temperature: float = 0.5
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    logits: Tensor
    inner: Plain


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor
    more: tuple[Tensor, None, int]


@dataclasses.dataclass
class HubOutput(OrderedDict):  # type: ignore[type-arg]
    """As model hubs write them: a dataclass that is a dict of those of its fields that are set."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    extra: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if value is not None:
                super().__setitem__(each.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, each.name) for each in dataclasses.fields(self))


class AttributeDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda o: o),
    "tuple": (lambda y: (y, y * 2), lambda o: o[0] + o[1]),
    "nested tuples": (lambda y: (y, (None, (y * 2, 3)), "x"), lambda o: o[0] + o[1][1][0]),
    "list": (lambda y: [y, [y * 2]], lambda o: o[0] + o[1][0]),
    "dict": (lambda y: {"b": y, "a": {"c": y * 2}, "n": None}, lambda o: o["b"] + o["a"]["c"]),
    "ordered dict": (lambda y: OrderedDict(b=y, a=y * 2), lambda o: o["b"] + o["a"]),
    "default dict": (lambda y: collections.defaultdict(list, a=y), lambda o: o["a"]),
    "attribute dict": (lambda y: AttributeDict(logits=y), lambda o: o.logits),
    "dataclass": (lambda y: Plain(y, y * 2), lambda o: o.logits + o.hidden * o.temperature),
    "frozen dataclass": (lambda y: Frozen(y, Plain(y * 2)), lambda o: o.logits + o.inner.logits),
    "slotted dataclass": (lambda y: Slotted(y), lambda o: o.logits),
    "named tuple": (lambda y: Named(y, (y * 2, None, 4)), lambda o: o.logits + o.more[0]),
    "hub output": (
        lambda y: HubOutput(logits=y, extra=(y * 2,)),
        lambda o: o.logits + o["extra"][0] + o.extra[0],
    ),
    "with the input": (lambda y: {"y": y, "again": y}, lambda o: o["y"] + o["again"]),
    "batch size": (lambda y: {"y": y, "n": y.shape[0]}, lambda o: o["y"] * o["n"]),
}


class Returning(Two):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(super().forward(x))


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_are_as_loss_fn_expects_them(kind: str) -> None:
    wrap, read = OUTPUTS[kind]
    model = lively(Returning(wrap))
    units = sg.find_units(model, batch_of(3))
    batch, seen = batch_of(7), []

    def loss_fn(callee: Callable[..., Any], x: Tensor) -> Tensor:
        seen.append(callee(x))
        return (read(seen[-1]) - 1).square().mean()

    scores = sg.score(model, loss_fn, [batch], units=units)
    check_unit(model, scores, "first", loss_fn, [batch])
    expected = model(batch)
    assert type(seen[0]) is type(expected)
    _assert_same(seen[0], expected)


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same(found[key], expected[key])
    elif dataclasses.is_dataclass(expected):
        for each in dataclasses.fields(expected):
            _assert_same(getattr(found, each.name), getattr(expected, each.name))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            _assert_same(a, b)
    else:
        assert found == expected


def test_the_batch_size_in_an_output_is_that_of_the_batch() -> None:
    model = lively(Returning(lambda y: {"y": y, "n": y.shape[0], "half": y.shape[0] / 2}))
    units = sg.find_units(model, batch_of(3))
    seen = []

    def loss_fn(callee: Callable[..., Any], x: Tensor) -> Tensor:
        seen.append(callee(x))
        return seen[-1]["y"].mean()

    sg.score(model, loss_fn, [batch_of(7)], units=units)
    assert (int(seen[0]["n"]), float(seen[0]["half"])) == (7, 3.5)


def test_outputs_are_not_the_traced_ones() -> None:
    """Two calls give two containers; what a loss does to one does not reach the other."""
    model = lively(Returning(lambda y: {"y": y, "list": []}))
    units = sg.find_units(model, batch_of(3))

    def loss_fn(callee: Callable[..., Any], x: Tensor) -> Tensor:
        output = callee(x)
        assert output["list"] == []
        output["list"].append(1)
        return output.pop("y").square().mean()

    sg.score(model, loss_fn, [batch_of(3), batch_of(4)], units=units)


# ---- dtypes, modes, state --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model, x = Two().to(dtype), torch.randn(6, 5, dtype=dtype)
    units = sg.find_units(model, x)
    scores = sg.score(model, lambda m, b: m(b).square().mean(), [x], units=units)
    assert scores["first"].values.dtype == dtype


def test_casts_on_the_way() -> None:
    class Cast(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.to(torch.float64)).tanh().to(torch.float64))

    check_model(Cast(), batch_of(3), {"first": 4}, {"second": "output"})


def test_integer_inputs_are_cast() -> None:
    class Cast(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.first.weight.dtype))

    check_model(Cast(), torch.randint(5, (3, 5)), {"first": 4}, {"second": "output"})


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.gelu = nn.SiLU(inplace=True)
        self.drop = nn.Dropout(0.3, inplace=True)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.gelu(self.norm(self.conv(x))))
        h += self.block(h)
        h.mul_(0.5).add_(1)
        h = F.elu_(h)
        return self.head(h.mean((2, 3)))


def test_operations_in_place() -> None:
    check_model(InPlace(), torch.randn(3, 2, 4, 4), {"conv": 4}, {"head": "output"})


def test_an_input_that_is_changed_in_place() -> None:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    model, x = lively(Net()), batch_of(3)
    before = x.clone()
    units = sg.find_units(model, x.clone())
    scores = sg.score(model, lambda m, b: m(b.clone()).square().mean(), [x], units=units)
    assert list(scores) == ["first"]
    assert torch.equal(x, before)


def test_a_buffer_that_forward_changes_is_left_alone() -> None:
    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("average", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
            return super().forward(x - self.average)

    model = lively(Counting())
    before = copy.deepcopy(model.state_dict())
    units = sg.find_units(model, batch_of(3))
    sg.score(model, lambda m, b: m(b).square().mean(), [batch_of(7)], units=units)
    assert [unit.name for unit in units] == ["first"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_detached_and_frozen_parts() -> None:
    class Net(Two):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.backbone(x).tanh()
            return super().forward(h)

    found = check_model(Net(), batch_of(3), None, None)
    assert {unit.name for unit in found} == {"backbone", "first"}


@pytest.mark.parametrize("mode", [True, False])
def test_modes_gradients_and_random_state_are_left_alone(mode: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(16, 3),
    ).double().train(mode)  # fmt: skip
    model[1].eval()
    model(batch_of(3, 2, 4, 4)).mean().backward()
    before = copy.deepcopy(model)
    training = [module.training for module in model.modules()]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    units = sg.find_units(model, batch_of(3, 2, 4, 4))
    torch.set_rng_state(state)
    sg.score(model, lambda m, b: m(b).mean(), [batch_of(4, 2, 4, 4)], units=units)
    assert [module.training for module in model.modules()] == training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name])
        assert parameter.requires_grad
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_finding_units_draws_no_random_numbers() -> None:
    model, x = InPlace(), torch.randn(3, 2, 4, 4)
    state = torch.get_rng_state()
    sg.find_units(model, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_take_part_and_stay() -> None:
    model = lively(Two())
    calls = []
    model.first.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.register_forward_hook(lambda module, args, out: calls.append(1))
    units = sg.find_units(model, batch_of(3))
    score_all(model, units, batch_of(7), lambda m, x: m(x))
    assert calls
    assert len(model._forward_hooks) == 1
    assert len(model.first._forward_hooks) == 1


def test_a_hook_with_keywords_sees_the_call_as_it_was_given() -> None:
    model = lively(Two())

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {"x": kwargs["x"] * 2}

    model.register_forward_pre_hook(hook, with_kwargs=True)
    units = sg.find_units(model, {"x": batch_of(3)})
    score_all(model, units, batch_of(7), lambda m, x: m(x=x))


def test_torch_compile_is_no_obstacle_to_the_module_within() -> None:
    model = lively(Two())
    compiled = torch.compile(model, backend="eager")
    units = sg.find_units(compiled._orig_mod, batch_of(3))
    assert [unit.name for unit in units] == ["first"]


@pytest.mark.cuda
def test_on_cuda() -> None:
    model = Two().double().cuda()
    units = sg.find_units(model, batch_of(3).cuda())
    score_all(model, units, batch_of(7).cuda(), lambda m, x: m(x))


# ---- what cannot be captured -----------------------------------------------------------------


class Branching(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that is named
            x = x * 2
        return super().forward(x)


class Looping(Two):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0].abs().item())):  # the line that is named
            x = x * 2
        return super().forward(x)


class ThroughNumpy(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.as_tensor(np.sin(x.numpy())))  # the line that is named


def _line(kind: type) -> int:
    """The line of this file that a class marks."""
    import inspect

    lines, start = inspect.getsourcelines(kind)
    return start + next(i for i, line in enumerate(lines) if "the line that is named" in line)


@pytest.mark.parametrize("kind", [Branching, Looping])
def test_a_model_that_cannot_be_traced_is_an_error_that_names_the_line(kind: type) -> None:
    with pytest.raises(sg.CaptureError) as info:
        sg.find_units(kind(), torch.randn(3, 5))
    message = str(info.value)
    assert "The model runs, but torch.export cannot capture it" in message
    assert f'"{__file__}", line {_line(kind)}, in forward' in message
    assert "torch.where" in message


def test_numpy_in_forward_is_an_error_that_names_the_line() -> None:
    with pytest.raises(sg.CaptureError) as info:
        sg.find_units(ThroughNumpy(), torch.randn(3, 5))
    assert f'"{__file__}", line {_line(ThroughNumpy)}, in forward' in str(info.value)


def named_as_a_keyword(*between: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("global", nn.Linear(5, 4))
    for i, module in enumerate(between):
        model.add_module(f"between{i}", module)
    model.add_module("head", nn.Linear(4, 3))
    return model


def test_a_submodule_may_be_named_as_a_keyword() -> None:
    (unit,) = sg.find_units(named_as_a_keyword(nn.Tanh()), torch.randn(3, 5))
    assert unit.name == "global"


def test_where_it_may_not_the_error_says_so() -> None:
    model = named_as_a_keyword(nn.Dropout())  # which makes torch.export write Python code
    with pytest.raises(sg.CaptureError, match=r"the name of global is a word of Python's own"):
        sg.find_units(model, torch.randn(3, 5))


class WrongShape(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)  # the line that is named


def test_an_example_that_does_not_run_is_an_error_that_says_so() -> None:
    with pytest.raises(sg.CaptureError) as info:
        sg.find_units(WrongShape(), torch.randn(3, 5))
    message = str(info.value)
    assert "The model does not run on example_inputs (tensor(3, 5))" in message
    assert f'"{__file__}", line {_line(WrongShape)}, in forward' in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message


@pytest.mark.parametrize("example", [(), {"y": torch.randn(3, 5)}, (torch.randn(3, 5),) * 2])
def test_an_example_with_the_wrong_arguments_is_an_error(example: Any) -> None:
    with pytest.raises(sg.CaptureError, match="does not run on example_inputs"):
        sg.find_units(Two(), example)


def test_a_size_that_depends_on_the_data_is_an_error() -> None:
    class Net(Two):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[x[:, 0] > 0])  # the line that is named

    with pytest.raises(sg.CaptureError) as info:
        sg.find_units(Net(), torch.randn(3, 5))
    assert "depends on the data (aten.index.Tensor" in str(info.value)
    assert "torch.where in place of a boolean mask" in str(info.value)


def test_errors_leave_the_model_as_it_was() -> None:
    model = Branching().train()
    model.second.eval()
    with pytest.raises(sg.CaptureError):
        sg.find_units(model, torch.randn(3, 5))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_model_without_neurons() -> None:
    units = sg.find_units(nn.Identity(), torch.randn(3, 5))
    assert len(units) == 0
    assert units.skipped == ()
    assert "0 units" in str(units)


# ---- activations that export takes apart -----------------------------------------------------


@pytest.mark.parametrize(
    ("function", "operations"),
    [
        (nn.Hardshrink(0.3), {"hardshrink"}),
        (nn.Softshrink(0.3), {"softshrink"}),
        (nn.Softsign(), {"sign", "mul", "add", "div"}),
        (lambda x: F.lp_pool1d(x.exp()[:, None], 3.0, 1)[:, 0],
         {"exp", "unsqueeze", "pow", "avg_pool1d", "alias", "mul", "select", "slice"}),
        (lambda x: torch.where(x.abs() > 0.3, x, 0.0), {"abs", "gt", "where"}),
        (lambda x: x / (2 + x.abs()), {"abs", "add", "div"}),
        (lambda x: x.sign() * (x + 1).abs().relu(), {"sign", "add", "abs", "relu", "mul"}),
    ],
)  # fmt: skip
def test_activations_are_put_together_again(
    function: Callable[[Tensor], Tensor], operations: set[str]
) -> None:
    model = lively(Returning(function))
    graph = capture(model, Call((batch_of(3),), {}))
    names = {n.target._schema.name.removeprefix("aten::") for n in graph.nodes
             if hasattr(n.target, "_schema")}  # fmt: skip
    assert names - {"linear", "tanh", "sym_size", "scalar_tensor", "full_like"} <= operations
    loss_fn, batches = regression(model, batch := batch_of(3))
    seen = []

    def recording(callee: Callable[..., Tensor], x: Tensor) -> Tensor:
        seen.append(callee(x))
        return loss_fn(callee, x)

    sg.score(model, recording, batches, units=sg.find_units(model, batch))
    torch.testing.assert_close(seen[0], model(batch), rtol=0, atol=1e-15)


def test_double_makes_every_tensor_double() -> None:
    assert double({"a": [torch.zeros(2), 1, torch.zeros(2, dtype=torch.int64)]})["a"][0].dtype == (
        torch.float64
    )
