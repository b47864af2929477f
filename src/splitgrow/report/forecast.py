"""Figure 4: the change of loss that each split predicted, against the change it made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitgrow.report.history import Run, Split
from splitgrow.show import count

CLOSE = 2.0  # a prediction counts as close within this factor


@dataclass(frozen=True)
class Forecast:
    """A split that lowered the loss, as predicted: both gains are positive numbers."""

    run: int
    phase: int
    neurons: int
    predicted: float
    measured: float


@dataclass(frozen=True)
class ForecastFigure:
    """Figure 4, for all runs."""

    finding: str
    close: float
    points: tuple[Forecast, ...]
    left_out: str  # splits that a logarithmic axis cannot show, and why; empty if none


def forecast_figure(runs: Sequence[Run]) -> ForecastFigure:
    """Gains (minus the change of the loss) of all splits, and how many were predicted well."""
    points: list[Forecast] = []
    reasons: Counter[str] = Counter()
    for index, run in enumerate(runs):
        for phase, split in run.splits:
            obstacle = _obstacle(split)
            if obstacle:
                reasons[obstacle] += 1
            elif split.predicted is not None and split.measured is not None:
                gains = (-split.predicted, -split.measured)
                points.append(Forecast(index, phase.number, len(split.neurons), *gains))
    return ForecastFigure(_finding(points), CLOSE, tuple(points), _left_out(reasons))


def is_close(point: Forecast) -> bool:
    """Whether the prediction is within the factor ``CLOSE`` of the measurement."""
    return 1 / CLOSE <= point.measured / point.predicted <= CLOSE


def _obstacle(split: Split) -> str | None:
    """Why a logarithmic axis cannot show the split, or None."""
    if split.predicted is None:
        return "without a prediction"
    if split.measured is None:
        return "not measured"
    if split.measured >= 0:
        return "did not lower the loss"
    if split.predicted >= 0:
        return "predicted no gain"
    return None


def _left_out(reasons: Counter[str]) -> str:
    if not reasons:
        return ""
    listed = ", ".join(f"{number} {why}" for why, number in reasons.items())
    return f"Not drawn: {count(reasons.total(), 'split')} ({listed})."


def _finding(points: Sequence[Forecast]) -> str:
    if not points:
        return "No split to compare with its prediction"
    close = sum(is_close(point) for point in points)
    total = count(len(points), "split")
    return f"The prediction was within a factor of {CLOSE:g} for {close} of {total}"
