"""Fit: a plain supervised trainer (step 1 of Algorithm 1), alone or as ``train`` of ``grow``."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import nn

from splitgrow import fit_optimizer
from splitgrow.errors import InputError
from splitgrow.fit_loop import Iteration, Run, Stopped, length_of, shuffled
from splitgrow.fit_optimizer import (
    SCHEDULES,
    OptimizerChoice,
    Rates,
    ScheduleChoice,
    names,
    optimizer_for,
)
from splitgrow.patience import Patience
from splitgrow.phase import Phase, check_seed
from splitgrow.show import count
from splitgrow.state import seeded
from splitgrow.surroundings import Interrupts, bar, grad_on, training
from splitgrow.tap import LossFn
from splitgrow.view import check_batches, generators


@dataclass(frozen=True)
class Fit:
    """What a training did.

    Attributes:
        iterations: batches trained on.
        epochs: whole passes over the batches.
        loss: mean training loss of the last epoch's worth of iterations; nan if there were none.
        stopped: ``"epochs"``: all were done; ``"converged"``: the loss no longer improved;
            ``"asked"``: ``phase.should_stop``.
        seconds: time taken.
    """

    iterations: int
    epochs: int
    loss: float
    stopped: Stopped
    seconds: float = field(compare=False)


@dataclass(frozen=True, eq=False)
class Trainer:
    """``fit`` with its settings, as the ``train`` of ``grow``.

    One optimizer is made in the first phase and carried through the splits; the schedule of its
    learning rate begins anew in each phase. The settings are those of ``fit``::

        sg.grow(model, train=sg.Trainer(loader, loss_fn, epochs=20, schedule="cosine"), ...)
    """

    batches: Iterable[Any] = field(repr=False)
    loss_fn: LossFn
    _: KW_ONLY
    epochs: int = 10
    optimizer: OptimizerChoice = "adamw"
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float | None = None
    schedule: ScheduleChoice = "constant"
    patience: Patience | None = None
    shuffle: bool = False
    device: torch.device | str | None = None
    amp: bool = False

    def __post_init__(self) -> None:
        problems = [*_problems(self), *fit_optimizer.problems(self.optimizer, _given(self))]
        if problems:
            raise InputError("\n".join(problems))
        check_batches(self.batches)

    def describe(self) -> str:
        """The settings in a line, for a record."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in ("batches", "loss_fn")]
        values = ((name, getattr(self, name)) for name in names)
        return ", ".join(f"{n}={getattr(v, '__name__', v)}" for n, v in values if v is not None)

    def __call__(self, model: nn.Module, phase: Phase) -> None:
        """Train the model for one phase."""
        _fit(model, self, phase, phase.seed, None)


def fit(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn,
    *,
    epochs: int = 10,
    optimizer: OptimizerChoice = "adamw",
    lr: float | None = None,
    weight_decay: float | None = None,
    momentum: float | None = None,
    schedule: ScheduleChoice = "constant",
    patience: Patience | None = None,
    shuffle: bool = False,
    device: torch.device | str | None = None,
    amp: bool = False,
    phase: Phase | None = None,
    progress: str | None = None,
    seed: int | None = None,
) -> Fit:
    """Train a model on batches: ``fit(model, loader, loss_fn, epochs=20)``.

    The same seed gives the same model. The caller's random state, the model's train and eval
    modes and the optimizer's learning rate are as they were afterwards; gradients are dropped.
    Ctrl-C waits for the end of the current batch, so no step is left half done; pressed twice, it
    does not wait.

    Args:
        model: trained in place. It is put into training mode; one that is in training mode
            already is left as it is, so parts set to ``eval()`` by hand stay so.
        batches: a list or a DataLoader, read once per epoch.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch as a scalar tensor.
        epochs: passes over the batches, at most.
        optimizer: ``"sgd"``, ``"adamw"``, a class of ``torch.optim``, a function of the list of
            trainable parameters, or an optimizer. With a phase that has an optimizer already,
            that one goes on.
        lr: learning rate; 0.01 for ``"sgd"`` and 0.001 for ``"adamw"`` if left out.
        weight_decay: 0 for ``"sgd"`` and ``"adamw"`` if left out.
        momentum: 0.9 for ``"sgd"`` if left out.
        schedule: ``"constant"``, ``"cosine"`` (down to 0), ``"step"`` (a tenth after half and
            after three quarters), a ``Cosine`` or ``Step`` with other numbers, or any function
            from the fraction of the training that is done to a factor of the learning rate.
        patience: stop when the loss stops improving; left out, all epochs are done.
        shuffle: read a list in another order in each epoch. A DataLoader shuffles by itself.
        device: where to train; the model is moved there for good. Left out, where the model is.
        amp: mixed precision: run the model under bfloat16 autocast; parameters keep their dtype.
        phase: where to log; its ``should_stop`` ends the training after the current batch.
        progress: the label of a progress bar; left out, there is none.
        seed: of shuffling, dropout and all else; left out, the phase's, or 0.

    Raises:
        InputError: arguments that are not usable; nothing was changed.
        LossError: a loss that is not finite, or no scalar. The model is as the last whole
            iteration left it.
    """
    trainer = Trainer(
        batches, loss_fn, epochs=epochs, optimizer=optimizer, lr=lr, weight_decay=weight_decay,
        momentum=momentum, schedule=schedule, patience=patience, shuffle=shuffle, device=device,
        amp=amp,
    )  # fmt: skip
    if seed is None:
        seed = 0 if phase is None else phase.seed
    return _fit(model, trainer, phase, check_seed(seed), progress)


