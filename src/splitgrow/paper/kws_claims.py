"""What the keyword jobs answer: the paper's accuracy within its size, and methods at equal size.

Where one net of a job is taken for a target, it is the one with the best validation accuracy of
those that are small enough; its test accuracy is only reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean
from typing import Any

from rich.table import Table

from splitgrow.paper import comparison, curves, effort, job_claims
from splitgrow.paper.comparison import Comparison
from splitgrow.paper.curves import Group, Jobs, Members, curve_of, name_of, std
from splitgrow.paper.jobs import Point
from splitgrow.paper.kws import EXPERIMENT, best
from splitgrow.paper.kws_bench import GROWABLE

ACCURACY = 0.9536  # of the paper's grown net, on the test clips
ROUNDS = 5  # seeds that a mean is taken over
AXES = {"params": "parameters", "operations": "operations"}
GRID = {
    "params": (4e3, 6e3, 10e3, 20e3, 30e3, 50e3, 100e3, 200e3),
    "operations": (0.7e6, 1e6, 2e6, 3e6, 5e6, 10e6, 20e6, 30e6),
}
# Nets that are trained for as long as growth begin with the third of the uniform widths.
LONG_FROM = {"params": 7e3, "operations": 1.25e6}
METHODS = job_claims.METHODS
COMPARISON = Comparison(GRID, curve_of)
# Each kind of splitting, and the axes on which it is judged.
KINDS = {
    "splitting": ("params", "operations"),
    "splitting-gain": ("params", "operations"),
    "splitting-params": ("params",),
    "splitting-macs": ("operations",),
}
RIVALS = ("random", "uniform", "uniform-long", "bn")


@dataclass(frozen=True)
class Limit:
    """How large a net may be."""

    name: str
    params: float
    operations: float = inf

    def admits(self, net: Mapping[str, Any]) -> bool:
        """Is a net small enough?"""
        return net["params"] <= self.params and net["operations"] <= self.operations

    def __str__(self) -> str:
        words = f"at most {size_words('params', self.params)} parameters"
        if self.operations < inf:
            words += f" and {size_words('operations', self.operations)} operations"
        return words


LIMITS = (Limit("paper", 282_600, 39_200_000), Limit("small", 100_000))


class Target(comparison.Target):
    """At sizes as they are."""

    def __str__(self) -> str:
        first = f"from {size_words(self.axis, self.start)} " if self.start else ""
        last = size_words(self.axis, self.limit)
        return self.words(f"{first}up to {last} {AXES[self.axis]}")


TARGETS = tuple(
    Target(
        axis, mine, theirs, limit=GRID[axis][-1],
        start=LONG_FROM[axis] if theirs == "uniform-long" else 0.0,
    )
    for mine, axes in KINDS.items()
    for axis in axes
    for theirs in RIVALS
)  # fmt: skip


def size_words(axis: str, size: float) -> str:
    """A size with its unit: 282.6K parameters, 39.2M operations."""
    return f"{size / 1e3:g}K" if axis == "params" else f"{size / 1e6:g}M"


def claims(jobs: Jobs) -> dict[str, Any]:
    """Everything that the jobs answer, as JSON has it."""
    curves.check_experiment(jobs, EXPERIMENT)
    groups = groups_of(jobs)
    return {
        "grid": {axis: list(sizes) for axis, sizes in GRID.items()},
        "reached": [
            row
            for key, members in groups.items()
            for limit in LIMITS
            for method, seeds in members.items()
            if (row := reached(limit, key, method, seeds)) is not None
        ],
        "groups": {name_of(key): COMPARISON.accuracies(members) for key, members in groups.items()},
        "targets": COMPARISON.answers(TARGETS, groups),
        "finished": effort.finished(jobs),
        **job_claims.told(jobs),
    }


def groups_of(jobs: Jobs) -> dict[Group, Members]:
    """The rows of nets that are compared with each other, by method and seed."""
    rows = [job for job in jobs if job["job"]["arch"] == GROWABLE]
    return {key: found for key, found in curves.groups_of(rows, METHODS).items() if found}


# --- within a size ---------------------------------------------------------------------------


def chosen(limit: Limit, seeds: Mapping[int, Mapping[str, Any]]) -> dict[int, Point]:
    """By seed, of the nets that are small enough, the one with the best validation accuracy."""
    small = {
        seed: [point for point in job["points"] if limit.admits(point)]
        for seed, job in seeds.items()
    }
    return {seed: best(points) for seed, points in small.items() if points}


def reached(
    limit: Limit, group: Group, method: str, seeds: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """What a method comes to within a size, as a mean over the rounds; None without such a net.

    For splitting it is judged: met or missed by the mean of five rounds, before that open.
    """
    found = list(chosen(limit, seeds).values())
    if not found:
        return None
    accuracies = [point["accuracy"] for point in found]
    return {
        "group": name_of(group), "limit": limit.name, "size": str(limit), "method": method,
        "rounds": len(found), "accuracy": mean(accuracies), "deviation": std(accuracies),
        **{axis: mean(point[axis] for point in found) for axis in AXES},
        "accuracies": accuracies,
        "verdict": _verdict(accuracies) if method in KINDS else None,
    }  # fmt: skip


def _verdict(accuracies: Sequence[float]) -> str:
    if len(accuracies) < ROUNDS:
        return "open"
    return "met" if mean(accuracies) >= ACCURACY else "missed"


# --- tables ----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The claims for the terminal: targets first, then what they rest on."""
    shown = [_reached_table(found["reached"])] if found["reached"] else []
    if found["targets"]:
        shown.append(job_claims.targets_table(found["targets"], size_words))
    shown += effort.ends_tables("nets trained to the end", found["finished"])
    for name, group in found["groups"].items():
        for axis, words in AXES.items():
            title = f"{name}: test accuracy (%) against {words}"
            sizes = [size_words(axis, size) for size in found["grid"][axis]]
            shown.append(job_claims.accuracy_table(title, words, sizes, group[axis]))
    return shown + job_claims.told_tables(found)


def _reached_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = job_claims.new_table(
        f"Target: {ACCURACY:.2%} on the test clips, mean of {ROUNDS} rounds",
        "size", "method", "verdict", "test %", "params K", "ops M", "rounds",
        caption="of each round's nets of that size, the one with the best validation accuracy; "
        "open: fewer rounds",
    )  # fmt: skip
    for row in rows:
        spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.2f}"
        sizes = (f"{row['params'] / 1e3:.1f}", f"{row['operations'] / 1e6:.1f}")
        table.add_row(row["size"], _method(row), row["verdict"] or "",
                      f"{100 * row['accuracy']:.2f}{spread}", *sizes,
                      str(row["rounds"]))  # fmt: skip
    return table


def _method(row: Mapping[str, Any]) -> str:
    return f"{row['method']}, retrain" if ", retrain," in row["group"] else str(row["method"])
