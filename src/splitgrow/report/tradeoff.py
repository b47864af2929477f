"""Figure 5: what the size bought. A metric against parameters and against MACs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitgrow.report.history import Run
from splitgrow.report.summary import metric_names
from splitgrow.report.words import short

LOSS = "loss on the scoring batches"


@dataclass(frozen=True)
class Point:
    """A phase of a run."""

    phase: int
    params: int | None
    macs: int | None
    value: float


@dataclass(frozen=True)
class Metric:
    """One metric of all runs; a run without it has no points."""

    name: str
    finding: str
    runs: tuple[tuple[Point, ...], ...]


def tradeoff_figure(runs: Sequence[Run]) -> tuple[Metric, ...]:
    """The user's metrics, then the loss; those without any value are left out."""
    own = [
        metric(name, [_points(run, [p.metrics.get(name) for p in run.phases]) for run in runs])
        for name in metric_names(runs)
    ]
    loss = metric(LOSS, [_points(run, [p.loss for p in run.phases]) for run in runs])
    return tuple(m for m in [*own, loss] if any(m.runs))


def metric(name: str, runs: Sequence[tuple[Point, ...]]) -> Metric:
    """A metric with the sentence that says how it went."""
    return Metric(name, _finding(name, [points for points in runs if points]), tuple(runs))


def _points(run: Run, values: Sequence[float | None]) -> tuple[Point, ...]:
    """A point for each phase that has a value."""
    return tuple(
        Point(phase.number, phase.params, phase.macs, value)
        for phase, value in zip(run.phases, values, strict=True)
        if value is not None
    )


def _finding(name: str, runs: Sequence[tuple[Point, ...]]) -> str:
    if not runs:
        return f"No value of {name}"
    if len(runs) == 1:
        first, last = runs[0][0], runs[0][-1]
        if len(runs[0]) == 1:
            return f"The {name} is {short(last.value)}"
        return f"The {name} went from {short(first.value)} to {short(last.value)}"
    ends = sorted(points[-1].value for points in runs)
    return f"The {name} of {len(runs)} runs ended between {short(ends[0])} and {short(ends[-1])}"
