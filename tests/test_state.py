"""Looking at a model leaves no trace, and looking twice shows the same."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import splitgrow as sg
from helpers_split import ConvNet, Problem, Snapshot, mse, problem, random_state
from splitgrow import stream
from splitgrow.plan import Entry, SplitPlan
from splitgrow.state import Undo, eval_mode, seeded
from splitgrow.view import mean_loss, passes


class Busy(nn.Module):
    """A model with dropout, noise, a frozen batch norm, and a counter that eval mode moves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.history: list[int] = [1]
        self.last: Tensor | None = None

    def train(self, mode: bool = True) -> Busy:
        super().train(mode)
        self.net.norm1.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.net(self.dropout(x))
        return self.last


@cache
def _template() -> tuple[Problem, sg.Scores]:
    torch.manual_seed(0)
    p = problem(ConvNet(), (6, 2, 5, 5))
    return p, p.scores()


@pytest.fixture
def busy() -> Problem:
    """In the middle of a training step: gradients, hooks, modes of all kinds."""
    template, _ = _template()
    model = Busy().double()
    model.train()
    model.net.depthwise.requires_grad_(False)
    mse(model, template.batches[0]).backward()
    model.register_forward_hook(lambda *args: None)
    model.net.conv1.register_forward_pre_hook(lambda *args: None)
    model.net.head.register_full_backward_hook(lambda *args: None)
    model.net.conv1.weight.register_hook(lambda grad: grad)
    assert not model.net.norm1.training
    assert model.net.norm2.training
    return Problem(model, template.batches, template.units)


def do_find(p: Problem) -> Any:
    return sg.find_units(p.model, p.example)


def do_score(p: Problem) -> Any:
    return sg.score(p.model, mse, p.batches)


def do_refuse(p: Problem) -> Any:
    units = sg.find_units(p.model, p.example)
    size = units[0].size
    direction = torch.zeros(size, dtype=torch.float64)
    direction[-1] = 1
    plan = SplitPlan([Entry(units[0].name, 0, -1.0, direction, 1e-12)], units)
    with pytest.raises(sg.SplitRefused):  # so short a neuron that no step tells
        sg.split(p.model, plan, loss_fn=mse, batches=p.batches)


LOOKS = [do_find, do_score, do_refuse]
every_look = pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)


# --- no trace -----------------------------------------------------------------------------


@every_look
def test_everything_is_left_as_found(busy: Problem, look: Callable[[Problem], Any]) -> None:
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # noqa: NPY002  (legacy is meant)
    snapshot = Snapshot(busy.model)
    look(busy)
    snapshot.assert_same()
    assert busy.model.calls.item() == 1  # of the training step itself


@every_look
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_plain_modes(look: Callable[[Problem], Any], mode: str) -> None:
    template, _ = _template()
    p = Problem(copy.deepcopy(template.model), template.batches, template.units)
    getattr(p.model, mode)()
    snapshot = Snapshot(p.model)
    look(p)
    snapshot.assert_same()


@every_look
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_inside_a_grad_mode(look: Callable[[Problem], Any], context: Any, busy: Problem) -> None:
    snapshot = Snapshot(busy.model)
    with context():
        enabled = torch.is_grad_enabled()
        look(busy)
        assert torch.is_grad_enabled() == enabled
    snapshot.assert_same()


def test_scores_are_the_same_inside_no_grad() -> None:
    p, scores = _template()
    with torch.no_grad():
        again = p.scores()
    assert_equal(scores, again)


@pytest.mark.parametrize("verb", ["score", "split"])
def test_a_failing_loss_leaves_no_trace(busy: Problem, verb: str) -> None:
    def failing(model: Any, batch: Any) -> Tensor:
        model(batch[0])
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        raise RuntimeError("boom")

    units = sg.find_units(busy.model, busy.example)
    plan = sg.select(sg.score(busy.model, mse, busy.batches, units=units), count=1)
    snapshot = Snapshot(busy.model)
    try:
        if verb == "score":
            sg.score(busy.model, failing, busy.batches, units=units)
        else:
            sg.split(busy.model, plan, loss_fn=failing, batches=busy.batches)
    except RuntimeError as error:
        kept = error  # the traceback holds every frame while we look
        snapshot.assert_same()
        assert str(kept) == "boom"
    else:
        pytest.fail("did not raise")


