"""What the CIFAR-10 jobs answer: which method is better at equal size, and by how much.

Sizes are shares of the full net; see ``curves`` and ``comparison`` for how methods are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from splitgrow.paper import comparison, curves, effort, job_claims
from splitgrow.paper.comparison import Comparison
from splitgrow.paper.curves import Curve, Group, Jobs, Members, accuracy_on, curve_of, name_of

GRID = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)  # of the full net
AXES = {"params": "parameters", "macs": "MACs"}
SPLITTING = ("splitting", "splitting-gain", "splitting-params", "splitting-macs")
JUDGED = {"params": "splitting", "macs": "splitting-macs"}  # what the targets are about
METHODS = (*SPLITTING, "random", "uniform", "uniform-long", "l1", "bn")


class Target(comparison.Target):
    """At sizes that are shares of the full net."""

    def __str__(self) -> str:
        return self.words(f"up to {self.limit:.0%} of {self.axis}")


TARGETS = (
    Target("params", "splitting", "l1"),
    Target("params", "splitting", "bn"),
    Target("params", "splitting", "uniform", margin=0.02),
    Target("params", "splitting", "random", margin=0.01, limit=0.05),
    Target("params", "splitting", "random", ties=True),
    Target("params", "splitting", "uniform-long"),
    Target("macs", "splitting-macs", "l1"),
    Target("macs", "splitting-macs", "bn"),
    Target("macs", "splitting-macs", "uniform-long"),
)


def claims(jobs: Jobs) -> dict[str, Any]:
    """Everything that the jobs answer, as JSON has it."""
    curves.check_experiment(jobs, "cifar10")
    groups = groups_of(jobs)
    return {
        "grid": list(GRID),
        "groups": {name_of(key): _compared(members) for key, members in groups.items()},
        "targets": COMPARISON.answers(TARGETS, groups),
        "finished": effort.finished(jobs),
        **job_claims.told(jobs),
    }


# --- curves ----------------------------------------------------------------------------------


def groups_of(jobs: Jobs) -> dict[Group, Members]:
    """The jobs that are compared with each other, by method and seed; those with any net."""
    return curves.groups_of(jobs, METHODS)


def curve(job: Mapping[str, Any], axis: str) -> Curve:
    """Rising sizes as shares of the full net, and accuracies; of equal sizes the last net's."""
    return curve_of(job, axis, job["full"][axis])


def accuracy_at(job: Mapping[str, Any], axis: str, size: float) -> float | None:
    """The accuracy at a share of the full net, linear in log(size); None out of the job's range."""
    return accuracy_on(curve(job, axis), size)


COMPARISON = Comparison(dict.fromkeys(AXES, GRID), curve)


def _compared(members: Members) -> dict[str, Any]:
    """Every method at every size, and how far each kind of splitting is above it."""
    return {
        "accuracy": COMPARISON.accuracies(members),
        "difference": {axis: _differences(COMPARISON.seeds(members, axis)) for axis in AXES},
    }


def _differences(at: Mapping[str, Sequence[Mapping[int, float]]]) -> dict[str, Any]:
    return {
        mine: {
            theirs: list(map(curves.difference, at[mine], at[theirs]))
            for theirs in at
            if theirs != mine
        }
        for mine in SPLITTING
        if mine in at
    }


# --- tables ----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The claims for the terminal: targets first, then what they rest on."""
    shown = []
    if found["targets"]:
        shown.append(job_claims.targets_table(found["targets"], lambda _, size: _share(size)))
    shown += effort.ends_tables("nets trained to the end", found["finished"])
    for name, group in found["groups"].items():
        shown += _size_tables(found["grid"], name, group)
    return shown + job_claims.told_tables(found)


def _size_tables(grid: list[float], name: str, group: Mapping[str, Any]) -> list[Table]:
    header, sizes = "of the full net", list(map(_share, grid))
    shown = [
        job_claims.accuracy_table(
            f"{name}: test accuracy (%) against {words}", header, sizes, group["accuracy"][axis]
        )
        for axis, words in AXES.items()
    ]
    for axis, mine in JUDGED.items():
        if others := group["difference"][axis].get(mine):
            title = f"{name}: {mine} minus each method, in points, against {AXES[axis]}"
            shown.append(job_claims.difference_table(title, header, sizes, others))
    return shown


def _share(size: float) -> str:
    return f"{100 * size:g}%"
