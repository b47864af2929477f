"""Phase: what a training function is given beside the model, and what it reports back to."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from splitgrow.errors import InputError, LossError, OptimizerError

# A phase's curve keeps at most this many points, however long the phase trains.
MAX_POINTS = 2000
SEEDS = 2**32  # numpy takes no larger ones


class Listener(Protocol):
    """Somebody who watches the training: a live display, a logger."""

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """One iteration was logged; ``iteration`` counts over the whole run."""

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """This phase's training is at ``done`` of ``total``."""


class Silent:
    """A listener that does nothing."""

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """Nothing."""

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """Nothing."""


class StopFlag(Protocol):
    """What a ``threading.Event`` offers: has somebody asked to stop?"""

    def is_set(self) -> bool:
        """True from the moment that somebody has asked."""


class Curve:
    """The losses of consecutive iterations, as at most ``MAX_POINTS`` means of equal blocks.

    Blocks are one iteration long until there are too many of them; then neighbours are averaged
    in pairs, and blocks are twice as long from there on. What is kept depends on the losses alone.
    """

    def __init__(self, first_iteration: int = 0) -> None:
        self._first = first_iteration
        self._block = 1
        self._means: list[float] = []
        self._sum, self._count = 0.0, 0  # of the last block, not yet whole

    def add(self, loss: float) -> None:
        """The loss of the next iteration."""
        self._sum, self._count = self._sum + loss, self._count + 1
        if self._count == self._block:
            self._means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self._means) == MAX_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(a + b) / 2 for a, b in pairs]
            self._block *= 2

    def __len__(self) -> int:
        """How many iterations were added."""
        return len(self._means) * self._block + self._count

    @property
    def points(self) -> list[tuple[int, float]]:
        """(first iteration of a block, its mean loss) for each block; the last may be shorter."""
        means = [*self._means, self._sum / self._count] if self._count else self._means
        return [(self._first + i * self._block, mean) for i, mean in enumerate(means)]


class Phase:
    """One phase of growing, as a training function sees it.

    A training function reads ``number``, ``seed`` and ``should_stop``, and may use the rest::

        def train(model, phase):
            if phase.optimizer is None:  # the first phase, or the first one of a resumed run
                phase.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step, batch in enumerate(loader):
                ...
                phase.log(loss)  # for the curves
                phase.progress(step + 1, len(loader))  # for the live display
                if phase.should_stop:
                    return

    Args:
        number: 0 for the phase that trains the seed model.
        seed: for whatever is random in this phase's training; from 0 to 2**32 - 1.
        first_iteration: how many iterations earlier phases took.
        optimizer: the one that an earlier phase assigned, carried through the splits.
        restore: loads a saved state into an optimizer; called with the first one assigned.
        listener: told of every iteration.
        stop: set when the training is to end after the current batch.
    """

    def __init__(
        self,
        number: int = 0,
        *,
        seed: int = 0,
        first_iteration: int = 0,
        optimizer: Optimizer | None = None,
        restore: Callable[[Optimizer], None] | None = None,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self.number = _count("number", number)
        self.seed = check_seed(seed)
        self.first_iteration = _count("first_iteration", first_iteration)
        self._optimizer = None if optimizer is None else _check_optimizer(optimizer, number)
        self._restore = restore
        self._listener: Listener = Silent() if listener is None else listener
        self._stop = stop
        self._curve = Curve(first_iteration)

    def __repr__(self) -> str:
        return f"Phase({self.number}, seed={self.seed}, iterations={self.iterations})"

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that is carried through splits and kept in checkpoints.

        Assign it once. In a resumed run the saved state is then loaded into it. A training
        function that makes a new one in each phase keeps it to itself and assigns nothing, or
        calls ``forget_optimizer()`` before it assigns.
        """
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        _check_optimizer(optimizer, self.number)
        if self._optimizer is not None and self._optimizer is not optimizer:
            raise OptimizerError(
                f"phase {self.number}: phase.optimizer is set already, and its state is carried "
                "from phase to phase. Go on with it: assign only if phase.optimizer is None. For a "
                "new one in each phase, call phase.forget_optimizer() first."
            )
        if self._restore is not None:
            self._restore(optimizer)
            self._restore = None
        self._optimizer = optimizer

    def forget_optimizer(self) -> None:
        """Drop the carried optimizer and any saved state, so that a new one starts afresh."""
        self._optimizer, self._restore = None, None

    @property
    def should_stop(self) -> bool:
        """Has somebody asked to stop (Ctrl-C)? Then end after the current batch."""
        return self._stop is not None and self._stop.is_set()

    def log(self, loss: float | Tensor) -> None:
        """Record the training loss of one iteration; one that is not finite is an error."""
        iteration = self.next_iteration
        place = f"phase {self.number}, iteration {iteration}"
        value = finite_loss(_number(loss, place), place)
        self._curve.add(value)
        self._listener.on_iteration(self, iteration, value)

    def progress(self, done: int, total: int) -> None:
        """Tell the live display how far this phase's training is, in any unit.

        It is for show alone: a ``done`` that is too large or too small counts as all or nothing.
        """
        self._listener.on_progress(self, min(max(done, 0), total), total)

    @property
    def iterations(self) -> int:
        """How many iterations this phase has logged."""
        return len(self._curve)

    @property
    def next_iteration(self) -> int:
        """The number of the next iteration; at the end, ``first_iteration`` of the next phase."""
        return self.first_iteration + self.iterations

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(iteration over the whole run, loss), thinned to at most 2,000 points by averaging."""
        return self._curve.points


def finite_loss(loss: float, place: str) -> float:
    """The loss, if it is a finite number."""
    if not math.isfinite(loss):
        raise LossError(
            f"{place}: the training loss is {loss}. Lower the learning rate, and look for a "
            "division by zero or a logarithm of zero in the loss and for such numbers in the data."
        )
    return loss


def check_seed(seed: Any) -> int:
    """A seed that torch, numpy and random all take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS:
        raise InputError(f"seed: expected an integer from 0 to 2**32 - 1, got {seed!r}.")
    return seed


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name}: expected an integer of 0 or more, got {value!r}.")
    return value


def _number(loss: Any, place: str) -> float:
    if isinstance(loss, Tensor) and loss.dim() == 0 and not loss.is_complex():
        return float(loss.item())
    if isinstance(loss, Real):
        return float(loss)
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise InputError(
        f"{place}: phase.log takes the mean loss of one iteration, a number or a tensor without "
        f"dimensions, got {got}. Average it: loss.mean()."
    )


def _check_optimizer(optimizer: Any, number: int) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"phase {number}: phase.optimizer must be a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}. Keep other things in your own training function."
        )
    return optimizer
