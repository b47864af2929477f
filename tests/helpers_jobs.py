"""What the tests of every study of jobs need: nets that are traced once, points without seconds."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from splitgrow.paper.bench import Bench
from splitgrow.paper.job_study import measured
from splitgrow.phase import Phase

KNOWN: dict[Any, Any] = {}


def remembered(net: nn.Module, example: tuple[Tensor]) -> Any:
    """A net's cost and widths, traced once for each of its shapes: tracing takes most time here."""
    key = tuple((name, p.shape) for name, p in net.named_parameters())
    if key not in KNOWN:
        KNOWN[key] = measured(net, example)
    return copy.deepcopy(KNOWN[key])


def timeless(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in p.items() if key != "seconds"} for p in points]


def column(found: dict[str, Any], key: str) -> list[Any]:
    return [point[key] for point in found["points"]]


def never_read(folder: Path) -> Any:
    """In place of a study's data: says which process reads, and does not come to an end."""
    (folder / "pid.tmp").write_text(str(os.getpid()))
    (folder / "pid.tmp").rename(folder / "pid")
    time.sleep(600)


class Killed(BaseException):
    """As if the process had ended here."""


def killed_at(number: int, train: Callable[..., None], trained: list[int]) -> Callable[..., None]:
    """The ``_train`` of a bench until it is killed in a phase; ``trained`` gets those before."""

    def recorded(bench: Bench[Any], net: nn.Module, phase: Phase, *rest: Any) -> None:
        if phase.number == number:
            raise Killed
        trained.append(phase.number)
        train(bench, net, phase, *rest)

    return recorded
