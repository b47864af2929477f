"""The iterations of a training, until its epochs are done or there is a reason to stop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from splitgrow.errors import InputError, LossError
from splitgrow.fit_optimizer import Rates
from splitgrow.patience import Patience, Plateau
from splitgrow.phase import Phase, finite_loss
from splitgrow.surroundings import Interrupts, drop_gradients
from splitgrow.tap import LossFn
from splitgrow.view import check_scalar

Stopped = Literal["epochs", "converged", "asked"]

NO_BATCHES = (
    "batches: there are none. Give at least one batch; with a DataLoader, look at the size of its "
    "dataset and at drop_last."
)


@dataclass
class Run:
    """All iterations of one training."""

    epochs: int
    patience: Patience | None
    length: int | None
    phase: Phase | None
    step: Iteration
    rates: Rates
    interrupts: Interrupts
    show: Callable[[int, float], None]
    iterations: int = 0
    whole_epochs: int = 0

    def __post_init__(self) -> None:
        self.recent = Recent()
        self.plateau = None if self.patience is None else Plateau(self.patience, self.length)

    def train(self, passes: Iterable[Iterable[Any]]) -> Stopped:
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
            raise InputError(NO_BATCHES)
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
        return (self.whole_epochs + part) / self.epochs

    def _report(self, loss: float) -> None:
        self.show(self.iterations, loss)
        if self.phase is None:
            return
        self.phase.log(loss)
        if self.length:
            self.phase.progress(self.iterations, self.length * self.epochs)
        else:
            self.phase.progress(self.whole_epochs, self.epochs)


class Recent:
    """The losses of the last epoch's worth of iterations."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._now: list[float] = []

    def add(self, loss: float) -> None:
        """Of one more iteration."""
        self._now.append(loss)

    def end_epoch(self) -> None:
        """Its losses are kept until as many have come after them."""
        self._before, self._now = self._now, []

    @property
    def mean(self) -> float:
        """Of as many iterations as the last whole epoch had; nan where there were none."""
        losses = (self._before + self._now)[-len(self._before) or None :]
        return math.fsum(losses) / len(losses) if losses else math.nan


# --- one iteration ------------------------------------------------------------------------


@dataclass(frozen=True)
class Iteration:
    """One iteration: the loss of a batch, its gradient, a step of the optimizer."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer
    device: torch.device
    amp: bool
    phase: Phase | None

    def __call__(self, batch: Any, iteration: int) -> float:
        """The loss of the batch before the step. Where it is not finite, no step is taken."""
        place = self._place(iteration)
        batch = to_device(batch, self.device)
        drop_gradients(self.model, self.optimizer)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = _check_differentiable(self.loss_fn(self.model, batch), place)
        loss.backward()
        value = finite_loss(float(loss.item()), place)  # waits for the device, so after backward
        self.optimizer.step()
        return value

    def _place(self, iteration: int) -> str:
        """In the words of the run, if there is one."""
        if self.phase is None:
            return f"iteration {iteration}"
        return f"phase {self.phase.number}, iteration {self.phase.next_iteration}"


def _check_differentiable(loss: Any, place: str) -> Tensor:
    """The loss, if it is one number that can be differentiated."""
    loss = check_scalar(loss, f"{place}: ")
    if not loss.requires_grad:
        raise LossError(
            f"{place}: the loss does not depend on any parameter that requires a gradient. Compute "
            "it with the model that loss_fn is given, without torch.no_grad() or detach()."
        )
    return loss


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


# --- the batches of an epoch --------------------------------------------------------------


def length_of(batches: Any) -> int | None:
    """How many batches an epoch has, where that is known beforehand."""
    try:
        length = len(batches)
    except (TypeError, NotImplementedError):
        return None
    if not length:
        raise InputError(NO_BATCHES)
    return length


def shuffled(batches: Sequence[Any], epochs: int, seed: int) -> Iterator[Iterable[Any]]:
    """The batches of each epoch, each time in another order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(batches), generator=generator).tolist()
        yield (batches[i] for i in order)
