"""Fit: a plain supervised trainer (step 1 of Algorithm 1), alone or as ``train`` of ``grow``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from splitgrow.errors import InputError, LossError, OptimizerError
from splitgrow.phase import Phase, check_seed, finite_loss
from splitgrow.state import seeded
from splitgrow.surroundings import Interrupts, bar, drop_gradients, grad_on, training
from splitgrow.tap import LossFn
from splitgrow.view import check_batches, check_scalar, generators

Schedule = Callable[[float], float]
ScheduleChoice = Literal["constant", "cosine", "step"] | Schedule
OptimizerChoice = Literal["sgd", "adamw"] | Optimizer | Callable[[list[nn.Parameter]], Optimizer]
Stopped = Literal["epochs", "converged", "asked"]

# Without a window of its own, patience compares whole epochs of at least this many iterations.
LEAST_WINDOW = 100


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


@dataclass(frozen=True)
class Patience:
    """Train until no further improvement can be made.

    After every ``window`` iterations their mean loss is compared with that of the window before:
    training ends when

        before - now < tolerance * |before|

    or when nothing was gained at all.

    Attributes:
        window: iterations; left out, the fewest whole epochs with at least 100 iterations.
        tolerance: the relative improvement that is worth another window.
    """

    window: int | None = None
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError(f"Patience: window must be at least 1 iteration, got {self.window}.")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise InputError(f"Patience: tolerance must be 0 or more, got {self.tolerance}.")


@dataclass(frozen=True)
class Cosine:
    """The learning rate falls along half a cosine from its full value to ``final`` times it."""

    final: float = 0.0

    def __call__(self, at: float) -> float:
        """The factor when the fraction ``at`` of the training is done."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * at)) / 2


@dataclass(frozen=True)
class Step:
    """The learning rate is multiplied by ``factor`` at each of these fractions of the training."""

    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, at: float) -> float:
        """The factor when the fraction ``at`` of the training is done."""
        return self.factor ** sum(at >= mark for mark in self.at)


SCHEDULES: dict[str, Schedule] = {"constant": lambda _: 1.0, "cosine": Cosine(), "step": Step()}
# By name: the class, and the settings that differ from its own defaults.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
}


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
        problems = [*_problems(self), *_optimizer_problems(self)]
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


def to_device(batch: Any, device: torch.device | str) -> Any:
    """A batch with all its tensors on a device, inside lists, tuples, dicts and dataclasses too.

    Objects with a ``to`` method of their own (a packed sequence, a graph) are moved by it.
    """
    target = torch.device(device)

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # a copy to the host must have arrived when it is read
            return leaf.to(target, non_blocking=target.type == "cuda")
        if _moves_itself(leaf):
            return leaf.to(target)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            own = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
            return dataclasses.replace(leaf, **to_device(own, target))
        return leaf

    return pytree.tree_map(moved, batch, is_leaf=_moves_itself)


def _moves_itself(item: Any) -> bool:
    return not isinstance(item, type) and callable(getattr(item, "to", None))


# --- checks -------------------------------------------------------------------------------


def _problems(settings: Any) -> Iterator[str]:
    """What is wrong with the settings, apart from the optimizer's: they may be anything yet."""
    if not callable(settings.loss_fn):
        yield "loss_fn: expected a function loss_fn(model, batch) -> mean loss."
    if not isinstance(settings.epochs, int) or settings.epochs < 1:
        yield f"epochs: expected an integer of at least 1, got {settings.epochs!r}."
    if not callable(settings.schedule) and settings.schedule not in SCHEDULES:
        yield (
            f"schedule: expected {_names(SCHEDULES)} or a function from the fraction done to a "
            f"factor, got {settings.schedule!r}."
        )
    if not isinstance(settings.patience, Patience | None):
        yield f"patience: expected a Patience(window, tolerance), got {settings.patience!r}."
    if settings.shuffle and not isinstance(settings.batches, Sequence):
        yield (
            "shuffle: only a list of batches can be shuffled here. A loader shuffles by itself: "
            "DataLoader(..., shuffle=True)."
        )


def _optimizer_problems(settings: Any) -> Iterator[str]:
    choice, given = settings.optimizer, _given(settings)
    if not isinstance(choice, Optimizer) and not callable(choice) and choice not in OPTIMIZERS:
        yield (
            f"optimizer: expected {_names(OPTIMIZERS)}, a torch.optim.Optimizer or a function "
            f"that makes one from the parameters, got {choice!r}."
        )
    for name, value in given.items():
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            yield f"{name}: expected a number of 0 or more, got {value!r}."
    if choice == "adamw" and "momentum" in given:
        yield "momentum: AdamW has none. Leave it out, or take optimizer='sgd'."
    if given and not isinstance(choice, str | type):
        made = "is made already" if isinstance(choice, Optimizer) else "is made by your function"
        yield f"{', '.join(given)}: the optimizer {made}. Set it there."


