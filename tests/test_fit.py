"""fit trains, the same way every time, and leaves everything but the model as it was."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import splitgrow as sg
from helpers_split import random_state
from splitgrow.fit import Fit, Trainer, fit
from splitgrow.fit_loop import to_device
from splitgrow.fit_optimizer import Cosine, Step
from splitgrow.patience import Patience
from splitgrow.phase import Phase

Batch = tuple[Tensor, Tensor]


def mse(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def data(batches: int = 6, size: int = 16) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(batches * size, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    return list(zip(x.split(size), y.split(size), strict=True))


def net(width: int = 12, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1)
    )  # fmt: skip


def loss_of(model: nn.Module, batches: list[Batch]) -> float:
    with torch.no_grad():
        return sum(mse(model, batch).item() for batch in batches) / len(batches)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


class Recorder:
    """A loss that remembers the batches it was given, and perhaps does something on one of them."""

    def __init__(self, at: int = -1, act: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
        self.batches: list[Batch] = []
        self._at, self._act = at, act

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        self.batches.append(batch)
        loss = mse(model, batch)
        return self._act(loss) if len(self.batches) - 1 == self._at else loss


# --- it trains ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "lr": 0.1},
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 1e-5},
        {"optimizer": "adamw", "lr": 0.02},
        {"optimizer": torch.optim.RMSprop, "lr": 0.005},
        {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.02)},
        {"lr": 0.02, "schedule": "cosine"},
        {"lr": 0.02, "schedule": "step"},
        {"lr": 0.02, "schedule": lambda at: 1 - at, "shuffle": True},
    ],
)
def test_training_lowers_the_loss(settings: dict[str, Any]) -> None:
    model, batches = net(), data()
    before = loss_of(model, batches)
    result = fit(model, batches, mse, epochs=60, **settings)
    assert loss_of(model, batches) < 0.35 * before
    assert (result.iterations, result.epochs, result.stopped) == (360, 60, "epochs")
    assert result.loss == pytest.approx(loss_of(model, batches), rel=0.5)
    assert result.seconds > 0


def test_an_optimizer_of_ones_own_is_used() -> None:
    model, batches = net(), data()
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    before = weights(model)
    fit(model, batches, mse, epochs=1, optimizer=optimizer)
    after = weights(model)
    assert torch.equal(before["0.weight"], after["0.weight"])  # not the optimizer's
    assert not torch.equal(before["3.weight"], after["3.weight"])


def test_one_epoch_is_plain_sgd_with_momentum() -> None:
    model, batches = net(), data()
    by_hand = copy.deepcopy(model)
    velocity = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}
    for batch in batches:
        by_hand.zero_grad()
        mse(by_hand, batch).backward()
        for name, p in by_hand.named_parameters():
            assert p.grad is not None
            velocity[name] = 0.8 * velocity[name] + p.grad + 0.1 * p.detach()
            p.data -= 0.05 * velocity[name]
    settings = {"optimizer": "sgd", "lr": 0.05, "momentum": 0.8, "weight_decay": 0.1}
    fit(model, batches, mse, epochs=1, **settings)  # type: ignore[arg-type]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, by_hand.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_the_defaults_of_the_two_optimizers() -> None:
    for name, expected in (
        ("sgd", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0}),
        ("adamw", {"lr": 1e-3, "weight_decay": 0}),
    ):
        phase = Phase()
        fit(net(), data(), mse, epochs=1, optimizer=name, phase=phase)  # type: ignore[arg-type]
        assert phase.optimizer is not None
        assert {key: phase.optimizer.param_groups[0][key] for key in expected} == expected


def test_frozen_parameters_stay() -> None:
    model = net()
    model[0].requires_grad_(False)
    before = weights(model)
    fit(model, data(), mse, epochs=1, optimizer="sgd", weight_decay=0.1)
    assert torch.equal(before["0.weight"], model[0].weight)
    assert not torch.equal(before["3.weight"], model[3].weight)


def test_it_trains_where_the_caller_has_switched_gradients_off() -> None:
    expected, batches = net(), data()
    fit(expected, batches, mse, epochs=2)
    for off in (torch.no_grad, torch.inference_mode):
        model = net()
        with off():
            fit(model, batches, mse, epochs=2)
        assert same(weights(model), weights(expected))


def test_the_loss_is_the_mean_of_the_last_epoch() -> None:
    """With a learning rate of 0 every loss is known."""
    model, batches = net(), data(batches=3)
    losses = [mse(model, batch).item() for batch in batches]
    result = fit(model, batches, mse, epochs=2, lr=0.0)
    assert result.loss == pytest.approx(sum(losses) / 3, rel=1e-6)
    stop = threading.Event()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        if recorder(model, batch).requires_grad and len(recorder.batches) == 5:
            stop.set()
        return mse(model, batch)

    recorder = Recorder()
    result = fit(model, batches, loss_fn, epochs=9, lr=0.0, phase=Phase(stop=stop))
    assert (result.iterations, result.epochs) == (5, 1)
    assert result.loss == pytest.approx(sum(losses) / 3, rel=1e-6)  # the last three iterations


# --- the same seed, the same model --------------------------------------------------------


def dropout_run(seed: int, **settings: Any) -> dict[str, Tensor]:
    torch.rand(random.randrange(50))  # the caller's random state does not matter
    model = net(dropout=0.3)
    fit(model, data(), mse, epochs=3, lr=0.02, seed=seed, **settings)
    return weights(model)


def test_a_seed_decides_everything() -> None:
    assert same(dropout_run(5, shuffle=True), dropout_run(5, shuffle=True))
    assert not same(dropout_run(5, shuffle=True), dropout_run(6, shuffle=True))
    assert not same(dropout_run(5), dropout_run(6))


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "torch's generator"])
def test_a_shuffling_loader_repeats_with_the_seed(own: bool) -> None:
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    generator = torch.Generator() if own else None
    loader = DataLoader(TensorDataset(x, y), 16, shuffle=True, generator=generator)

    def orders(seed: int) -> list[Tensor]:
        torch.rand(3)
        recorder = Recorder()
        fit(net(), loader, recorder, epochs=2, seed=seed)
        return [batch[0] for batch in recorder.batches]

    first, again, other = orders(1), orders(1), orders(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[6])  # another order in the second epoch


def test_the_phase_gives_the_seed() -> None:
    a, b, c = (net(dropout=0.3) for _ in range(3))
    fit(a, data(), mse, epochs=1, phase=Phase(seed=3))
    fit(b, data(), mse, epochs=1, seed=3)
    fit(c, data(), mse, epochs=1)
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(c))


def test_shuffling_a_list_reads_each_batch_once_in_another_order_each_epoch() -> None:
    recorder, batches = Recorder(), data(batches=8)
    fit(net(), batches, recorder, epochs=3, shuffle=True)
    ids = [id(batch[0]) for batch in batches]
    read = [id(batch[0]) for batch in recorder.batches]
    epochs = [read[:8], read[8:16], read[16:]]
    assert all(sorted(epoch) == sorted(ids) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_without_shuffling_a_list_is_read_in_its_order() -> None:
    recorder, batches = Recorder(), data()
    fit(net(), batches, recorder, epochs=2)
    expected = [id(batch[0]) for batch in batches] * 2
    assert [id(batch[0]) for batch in recorder.batches] == expected


def test_the_callers_random_state_is_untouched() -> None:
    model, batches = net(dropout=0.5), data()
    before = random_state()
    fit(model, batches, mse, epochs=1, seed=9, shuffle=True)
    assert random_state() == before


# --- modes, learning rates, gradients -----------------------------------------------------


class Frozen(nn.Module):
    """A model whose own train() keeps its batch norm frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.calls.append(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(x)))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_put_back(training: bool) -> None:
    model = net(dropout=0.5).train(training)
    model[3].train(not training)
    before = modes(model)
    seen: list[bool] = []
    fit(model, data(), lambda m, b: (seen.append(m[2].training), mse(m, b))[1], epochs=1)
    assert modes(model) == before
    assert all(seen)  # dropout was on


