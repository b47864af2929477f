"""The table at the top: each run in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from splitgrow.report.history import Run
from splitgrow.report.words import brief, duration, short, times, whole
from splitgrow.show import count

REASONS = {
    "phases": "number of phases reached",
    "params": "no further split fits the parameter budget",
    "macs": "no further split fits the MAC budget",
    "metric": "metric reached",
    "stable": "splitting stable: no neuron is left that gains by a split",
    "refused": "no step of the split lowered the loss",
    "policy": "the policy lets no neuron grow",
}


@dataclass(frozen=True)
class Row:
    """One run in the table."""

    label: str
    method: str
    phases: str
    params: str
    macs: str
    loss: str
    metrics: tuple[str, ...]
    time: str
    stopped: str


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run that no other run has."""
    names = Counter(run.name for run in runs)
    taken: Counter[str] = Counter()
    result = []
    for run in runs:
        label = run.name if names[run.name] == 1 else f"{run.name} ({run.directory.name})"
        taken[label] += 1
        result.append(label if taken[label] == 1 else f"{label} #{taken[label]}")
    return result


def metric_names(runs: Sequence[Run]) -> list[str]:
    """The names of all metrics, in the order of their first appearance."""
    return list(dict.fromkeys(m for run in runs for phase in run.phases for m in phase.metrics))


def rows(runs: Sequence[Run]) -> list[Row]:
    """The lines of the table."""
    metrics = metric_names(runs)
    return [_row(run, label, metrics) for run, label in zip(runs, labels(runs), strict=True)]


def _row(run: Run, label: str, metrics: Sequence[str]) -> Row:
    first, last = run.phases[0], run.last
    return Row(
        label=label,
        method=run.method,
        phases=f"{len(run.phases):,}",
        params=change(brief(first.params), brief(last.params)),
        macs=change(brief(first.macs), brief(last.macs)),
        loss=change(short(first.loss, 3), short(last.loss, 3)),
        metrics=tuple(
            change(short(first.metrics.get(name)), short(last.metrics.get(name)))
            for name in metrics
        ),
        time=duration(sum(phase.seconds for phase in run.phases)),
        stopped=reason(run),
    )


def change(before: str, after: str) -> str:
    """``1 → 2``, or one of them where they are the same."""
    return after if before == after else f"{before} → {after}"


def reason(run: Run) -> str:
    """Why the run ended, or that it has not."""
    if run.stopped is None:
        status = run.settings.get("status")
        return f"not finished ({status})" if isinstance(status, str) else "not finished"
    return REASONS.get(run.stopped, run.stopped)


def headline(runs: Sequence[Run]) -> str:
    """The title of the page."""
    return f"How {runs[0].name} grew" if len(runs) == 1 else f"How {len(runs)} runs grew"


def lead(runs: Sequence[Run]) -> str:
    """What happened, in a sentence or two."""
    if len(runs) > 1:
        phases = sum(len(run.phases) for run in runs)
        splits = sum(len(run.splits) for run in runs)
        total = f"{count(phases, 'phase')} and {count(splits, 'split')} in {len(runs)} runs"
        return f"{total}{_range(runs)}."
    run = runs[0]
    end = "It has not finished" if run.stopped is None else f"Why it stopped: {reason(run)}"
    return f"{_growth(run)}{_first_metric(run)}. {end}."


def _growth(run: Run) -> str:
    before, after = run.phases[0].params, run.last.params
    phases = count(len(run.phases), "phase")
    if before is None or after is None:
        return f"The network was trained for {phases}"
    if before == after:
        return f"The network stayed at {whole(after)} parameters in {phases}"
    factor = times(before, after)
    grown = f" ({factor} as many)" if factor else ""
    return f"The network grew from {before:,} to {after:,} parameters{grown} in {phases}"


def _range(runs: Sequence[Run]) -> str:
    """Where the first metric ended, from the lowest run to the highest."""
    for name in metric_names(runs):
        ends = [
            (r.last.metrics.get(name), label) for r, label in zip(runs, labels(runs), strict=True)
        ]
        known = sorted((value, label) for value, label in ends if value is not None)
        if len(known) > 1:
            (low, worst), (high, best) = known[0], known[-1]
            return f"; {name} ended between {short(low)} ({worst}) and {short(high)} ({best})"
    return ""


def _first_metric(run: Run) -> str:
    for name, after in run.last.metrics.items():
        before = run.phases[0].metrics.get(name)
        if before is not None and after is not None and len(run.phases) > 1:
            return f"; {name} went from {short(before)} to {short(after)}"
        if after is not None:
            return f"; {name} is {short(after)}"
    return ""
