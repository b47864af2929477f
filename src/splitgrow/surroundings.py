"""What surrounds a training: modes and gradients, Ctrl-C, a progress bar."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.optim import Optimizer


@contextlib.contextmanager
def grad_on() -> Iterator[None]:
    """Gradients are computed, even where the caller has switched them off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextlib.contextmanager
def training(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Training mode inside; every module's own mode again outside, and no gradients left."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    try:
        if not was_training:
            model.train()
        yield
    finally:
        if not was_training:
            model.train(False)  # a model's own train() may do more than set the mode
        for module, mode in modes:
            module.training = mode
        drop_gradients(model, optimizer)


def drop_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Of all that the loss may reach: either may own parameters that the other does not."""
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)


class Interrupts:
    """Ctrl-C is held back during a batch, and raised at its end; pressed twice, at once.

    Where somebody has a handler of their own, or outside the main thread, nothing is changed.
    """

    def __init__(self) -> None:
        self._holding = self._pressed = self._installed = False

    def __enter__(self) -> Interrupts:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, *_: object) -> None:
        if not self._holding or self._pressed:
            raise KeyboardInterrupt
        self._pressed = True

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, the first Ctrl-C waits."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._pressed:
            raise KeyboardInterrupt


@contextlib.contextmanager
def bar(label: str | None, total: int | None) -> Iterator[Callable[[int, float], None]]:
    """A function that shows (iterations done, loss), as a progress bar or not at all."""
    if label is None:
        yield lambda *_: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4g}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total, loss=math.nan)
        yield lambda done, loss: progress.update(task, completed=done, loss=loss)