def test_a_part_in_eval_mode_by_hand_stays_so_in_training() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    model[1].eval()
    fit(model, data(), mse, epochs=1)
    assert model[1].num_batches_tracked == 0


def test_batch_norm_learns_its_statistics_in_a_model_that_was_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    fit(model, data(), mse, epochs=2)
    assert model[1].num_batches_tracked == 12
    assert not model[1].training


def test_a_models_own_train_is_called() -> None:
    model = Frozen()
    model.eval()
    model.calls.clear()
    fit(model, data(), mse, epochs=1)
    assert model.calls == [True, False]
    assert model.norm.num_batches_tracked == 0


@pytest.mark.parametrize("failing", [False, True])
def test_modes_rates_and_gradients_after_success_and_failure(failing: bool) -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.3
    )
    recorder = Recorder(9, lambda loss: loss * math.nan) if failing else mse
    try:
        fit(model, data(), recorder, epochs=3, optimizer=optimizer, schedule="cosine")
    except sg.LossError:
        assert failing
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert not any(modes(model))
    assert all(p.grad is None for p in model.parameters())


# --- schedules ----------------------------------------------------------------------------


def rates(schedule: Any, batches: Any, epochs: int = 4) -> list[float]:
    """The learning rate that each step was taken with, for a rate of 2."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    zero = lambda model, batch: 0 * mse(model, batch)  # noqa: E731
    fit(model, batches, zero, epochs=epochs, optimizer=optimizer, schedule=schedule)
    return seen


def test_the_schedules() -> None:
    batches = data(batches=2)
    cosine = [1 + math.cos(math.pi * i / 8) for i in range(8)]
    assert rates("constant", batches) == [2.0] * 8
    assert rates("cosine", batches) == pytest.approx(cosine)
    assert rates("step", batches) == pytest.approx([2, 2, 2, 2, 0.2, 0.2, 0.02, 0.02])
    assert rates(Step((0.25,), 0.5), batches) == pytest.approx([2] * 2 + [1] * 6)
    assert rates(Cosine(final=0.5), batches) == pytest.approx([1 + c / 2 for c in cosine])
    assert rates(lambda at: 1 - at, batches) == pytest.approx([2 - i / 4 for i in range(8)])


class Stream(IterableDataset[Batch]):
    """Batches without a length."""

    def __iter__(self) -> Iterator[Batch]:
        return iter(data(batches=2))


def test_without_a_length_the_schedule_moves_once_per_epoch() -> None:
    loader = DataLoader(Stream(), batch_size=None)
    assert rates(lambda at: 1 - at, loader) == pytest.approx([2, 2, 1.5, 1.5, 1, 1, 0.5, 0.5])


def test_a_learning_rate_kept_as_a_tensor_is_scheduled_too() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(optimizer.param_groups[0]["lr"])))
    fit(model, data(2), mse, epochs=2, optimizer=optimizer, schedule=lambda at: 1 - at)
    assert seen == [0.5, 0.375, 0.25, 0.125]
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.5)


# --- patience -----------------------------------------------------------------------------


class Script(nn.Module):
    """A model whose losses are written down beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))


