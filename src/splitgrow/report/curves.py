"""Figure 1: the training loss over the iterations, and the cliff at each split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from splitgrow.report.history import Phase, Run, Split
from splitgrow.report.summary import labels
from splitgrow.show import count

POINTS = 600  # of a curve that is alone: about one for every other pixel
NAMED = 4  # runs that the title of the figure has room for
SHARED = 240  # of a curve among others: smoother, so that they can be told apart


@dataclass(frozen=True)
class Segment:
    """The curve of one phase. Where iterations were put together: mean, smallest, largest."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Cliff:
    """A split: where it is on the axis of iterations, and what it did to the loss."""

    x: int | None
    phase: int
    neurons: int
    step: float | None
    relative: bool
    before: float | None
    after: float | None
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Curve:
    """The training loss of one run."""

    segments: tuple[Segment, ...]
    cliffs: tuple[Cliff, ...]
    each: int  # iterations in one point
    missing: int  # iterations whose loss was not a number


@dataclass(frozen=True)
class LossFigure:
    """Figure 1, for all runs."""

    finding: str
    curves: tuple[Curve, ...]


def loss_figure(runs: Sequence[Run]) -> LossFigure:
    """The curves of all runs, and how often a split lowered the loss."""
    points = POINTS if len(runs) == 1 else SHARED
    return LossFigure(_finding(runs), tuple(curve(run, points) for run in runs))


def curve(run: Run, points: int = POINTS) -> Curve:
    """The loss of a run in at most about ``points`` points; no point spans a split."""
    total = sum(len(phase.curve) for phase in run.phases)
    each = max(1, -(-total // points))
    segments = (segment(phase, each) for phase in run.phases)
    return Curve(
        segments=tuple(s for s in segments if s.x),
        cliffs=tuple(_cliffs(run)),
        each=each,
        missing=sum(y is None for phase in run.phases for _, y in phase.curve),
    )


def segment(phase: Phase, each: int) -> Segment:
    """The curve of one phase, with ``each`` iterations put together into one point."""
    known = [(x, y) for x, y in phase.curve if y is not None]
    parts = [known[start : start + each] for start in range(0, len(known), each)]
    return Segment(
        x=tuple(sum(x for x, _ in part) / len(part) for part in parts),
        mean=tuple(sum(y for _, y in part) / len(part) for part in parts),
        low=tuple(min(y for _, y in part) for part in parts),
        high=tuple(max(y for _, y in part) for part in parts),
    )


def _cliffs(run: Run) -> Iterator[Cliff]:
    end = None
    for phase in run.phases:
        end = phase.curve[-1][0] if phase.curve else end
        if phase.split:
            yield _cliff(phase, phase.split, end)


def _cliff(phase: Phase, split: Split, x: int | None) -> Cliff:
    return Cliff(
        x=x,
        phase=phase.number,
        neurons=len(split.neurons),
        step=split.step,
        relative=split.relative,
        before=split.before,
        after=split.after,
        predicted=split.predicted,
        measured=split.measured,
    )


def _finding(runs: Sequence[Run]) -> str:
    splits = [split for run in runs for _, split in run.splits]
    known = [split.measured for split in splits if split.measured is not None]
    if not splits:
        return "The training loss; no split has been made yet"
    if not known:
        return f"The training loss and {count(len(splits), 'split')}"
    if 1 < len(runs) <= NAMED:
        return f"Splits that lowered the loss: {', '.join(_counts(runs))}"
    fell = sum(change < 0 for change in known)
    which = "measured splits" if len(known) < len(splits) else "splits"
    if len(known) == 1:
        return f"The loss {'fell' if fell else 'did not fall'} at the split"
    return f"The loss fell at {fell} of {len(known)} {which}"


def _counts(runs: Sequence[Run]) -> Iterator[str]:
    """``mine 5 of 5``: how many of the splits that were measured lowered the loss."""
    for run, label in zip(runs, labels(runs), strict=True):
        known = [split.measured for _, split in run.splits if split.measured is not None]
        yield f"{label} {sum(change < 0 for change in known)} of {len(known)}"
