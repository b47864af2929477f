"""The stages of a phase: each has a seed of its own, and its time is taken."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager


def seed_of(seed: int, phase: int, stage: str) -> int:
    """A seed of its own for each stage of each phase, so that a resumed run repeats it."""
    digest = hashlib.sha256(f"{seed}/{phase}/{stage}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


class Clock:
    """Seconds spent, by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, what: str) -> Iterator[None]:
        """Take the time of a block."""
        start = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - start