def scripted(losses: list[float], patience: Patience, batches: int = 1) -> Fit:
    remaining = iter(losses)

    def loss_fn(model: Script, batch: Any) -> Tensor:
        return next(remaining) + 0 * model.zero

    epochs = len(losses) // batches
    return fit(Script(), [None] * batches, loss_fn, epochs=epochs, patience=patience)


@pytest.mark.parametrize(
    ("losses", "tolerance", "iterations", "stopped"),
    [
        ([9, 7, 5, 3, 2, 2, 1, 1], 0.1, 8, "epochs"),  # means 8, 4, 2, 1
        ([9, 7, 5, 3, 4, 4, 1, 1], 0.1, 6, "converged"),  # means 8, 4, 4: nothing gained
        ([9, 7, 5, 3, 6, 6, 1, 1], 0.1, 6, "converged"),  # it became worse
        ([10, 10, 9, 9, 8, 8], 0.1, 6, "epochs"),  # a tenth each: just enough
        ([10, 10, 9, 9.2, 8, 8], 0.1, 4, "converged"),  # 9 %
        ([10, 10, 9, 9.2, 8, 8], 0.08, 6, "epochs"),
        ([-10, -10, -12, -12, -12.1, -12.1, -20, -20], 0.1, 6, "converged"),  # below zero
        ([0, 0, 0, 0, 0, 0], 0.0, 4, "converged"),
        ([5, 4], 0.5, 2, "epochs"),  # one window has nothing to be compared with
    ],
)
def test_patience(losses: list[float], tolerance: float, iterations: int, stopped: str) -> None:
    result = scripted(losses, Patience(window=2, tolerance=tolerance))
    assert (result.iterations, result.stopped) == (iterations, stopped)