def _given(settings: Trainer) -> dict[str, Any]:
    own = {name: getattr(settings, name) for name in ("lr", "weight_decay", "momentum")}
    return {name: value for name, value in own.items() if value is not None}


def _names(table: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in table)


def _length(batches: Any) -> int | None:
    """How many batches an epoch has, where that is known beforehand."""
    try:
        length = len(batches)
    except (TypeError, NotImplementedError):
        return None
    if not length:
        raise InputError(_NO_BATCHES)
    return length


_NO_BATCHES = (
    "batches: there are none. Give at least one batch; with a DataLoader, look at the size of its "
    "dataset and at drop_last."
)


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
            f"{torch.cuda.device_count()} CUDA devices here. Leave it out to train where the model "
            "is, or install a PyTorch with CUDA."
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


def _check_differentiable(loss: Any, place: str) -> Tensor:
    """The loss, if it is one number that can be differentiated."""
    loss = check_scalar(loss, f"{place}: ")
    if not loss.requires_grad:
        raise LossError(
            f"{place}: the loss does not depend on any parameter that requires a gradient. Compute "
            "it with the model that loss_fn is given, without torch.no_grad() or detach()."
        )
    return loss


# --- optimizer ----------------------------------------------------------------------------


def _optimizer(model: nn.Module, settings: Trainer, phase: Phase | None) -> Optimizer:
    """The optimizer of the phase, or a new one, which the phase then has."""
    choice = settings.optimizer
    carried = phase.optimizer if phase is not None else None
    if isinstance(choice, Optimizer) or carried is None:
        optimizer = choice if isinstance(choice, Optimizer) else _made(model, settings)
    else:
        optimizer = carried
    _check_optimizer(optimizer, model)
    if phase is not None:
        phase.optimizer = optimizer
    _follow(optimizer)
    return optimizer


def _made(model: nn.Module, settings: Trainer) -> Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    choice, given = settings.optimizer, _given(settings)
    if isinstance(choice, str):
        kind, defaults = OPTIMIZERS[choice]
        return kind(parameters, **{**defaults, **given})
    assert not isinstance(choice, Optimizer)
    return choice(parameters, **given)


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            "optimizer: the function must return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "optimizer: LBFGS computes the loss several times in a step, which fit does not do. "
            "Take optimizer='adamw', or train with a loop of your own."
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in owned for p in model.parameters() if p.requires_grad):
        raise OptimizerError(
            "optimizer: it owns none of the model's trainable parameters. It was made for another "
            "model: make it from this one's model.parameters()."
        )


def _follow(optimizer: Optimizer) -> None:
    """Bring the optimizer's state to where its parameters have been moved."""
    if any(
        isinstance(value, Tensor) and key != "step" and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    ):
        optimizer.load_state_dict(optimizer.state_dict())  # knows which state belongs where