# --- checks -------------------------------------------------------------------------------


def _problems(settings: Any) -> Iterator[str]:
    """What is wrong with the settings, apart from the optimizer's: they may be anything yet."""
    if not callable(settings.loss_fn):
        yield "loss_fn: expected a function loss_fn(model, batch) -> mean loss."
    if not isinstance(settings.epochs, int) or settings.epochs < 1:
        yield f"epochs: expected an integer of at least 1, got {settings.epochs!r}."
    if not callable(settings.schedule) and settings.schedule not in SCHEDULES:
        yield (
            f"schedule: expected {names(SCHEDULES)} or a function from the fraction done to a "
            f"factor, got {settings.schedule!r}."
        )
    if not isinstance(settings.patience, Patience | None):
        yield f"patience: expected a Patience(window, tolerance), got {settings.patience!r}."
    if settings.shuffle and not isinstance(settings.batches, Sequence):
        yield (
            "shuffle: only a list of batches can be shuffled here. A loader shuffles by itself: "
            "DataLoader(..., shuffle=True)."
        )


def _given(settings: Trainer) -> dict[str, Any]:
    """What is said of the optimizer beside its choice."""
    own = {name: getattr(settings, name) for name in ("lr", "weight_decay", "momentum")}
    return {name: value for name, value in own.items() if value is not None}


def _device(model: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """Where to train."""
    if wanted is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise InputError(f"device: {wanted!r} is no device that PyTorch knows.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device: {str(device)!r} was asked for, and PyTorch sees "
            f"{count(torch.cuda.device_count(), 'CUDA device')} here. Leave it out to train where "
            "the model is, or install a PyTorch with CUDA."
        )
    return device


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            "model: no parameter of it requires a gradient, so there is nothing to train. Call "
            "model.requires_grad_(True)."
        )


def _check_amp(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InputError(
            f"amp: {torch.cuda.get_device_name(device)} has no bfloat16. Train with amp=False."
        )


# --- training -----------------------------------------------------------------------------


def _fit(
    model: nn.Module, settings: Trainer, phase: Phase | None, seed: int, progress: str | None
) -> Fit:
    start = time.perf_counter()
    _check_model(model)
    if not isinstance(progress, str | None):
        raise InputError(f"progress: expected a label such as 'training', got {progress!r}.")
    length = length_of(settings.batches)
    device = _device(model, settings.device)
    if settings.amp:
        _check_amp(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(grad_on())
        if settings.device is not None:
            model.to(device)
        optimizer = optimizer_for(model, settings.optimizer, _given(settings), phase)
        stack.enter_context(seeded(seed, generators(settings.batches)))
        stack.enter_context(training(model, optimizer))
        rates = stack.enter_context(Rates(optimizer, settings.schedule))
        interrupts = stack.enter_context(Interrupts())
        show = stack.enter_context(bar(progress, length and length * settings.epochs))
        step = Iteration(model, settings.loss_fn, optimizer, device, settings.amp, phase)
        run = Run(settings.epochs, settings.patience, length, phase, step, rates, interrupts, show)
        stopped = run.train(_passes(settings, seed))
    seconds = time.perf_counter() - start
    return Fit(run.iterations, run.whole_epochs, run.recent.mean, stopped, seconds)


def _passes(settings: Trainer, seed: int) -> Iterable[Iterable[Any]]:
    """The batches of each epoch."""
    if settings.shuffle:
        assert isinstance(settings.batches, Sequence)
        return shuffled(settings.batches, settings.epochs, seed)
    return repeat(settings.batches, settings.epochs)