@pytest.mark.parametrize(("batches", "window"), [(1, 100), (7, 105), (60, 120), (250, 250)])
def test_the_window_is_whole_epochs_if_left_out(batches: int, window: int) -> None:
    result = scripted([1.0] * batches * (2 * window // batches + 1), Patience(), batches)
    assert (result.iterations, result.stopped) == (2 * window, "converged")


def test_patience_ends_a_real_training_that_has_converged() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]]) + torch.randn(64, 1)
    model = nn.Linear(3, 1)
    design = torch.cat([x, torch.ones(64, 1)], 1)
    best = (y - design @ torch.linalg.lstsq(design, y).solution).square().mean().item()
    patience = Patience(window=20, tolerance=1e-4)
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "patience": patience}
    result = fit(model, [(x, y)], mse, epochs=10_000, **settings)
    assert result.stopped == "converged"
    assert result.iterations < 1000
    assert result.loss == pytest.approx(best, rel=1e-3)


# --- mistakes -----------------------------------------------------------------------------


def test_a_nan_is_named_and_no_step_is_taken_on_it() -> None:
    model, expected, batches = net(), net(), data()
    with pytest.raises(sg.LossError, match=r"^iteration 4: the training loss is nan"):
        fit(model, batches, Recorder(4, lambda loss: loss * math.nan), epochs=2, lr=0.02)
    fit(expected, batches[:4], mse, epochs=1, lr=0.02)
    assert same(weights(model), weights(expected))


def test_a_nan_in_a_run_names_the_phase() -> None:
    phase = Phase(2, first_iteration=100)
    with pytest.raises(sg.LossError, match=r"^phase 2, iteration 104: the training loss is inf"):
        fit(net(), data(), Recorder(4, lambda loss: loss * math.inf), phase=phase)
    assert phase.next_iteration == 104


def test_a_learning_rate_that_is_too_high_is_reported() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1))
    with pytest.raises(sg.LossError, match="Lower the learning rate"):
        fit(model, data(), mse, epochs=50, optimizer="sgd", lr=100.0)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: m(b[0]), r"got torch.float32 of shape \(16, 1\). Average it"),
        (lambda m, b: mse(m, b).item(), "got float"),
        (lambda m, b: None, "got NoneType"),
        (lambda m, b: mse(m, b).detach(), "does not depend on any parameter"),
        (lambda m, b: m(b[0]).argmax(), "got torch.int64"),
    ],
)
def test_a_loss_of_the_wrong_kind(loss_fn: Any, message: str) -> None:
    model = net()
    before = weights(model)
    with pytest.raises(sg.LossError, match=f"iteration 0: .*{message}"):
        fit(model, data(), loss_fn)
    assert same(weights(model), before)


