"""Ctrl-C in a growing run: the first ends it after the current batch, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from splitgrow.phase import Phase
from splitgrow.watch import Watcher


class Told(Watcher):
    """Passes a phase's reports on; ends a training loop that does not look at should_stop."""

    def __init__(self, watcher: Watcher, stop: threading.Event) -> None:
        self._watcher, self._stop = watcher, stop
        self._warned = False

    def on_iteration(self, phase: Phase, iteration: int, loss: float) -> None:
        """Pass it on; the second report after Ctrl-C is one too many."""
        self._watcher.on_iteration(phase, iteration, loss)
        if self._warned:
            raise KeyboardInterrupt
        self._warned = self._stop.is_set()

    def on_progress(self, phase: Phase, done: int, total: int) -> None:
        """Pass it on."""
        self._watcher.on_progress(phase, done, total)


@contextmanager
def flag_on_interrupt(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C sets the flag, the second one interrupts at once."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