def test_a_split_leaves_modes_and_random_numbers(busy: Problem) -> None:
    units = sg.find_units(busy.model, busy.example)
    plan = sg.select(sg.score(busy.model, mse, busy.batches, units=units), count=2)
    modes, numbers = [m.training for m in busy.model.modules()], random_state()
    calls = busy.model.calls.item()
    sg.split(busy.model, plan, loss_fn=mse, batches=busy.batches)
    assert [m.training for m in busy.model.modules()] == modes
    assert random_state() == numbers
    assert busy.model.calls.item() == calls


def test_the_seed_of_a_cuda_to_come_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed queues a seed for CUDA, which would outlast the fixed random state."""
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seen.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with seeded():
        torch.rand(1)
    assert seen == []


# --- twice the same -----------------------------------------------------------------------


def assert_equal(first: sg.Scores, second: sg.Scores) -> None:
    assert list(first) == list(second)
    assert (first.loss, first.samples) == (second.loss, second.samples)
    for name, found in first.items():
        for field in ("values", "vectors", "residuals", "scales"):
            assert torch.equal(getattr(found, field), getattr(second[name], field)), (name, field)


def dataset() -> TensorDataset:
    torch.manual_seed(3)
    return TensorDataset(torch.randn(10, 2, 5, 5).double(), torch.randn(10, 3).double())


def loaders() -> dict[str, Callable[[], Any]]:
    data = dataset()
    own = torch.Generator().manual_seed(5)
    sampler = RandomSampler(data, replacement=True, generator=torch.Generator().manual_seed(6))
    return {
        "list": lambda: list(DataLoader(data, batch_size=4)),
        "plain": lambda: DataLoader(data, batch_size=4),
        "shuffled": lambda: DataLoader(data, batch_size=4, shuffle=True, drop_last=True),
        "own_generator": lambda: DataLoader(
            data, batch_size=4, shuffle=True, generator=own, drop_last=True
        ),
        "own_sampler": lambda: DataLoader(data, batch_size=4, sampler=sampler),
    }


@pytest.mark.parametrize("kind", loaders())
def test_two_calls_of_score_give_the_same_bits(kind: str) -> None:
    p, _ = _template()
    loader = loaders()[kind]()
    first = sg.score(p.model, mse, loader, units=p.units)
    torch.rand(17), list(loader)  # how far the caller's generators are does not matter
    owners = (loader, getattr(loader, "sampler", None))
    generators = [g for g in (getattr(o, "generator", None) for o in owners) if g is not None]
    states = [g.get_state() for g in generators]
    second = sg.score(p.model, mse, loader, units=p.units)
    assert_equal(first, second)
    assert all(torch.equal(g.get_state(), s) for g, s in zip(generators, states, strict=True))
    assert bool(generators) == kind.startswith("own")
    assert first.samples == (8 if kind in ("shuffled", "own_generator") else 10)


def test_a_shuffling_loader_gives_the_same_batches_on_every_pass_and_others_later() -> None:
    for kind in ("shuffled", "own_generator", "own_sampler"):
        loader = loaders()[kind]()
        first, second = (torch.cat([x for x, _ in passes(loader)]) for _ in range(2))
        assert torch.equal(first, second)
        users = [torch.cat([x for x, _ in loader]) for _ in range(2)]
        assert not torch.equal(users[0], users[1])  # the user's own order is as random as ever


def test_dropout_and_noise_are_fixed() -> None:
    """The model runs in eval mode; what loss_fn draws itself is the same every time."""
    p, _ = _template()

    def noisy(model: Any, batch: Any) -> Tensor:
        x, y = batch
        return mse(model, (x + 0.1 * torch.randn_like(x) * random.random(), y))

    first = sg.score(p.model, noisy, p.batches, units=p.units)
    torch.rand(5), random.random()
    assert_equal(first, sg.score(p.model, noisy, p.batches, units=p.units))
    assert mean_loss(p.model, noisy, p.batches) == mean_loss(p.model, noisy, p.batches)


def test_memory_limit_and_repeated_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring unit by unit reads the batches again, and must find the same ones."""
    monkeypatch.setattr(stream, "pays", lambda *_, **__: False)
    p, _ = _template()
    loader = loaders()["shuffled"]()
    once = sg.score(p.model, mse, loader, units=p.units)
    again = sg.score(p.model, mse, loader, units=p.units, memory=1)
    for name, found in once.items():
        torch.testing.assert_close(again[name].values, found.values, rtol=1e-12, atol=0)


