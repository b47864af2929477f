"""Nets of given sizes, which every method ends with: the same jobs once for each size.

Jobs of one size are like others, in a folder of that size. Here the last nets of all sizes become
one row of nets for each method and seed, so that they are compared and drawn like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from splitgrow.errors import InputError
from splitgrow.paper import cifar10_claims
from splitgrow.paper.curves import Jobs
from splitgrow.paper.effort import efforts, ends, ends_tables
from splitgrow.paper.job_claims import times, told_tables
from splitgrow.paper.job_runs import Result, finished

PLACE = "sizes"  # in the folder of the study


def folder_of(study: Path, size: float) -> Path:
    """Where the jobs of a size are."""
    return study / PLACE / f"{size:g}"


def read(study: Path) -> dict[float, list[Result]]:
    """The jobs that are done, by rising sizes; nothing where there are none."""
    places = {float(folder.parent.name): folder.parent for folder in study.glob(f"{PLACE}/*/jobs")}
    found = {size: finished(places[size], "cifar10") for size in sorted(places)}
    settings = [
        {key: value for key, value in jobs[0]["settings"].items() if key != "size"}
        for jobs in found.values()
    ]
    if any(each != settings[0] for each in settings):
        raise InputError(
            f"{study / PLACE}: jobs of different sizes were run with other settings, too, and do "
            "not compare. Run each setting with a --folder of its own."
        )
    return found


def joined(by_size: Mapping[float, Jobs]) -> list[Result]:
    """A row of nets for each method and seed: the last net of its job of every size."""
    rows: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for jobs in by_size.values():
        for job in jobs:
            rows.setdefault(tuple(job["job"].values()), []).append(job)
    return [_row(jobs) for jobs in rows.values()]


def _row(jobs: Sequence[Mapping[str, Any]]) -> Result:
    return {**jobs[0], "points": [_end(job) for job in jobs if job["points"]]}


def _end(job: Mapping[str, Any]) -> dict[str, Any]:
    """The last net of a job, as if nothing had come before it."""
    effort = {"effort": efforts(job)[-1]}
    return {**job["points"][-1], **effort, "finished": False, "split": None}


def claims(by_size: Mapping[float, Jobs]) -> dict[str, Any]:
    """What the nets of all sizes answer, as JSON has it."""
    everything = [job for jobs in by_size.values() for job in jobs]
    return {
        **cifar10_claims.claims(joined(by_size)),
        "ends": [{"size": size, "nets": ends(jobs)} for size, jobs in by_size.items()],
        "time": times(everything),
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The claims for the terminal: the nets of each size, then what they answer together."""
    shown = [
        table
        for row in found["ends"]
        for table in ends_tables(
            f"{100 * row['size']:g}% of the full net's parameters", row["nets"]
        )
    ]
    several = len(found["ends"]) > 1  # else there are no curves
    return shown + (cifar10_claims.tables(found) if several else told_tables(found))