class Empty(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return iter(())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there are none"),
        (DataLoader(TensorDataset(torch.ones(3)), 4, drop_last=True), "there are none.*drop_last"),
        (DataLoader(Empty(), batch_size=None), "there are none"),
        ((batch for batch in data()), "a generator can be read only once"),
        (torch.ones(3), "got a single tensor"),
        ({"x": 1}, "expected a list of batches"),
        (None, "expected a list of batches"),
    ],
)
def test_unusable_batches(batches: Any, message: str) -> None:
    with pytest.raises(sg.InputError, match=f"batches: .*{message}"):
        fit(net(), batches, mse)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs: expected an integer"),
        ({"optimizer": "adam"}, "optimizer: expected 'sgd', 'adamw', .*got 'adam'"),
        ({"lr": -1.0}, r"lr: expected a number of 0 or more, got -1.0"),
        ({"lr": math.nan}, "lr: expected a number of 0 or more, got nan"),
        ({"lr": "high"}, "lr: expected a number of 0 or more, got 'high'"),
        ({"momentum": 0.9}, "momentum: AdamW has none"),
        ({"optimizer": lambda p: torch.optim.SGD(p), "lr": 1.0}, "lr: .*made by your function"),
        ({"schedule": "linear"}, "schedule: expected 'constant', 'cosine', 'step'.*got 'linear'"),
        ({"schedule": lambda at: -at - 1}, "schedule: it gives -1.0 where the fraction 0"),
        ({"patience": 5}, r"patience: expected a Patience\(window, tolerance\), got 5"),
        ({"device": "gpu"}, "device: 'gpu' is no device that PyTorch knows"),
        ({"device": "cuda:99"}, "device: 'cuda:99' was asked for"),
        ({"progress": True}, "progress: expected a label such as 'training', got True"),
        ({"seed": -1}, "seed: expected an integer from 0"),
        ({"loss_fn": "mse"}, "loss_fn: expected a function"),
    ],
)
def test_bad_arguments_change_nothing(settings: dict[str, Any], message: str) -> None:
    model = net().eval()
    before = weights(model)
    arguments = {"batches": data(), "loss_fn": mse} | settings
    with pytest.raises(sg.InputError, match=message):
        fit(model, **arguments)
    assert same(weights(model), before)
    assert not any(modes(model))