class _Rates:
    """The learning rates of an optimizer's groups; outside, they are as they were."""

    def __init__(self, optimizer: Optimizer, schedule: ScheduleChoice) -> None:
        self._groups = [group for group in optimizer.param_groups if "lr" in group]
        self._full = [float(group["lr"]) for group in self._groups]
        self._schedule = schedule if callable(schedule) else SCHEDULES[schedule]

    def __enter__(self) -> _Rates:
        return self

    def __exit__(self, *_: object) -> None:
        self._scale(1.0)

    def set(self, at: float) -> None:
        """The rates when the fraction ``at`` of the training is done."""
        factor = float(self._schedule(at))
        if not (math.isfinite(factor) and factor >= 0):
            raise InputError(
                f"schedule: it gives {factor} where the fraction {at:.3g} of the training is done. "
                "It must give a factor of the learning rate, 0 or more."
            )
        self._scale(factor)

    def _scale(self, factor: float) -> None:
        for group, full in zip(self._groups, self._full, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(full * factor)
            else:
                group["lr"] = full * factor


# --- training -----------------------------------------------------------------------------


def _fit(
    model: nn.Module, settings: Trainer, phase: Phase | None, seed: int, progress: str | None
) -> Fit:
    start = time.perf_counter()
    _check_model(model)
    if not isinstance(progress, str | None):
        raise InputError(f"progress: expected a label such as 'training', got {progress!r}.")
    length = _length(settings.batches)
    device = _device(model, settings.device)
    if settings.amp:
        _check_amp(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(grad_on())
        if settings.device is not None:
            model.to(device)
        optimizer = _optimizer(model, settings, phase)
        stack.enter_context(seeded(seed, generators(settings.batches)))
        stack.enter_context(training(model, optimizer))
        rates = stack.enter_context(_Rates(optimizer, settings.schedule))
        interrupts = stack.enter_context(Interrupts())
        show = stack.enter_context(bar(progress, length and length * settings.epochs))
        step = _Step(model, settings, optimizer, device, phase)
        run = _Run(settings, length, phase, step, rates, interrupts, show)
        stopped = run.epochs(_passes(settings, seed))
    seconds = time.perf_counter() - start
    return Fit(run.iterations, run.whole_epochs, run.recent.mean, stopped, seconds)


def _passes(settings: Trainer, seed: int) -> Iterator[Iterable[Any]]:
    """The batches of each epoch."""
    batches, generator = settings.batches, torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        if settings.shuffle:
            assert isinstance(batches, Sequence)
            order = torch.randperm(len(batches), generator=generator).tolist()
            yield (batches[i] for i in order)
        else:
            yield batches


@dataclass(frozen=True)
class _Step:
    """One iteration: the loss of a batch, its gradient, a step of the optimizer."""

    model: nn.Module
    settings: Trainer
    optimizer: Optimizer
    device: torch.device
    phase: Phase | None

    def __call__(self, batch: Any, iteration: int) -> float:
        """The loss of the batch before the step. Where it is not finite, no step is taken."""
        place = self._place(iteration)
        batch = to_device(batch, self.device)
        drop_gradients(self.model, self.optimizer)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.amp):
            loss = _check_differentiable(self.settings.loss_fn(self.model, batch), place)
        loss.backward()
        value = finite_loss(float(loss.item()), place)  # waits for the device, so after backward
        self.optimizer.step()
        return value

    def _place(self, iteration: int) -> str:
        """In the words of the run, if there is one."""
        if self.phase is None:
            return f"iteration {iteration}"
        return f"phase {self.phase.number}, iteration {self.phase.next_iteration}"


@dataclass
class _Run:
    """All iterations of one training."""

    settings: Trainer
    length: int | None
    phase: Phase | None
    step: _Step
    rates: _Rates
    interrupts: Interrupts
    show: Callable[[int, float], None]
    iterations: int = 0
    whole_epochs: int = 0

    def __post_init__(self) -> None:
        self.recent = _Recent()
        patience = self.settings.patience
        self.plateau = None if patience is None else _Plateau(patience, self.length)

    def epochs(self, passes: Iterable[Iterable[Any]]) -> Stopped:
        """Train until the epochs are done, the loss stops improving or somebody asks to stop."""
        if self.phase is not None and self.phase.should_stop:
            return "asked"
        for batches in passes:
            stopped = self._epoch(batches)
            if stopped is not None:
                return stopped
            self.recent.end_epoch()
            self.whole_epochs += 1
        return "epochs"

    def _epoch(self, batches: Iterable[Any]) -> Stopped | None:
        index = -1
        for index, batch in enumerate(batches):
            stopped = self._iteration(index, batch)
            if stopped is not None:
                return stopped
        if index < 0:
            raise InputError(_NO_BATCHES)
        return None

    def _iteration(self, index: int, batch: Any) -> Stopped | None:
        with self.interrupts.held_back():
            self.rates.set(self._fraction(index))
            loss = self.step(batch, self.iterations)
            self.iterations += 1
            self.recent.add(loss)
            self._report(loss)
        if self.phase is not None and self.phase.should_stop:
            return "asked"
        if self.plateau is not None and self.plateau.reached(loss):
            return "converged"
        return None

    def _fraction(self, index: int) -> float:
        """How much of the training is done; in steps of an epoch where its length is unknown."""
        part = min(index / self.length, 1.0) if self.length else 0.0
        return (self.whole_epochs + part) / self.settings.epochs

    def _report(self, loss: float) -> None:
        self.show(self.iterations, loss)
        if self.phase is None:
            return
        self.phase.log(loss)
        if self.length:
            self.phase.progress(self.iterations, self.length * self.settings.epochs)
        else:
            self.phase.progress(self.whole_epochs, self.settings.epochs)


class _Recent:
    """The losses of the last epoch's worth of iterations."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._now: list[float] = []

    def add(self, loss: float) -> None:
        self._now.append(loss)

    def end_epoch(self) -> None:
        self._before, self._now = self._now, []

    @property
    def mean(self) -> float:
        """Of as many iterations as the last whole epoch had; nan where there were none."""
        losses = (self._before + self._now)[-len(self._before) or None :]
        return math.fsum(losses) / len(losses) if losses else math.nan


class _Plateau:
    """Has the mean loss of a window stopped improving on that of the window before?"""

    def __init__(self, patience: Patience, length: int | None) -> None:
        self._window = patience.window or _whole_epochs(length)
        self._tolerance = patience.tolerance
        self._losses: list[float] = []
        self._before = math.inf

    def reached(self, loss: float) -> bool:
        """Add the loss of an iteration; True at the end of a window that gained too little."""
        self._losses.append(loss)
        if len(self._losses) < self._window:
            return False
        before, now = self._before, math.fsum(self._losses) / self._window
        self._before, self._losses = now, []
        if math.isinf(before):  # the first window
            return False
        return before - now <= 0 or before - now < self._tolerance * abs(before)


def _whole_epochs(length: int | None) -> int:
    """The fewest whole epochs with at least LEAST_WINDOW iterations, in iterations."""
    return LEAST_WINDOW if length is None else length * math.ceil(LEAST_WINDOW / length)
