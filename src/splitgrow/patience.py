"""Patience: a training ends when its loss stops improving."""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitgrow.errors import InputError

# Without a window of its own, patience compares whole epochs of at least this many iterations.
LEAST_WINDOW = 100


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


class Plateau:
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