@pytest.mark.parametrize(("count", "words"), [(1, "1 CUDA device"), (2, "2 CUDA devices")])
def test_a_missing_device_is_told_with_how_many_there_are(
    count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(sg.InputError, match=f"'cuda:2' was asked for, and PyTorch sees {words} he"):
        fit(net(), data(), mse, device="cuda:2")


def test_all_that_is_wrong_is_reported_at_once() -> None:
    loader = DataLoader(TensorDataset(torch.ones(3)))
    with pytest.raises(sg.InputError) as raised:
        Trainer(loader, mse, epochs=0, lr=-1, schedule="linear", shuffle=True)  # type: ignore[arg-type]
    for name in ("epochs", "lr", "schedule", "shuffle"):
        assert f"{name}: " in str(raised.value)


def test_bad_patience() -> None:
    with pytest.raises(sg.InputError, match="window must be at least 1"):
        Patience(window=0)
    with pytest.raises(sg.InputError, match="tolerance must be 0 or more, got nan"):
        Patience(tolerance=math.nan)


def test_bad_models() -> None:
    with pytest.raises(sg.InputError, match=r"model: expected a torch.nn.Module, got function"):
        fit(mse, data(), mse)  # type: ignore[arg-type]
    with pytest.raises(sg.InputError, match="no parameter of it requires a gradient"):
        fit(net().requires_grad_(False), data(), mse)


def test_bad_optimizers() -> None:
    model = net()
    with pytest.raises(sg.OptimizerError, match="owns none of the model's trainable parameters"):
        fit(model, data(), mse, optimizer=torch.optim.SGD(net().parameters()))
    with pytest.raises(sg.OptimizerError, match=r"must return a torch.optim.Optimizer, got list"):
        fit(model, data(), mse, optimizer=lambda p: p)  # type: ignore[arg-type, return-value]
    with pytest.raises(sg.OptimizerError, match="LBFGS computes the loss several times"):
        fit(model, data(), mse, optimizer=torch.optim.LBFGS)
    made = torch.optim.SGD(model.parameters())
    with pytest.raises(sg.InputError, match="lr, momentum: the optimizer is made already"):
        fit(model, data(), mse, optimizer=made, lr=0.1, momentum=0.5)


# --- phases -------------------------------------------------------------------------------


class Witness:
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None: ...

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        self.steps.append((done, total))


def test_a_phase_is_told_every_loss_and_the_progress() -> None:
    model, batches, witness = net(), data(batches=2), Witness()
    losses = [mse(model, batch).item() for batch in batches]
    phase = Phase(1, first_iteration=10, listener=witness)
    fit(model, batches, mse, epochs=2, lr=0.0, phase=phase)
    assert [i for i, _ in phase.curve] == [10, 11, 12, 13]
    assert [loss for _, loss in phase.curve] == pytest.approx(losses * 2)
    assert witness.steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_progress_counts_epochs_where_their_length_is_unknown() -> None:
    witness = Witness()
    loader = DataLoader(Stream(), batch_size=None)
    fit(net(), loader, mse, epochs=3, phase=Phase(listener=witness))
    assert witness.steps == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]


def test_a_stop_ends_after_the_current_batch() -> None:
    stop, model, expected = threading.Event(), net(), net()
    recorder = Recorder(2, lambda loss: (stop.set(), loss)[1])
    phase = Phase(stop=stop)
    result = fit(model, data(), recorder, epochs=5, phase=phase)
    assert (result.iterations, result.epochs, result.stopped) == (3, 0, "asked")
    assert phase.iterations == 3
    fit(expected, data()[:3], mse, epochs=1)
    assert same(weights(model), weights(expected))


def test_a_stop_before_the_start_trains_nothing() -> None:
    stop, model = threading.Event(), net()
    stop.set()
    before = weights(model)
    result = fit(model, data(), mse, phase=Phase(stop=stop))
    assert (result.iterations, result.stopped) == (0, "asked")
    assert math.isnan(result.loss)
    assert same(weights(model), before)


def test_a_trainer_carries_one_optimizer_through_a_split() -> None:
    model, batches = net(width=3), data()
    trainer = Trainer(batches, mse, epochs=100, lr=0.1, schedule="cosine", shuffle=True)
    first = Phase(0, seed=1)
    trainer(model, first)
    optimizer = first.optimizer
    assert optimizer is not None
    assert optimizer.param_groups[0]["lr"] == 0.1  # the next phase begins with the full rate
    steps = optimizer.state[model[0].weight]["step"].item()
    before = loss_of(model, batches)

    plan = sg.select(sg.score(model, mse, batches), count=2)
    sg.split(model, plan, optimizer=optimizer, loss_fn=mse, batches=batches)
    second = Phase(1, seed=2, first_iteration=first.next_iteration, optimizer=optimizer)
    trainer(model, second)
    assert second.optimizer is optimizer
    assert model[0].weight.shape == (5, 2)
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (5, 2)
    assert optimizer.state[model[0].weight]["step"].item() == steps + 600
    assert loss_of(model, batches) < 0.5 * before
    assert second.curve[0][0] == 600


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_phase_goes_on_as_if_nothing_had_happened(optimizer: Any) -> None:
    trainer = Trainer(data(), mse, epochs=3, optimizer=optimizer, lr=0.02, schedule="step")
    model, first = net(dropout=0.2), Phase(0, seed=1)
    trainer(model, first)
    assert first.optimizer is not None
    saved, state = weights(model), copy.deepcopy(first.optimizer.state_dict())
    trainer(model, Phase(1, seed=2, optimizer=first.optimizer))

    resumed = net(dropout=0.2)
    resumed.load_state_dict(saved)
    trainer(resumed, Phase(1, seed=2, restore=lambda fresh: fresh.load_state_dict(state)))
    assert same(weights(model), weights(resumed))

    forgetful = net(dropout=0.2)  # a fresh optimizer would have made a difference
    forgetful.load_state_dict(saved)
    trainer(forgetful, Phase(1, seed=2))
    assert not same(weights(model), weights(forgetful))