# --- the tools ----------------------------------------------------------------------------


class Merging(nn.Sequential):
    """Does more than set a flag in train(), as layers do that merge their weights for eval."""

    def train(self, mode: bool = True) -> Merging:
        with torch.no_grad():
            self[0].weight.mul_(1 if mode else 2)
        return super().train(mode)


def test_eval_mode_sets_modules_one_by_one() -> None:
    model = Merging(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1))
    model[2].training = False
    weight = model[0].weight.detach().clone()
    modes = [m.training for m in model.modules()]
    with contextlib.suppress(ValueError), eval_mode(model):
        assert not any(m.training for m in model.modules())
        raise ValueError
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[0].weight, weight)  # the model's own train() was not called


def test_find_units_and_score_do_not_call_the_models_own_train() -> None:
    model = Merging(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    snapshot = Snapshot(model)
    sg.score(model, mse, data)
    snapshot.assert_same()


def test_eval_mode_keeps_buffers() -> None:
    model = Busy()
    mean, count, history = model.net.norm1.running_mean, model.calls, model.history
    version = mean._version
    with eval_mode(model):
        model.history = list(model.history)  # as torch.export does
        model.cache = torch.ones(1)
        model.calls += 5
        model.calls = torch.ones(3)
        model.net.norm2.running_var.data = torch.zeros(2)
        model.nothing = torch.ones(1)
    assert model.history is history
    assert not hasattr(model, "cache")
    assert model.calls is count
    assert count.item() == 0
    assert model.nothing is None
    assert torch.equal(model.net.norm2.running_var, torch.ones(5))
    assert model.net.norm1.running_mean is mean
    assert mean._version == version  # a graph that saved it is still valid


def test_seeded_restores_after_an_error() -> None:
    generator = torch.Generator().manual_seed(4)
    before, own = random_state(), generator.get_state()
    with contextlib.suppress(KeyboardInterrupt), seeded(generators=[generator]):
        first = (torch.rand(1), random.random(), np.random.rand())  # noqa: NPY002
        drawn = torch.rand(1, generator=generator)
        raise KeyboardInterrupt
    assert random_state() == before
    assert torch.equal(generator.get_state(), own)
    with seeded(generators=[generator]):
        assert first == (torch.rand(1), random.random(), np.random.rand())  # noqa: NPY002
        assert drawn == torch.rand(1, generator=generator)


def test_undo_restores_attributes_that_were_inherited_or_computed() -> None:
    class Layer(nn.Module):
        size = 3

        @property
        def width(self) -> int:
            return self.__dict__.get("_width", 7)

        @width.setter
        def width(self, value: int) -> None:
            self.__dict__["_width"] = value

    layer = Layer()
    before = dict(vars(layer))
    with contextlib.suppress(ValueError), Undo() as undo:
        undo.set_attribute(layer, "size", 4)
        undo.set_attribute(layer, "width", 8)
        assert (layer.size, layer.width) == (4, 8)
        raise ValueError
    assert (layer.size, layer.width) == (3, 7)
    assert vars(layer) == before
    with Undo() as undo:
        undo.set_attribute(layer, "size", 4)
    assert layer.size == 4


@pytest.mark.cuda
def test_cuda_random_state_is_left_alone() -> None:
    p, _ = _template()
    model = copy.deepcopy(p.model).cuda()
    batches = [(x.cuda(), y.cuda()) for x, y in p.batches]
    torch.cuda.manual_seed_all(11)

    def noisy(net: Any, batch: Any) -> Tensor:
        return mse(net, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    snapshot = Snapshot(model)
    first = sg.score(model, noisy, batches)
    snapshot.assert_same()
    torch.rand(3, device="cuda")
    assert_equal(first, sg.score(model, noisy, batches))
