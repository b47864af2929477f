"""Methods compared at equal size, from the jobs of a study.

Nets of different methods never have the same size, so curves are compared between their points:
accuracy is interpolated linearly in log(size), and nowhere beyond a job's smallest and largest
net. What a job lacks is left out of the comparison, and said to be missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import mean, stdev
from typing import Any

import numpy as np

from splitgrow.errors import InputError

Jobs = Sequence[Mapping[str, Any]]
Cell = dict[str, Any]  # a mean, a standard deviation (None for one seed), and of how many
Group = tuple[str, str, str]  # arch, after, activation
Members = dict[str, dict[int, Mapping[str, Any]]]  # method -> seed -> job
Curve = tuple[list[float], list[float]]  # rising sizes, and accuracies


# --- which jobs are compared -----------------------------------------------------------------


def check_experiment(jobs: Jobs, experiment: str) -> None:
    """Raise where a job is not of the study."""
    for i, job in enumerate(jobs):
        if job.get("experiment") != experiment:
            raise InputError(
                f"jobs[{i}]: expected a result of the experiment {experiment!r}, got one of "
                f"{job.get('experiment')!r}. Give the files that the {experiment} jobs wrote."
            )


def groups_of(jobs: Jobs, methods: Sequence[str]) -> dict[Group, Members]:
    """The jobs that are compared with each other, by method and seed; those with any net.

    Nets of uniform width start from scratch and train for one phase, just as every retrained net
    does: where they were run once, they stand beside the retrained ones too.

    Args:
        jobs: of one study.
        methods: those that are compared, in this order.
    """
    found: dict[Group, Members] = {}
    for job in (job for job in jobs if job["points"]):
        group = found.setdefault(group_of(job), {})
        group.setdefault(job["job"]["method"], {})[job["job"]["seed"]] = job
    for (arch, _, activation), group in found.items():
        plain = found.get((arch, "finetune", activation), {}).get("uniform")
        if plain and "uniform" not in group:
            group["uniform"] = plain
    return {key: _ordered(found[key], methods) for key in sorted(found)}


def _ordered(group: Members, methods: Sequence[str]) -> Members:
    known = [method for method in methods if method in group]
    return {method: dict(sorted(group[method].items())) for method in known}


def group_of(job: Mapping[str, Any]) -> Group:
    """What a job has in common with those that it is compared with."""
    j = job["job"]
    return j["arch"], j["after"], j["activation"]


def name_of(group: Group) -> str:
    """A group in words."""
    return ", ".join(group)


# --- at equal size ---------------------------------------------------------------------------


def curve_of(job: Mapping[str, Any], axis: str, unit: float = 1.0) -> Curve:
    """Rising sizes in units, and accuracies."""
    return curve_at(job, [point[axis] / unit for point in job["points"]])


def curve_at(job: Mapping[str, Any], places: Sequence[float]) -> Curve:
    """Rising places of a job's nets, and accuracies; of equal places the last net's.

    Without those that were trained on at the end, if there are others: no net in between was.
    """
    pairs = list(zip(places, job["points"], strict=True))
    shown = [pair for pair in pairs if not pair[1].get("finished")] or pairs
    accuracies = {place: point["accuracy"] for place, point in shown}
    rising = sorted(accuracies)
    return rising, [accuracies[place] for place in rising]


def accuracy_on(curve: Curve, size: float) -> float | None:
    """The accuracy at a size, linear in log(size); None out of the curve's range."""
    sizes, accuracies = curve
    if not sizes[0] <= size <= sizes[-1]:
        return None
    return float(np.interp(log(size), [log(s) for s in sizes], accuracies))


def seeds_at(curves: Mapping[int, Curve], size: float) -> dict[int, float]:
    """By seed, the accuracy at a size, of the seeds that reach it."""
    found = {seed: accuracy_on(curve, size) for seed, curve in curves.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def cell(by_seed: Mapping[int, float]) -> Cell | None:
    """Mean and deviation over the seeds."""
    values = list(by_seed.values())
    return {"mean": mean(values), "std": std(values), "seeds": len(values)} if values else None


def std(values: Sequence[float]) -> float | None:
    """Of a sample; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def difference(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Cell | None:
    """Mine minus theirs: over the seeds that both have, or of the means where they share none."""
    paired = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if paired:
        return {"mean": mean(paired), "std": std(paired), "pairs": len(paired)}
    if not mine or not theirs:
        return None
    return {"mean": mean(mine.values()) - mean(theirs.values()), "std": None, "pairs": 0}