def test_a_trainer_with_an_optimizer_of_ones_own() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(data(), mse, epochs=1, optimizer=optimizer)
    first = Phase()
    trainer(model, first)
    assert first.optimizer is optimizer
    trainer(model, Phase(1, optimizer=optimizer))
    assert optimizer.state[model[0].weight]["step"] == 12


def test_an_optimizer_of_another_model_is_not_left_in_the_phase() -> None:
    phase = Phase()
    with pytest.raises(sg.OptimizerError, match="owns none"):
        fit(net(), data(), mse, optimizer=torch.optim.SGD(net().parameters()), phase=phase)
    assert phase.optimizer is None


# --- Ctrl-C -------------------------------------------------------------------------------


@pytest.fixture
def plain_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(loss: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return loss


def test_ctrl_c_waits_for_the_current_batch(plain_interrupts: None) -> None:
    model, expected = net().eval(), net()
    recorder = Recorder(2, press)
    with pytest.raises(KeyboardInterrupt):
        fit(model, data(), recorder, epochs=5, lr=0.02)
    assert len(recorder.batches) == 3
    fit(expected, data()[:3], mse, epochs=1, lr=0.02)
    assert same(weights(model), weights(expected))  # the third step was taken whole
    assert not any(modes(model))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_does_not_wait(plain_interrupts: None) -> None:
    model, expected = net(), net()
    with pytest.raises(KeyboardInterrupt):
        fit(model, data(), Recorder(2, lambda loss: press(press(loss))), lr=0.02)
    fit(expected, data()[:2], mse, epochs=1, lr=0.02)
    assert same(weights(model), weights(expected))  # the third step was not begun


class Pressing(list[Batch]):
    """Ctrl-C while the second batch is being loaded."""

    def __iter__(self) -> Iterator[Batch]:
        yield self[0]
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the loader went on")


def test_ctrl_c_does_not_wait_for_a_loader(plain_interrupts: None) -> None:
    phase = Phase()
    with pytest.raises(KeyboardInterrupt):
        fit(net(), Pressing(data()), mse, phase=phase)
    assert phase.iterations == 1


def test_a_handler_of_ones_own_is_left_alone(plain_interrupts: None) -> None:
    """As grow does it: the handler sets the flag that phase.should_stop reads."""
    stop = threading.Event()
    handler = lambda *_: stop.set()  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    result = fit(net(), data(), Recorder(3, press), phase=Phase(stop=stop))
    assert (result.iterations, result.stopped) == (4, "asked")
    assert signal.getsignal(signal.SIGINT) is handler


def test_it_trains_in_another_thread(plain_interrupts: None) -> None:
    results: list[Fit] = []
    thread = threading.Thread(target=lambda: results.append(fit(net(), data(), mse, epochs=1)))
    thread.start()
    thread.join()
    assert results[0].iterations == 6


# --- devices, precision, display ----------------------------------------------------------


Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Sample:
    image: Tensor
    name: str
    extra: dict[str, Tensor]
    size: int = field(init=False, default=3)


class Own:
    """Something with a way of its own to be moved."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Own:
        return Own(str(device))


def test_all_tensors_of_a_batch_are_moved() -> None:
    batch = {
        "list": [torch.ones(2), 3, "text", None],
        "tuple": (torch.ones(1), {"deep": torch.ones(3)}),
        "named": Pair(torch.ones(1), 5),
        "ordered": OrderedDict(x=torch.ones(1)),
        "sample": Sample(torch.ones(2), "cat", {"mask": torch.ones(1)}),
        "own": Own(),
        "array": np.ones(2),
        "type": Own,
    }
    moved = to_device(batch, "meta")  # a device that every PyTorch has
    tensors = [moved["list"][0], moved["tuple"][0], moved["tuple"][1]["deep"], moved["named"].a,
               moved["ordered"]["x"], moved["sample"].image,
               moved["sample"].extra["mask"]]  # fmt: skip
    assert all(tensor.is_meta for tensor in tensors)
    assert moved["list"][1:] == [3, "text", None]
    assert isinstance(moved["named"], Pair)
    assert moved["named"].b == 5
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["sample"].name == "cat"
    assert moved["own"].device == "meta"
    assert moved["array"] is batch["array"]
    assert moved["type"] is Own
    assert not batch["list"][0].is_meta  # type: ignore[index]


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    moved = to_device([packed], "meta")[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


def test_a_batch_where_it_belongs_is_not_copied() -> None:
    batch = data()[0]
    assert to_device(batch, "cpu")[0] is batch[0]


def test_mixed_precision_runs_the_model_in_bfloat16_and_keeps_its_parameters() -> None:
    model, batches = net(), data()
    before = loss_of(model, batches)
    seen: set[torch.dtype] = set()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        seen.add(out.dtype)
        return F.mse_loss(out, batch[1])

    fit(model, batches, loss_fn, epochs=60, lr=0.02, amp=True)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert loss_of(model, batches) < 0.35 * before
    seen.clear()
    fit(model, batches, loss_fn, epochs=1)
    assert seen == {torch.float32}


def test_a_progress_bar_is_shown_where_asked(capfd: pytest.CaptureFixture[str]) -> None:
    fit(net(), data(), mse, epochs=2)
    assert capfd.readouterr() == ("", "")
    fit(net(), data(), mse, epochs=2, progress="my training")
    out, err = capfd.readouterr()
    assert out == ""
    assert "my training" in err
    assert "12/12" in err
    assert "loss 0." in err


def test_a_progress_bar_without_a_length(capfd: pytest.CaptureFixture[str]) -> None:
    fit(net(), DataLoader(Stream(), batch_size=None), mse, epochs=2, progress="stream")
    assert "4/?" in capfd.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize("amp", [False, True])
def test_training_on_a_gpu(amp: bool) -> None:
    model, batches = net(), data()
    before = loss_of(model, batches)
    result = fit(model, batches, mse, epochs=60, lr=0.02, device="cuda", amp=amp)
    assert all(p.is_cuda for p in model.parameters())
    assert loss_of(model.cpu(), batches) < 0.35 * before
    assert result.iterations == 360


@pytest.mark.cuda
def test_an_optimizer_follows_its_model_to_a_gpu_and_back() -> None:
    model, batches, phase = net(), data(), Phase()
    fit(model, batches, mse, epochs=2, phase=phase)
    optimizer = phase.optimizer
    assert optimizer is not None
    for device, steps in (("cuda", 24), ("cpu", 36)):
        fit(model, batches, mse, epochs=2, device=device, optimizer=optimizer)
        state = optimizer.state[model[0].weight]
        assert state["exp_avg"].device.type == device
        assert state["step"] == steps


@pytest.mark.cuda
def test_a_seed_repeats_on_a_gpu_and_leaves_its_random_state() -> None:
    torch.cuda.manual_seed_all(3)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed_all(3)
    runs = [dropout_run(5, device="cuda") for _ in range(2)]
    assert same(*runs)
    assert not same(runs[0], dropout_run(6, device="cuda"))
    torch.cuda.manual_seed_all(3)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)).cuda()
    fit(model, data(), mse, epochs=1)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
