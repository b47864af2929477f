"""What nets cost to train, and methods compared by the nets that they trained to the end.

The effort of a net is that of its whole way: growth has trained smaller nets before, pruning larger
ones. It is counted in epochs of the full net: epochs times multiply-accumulates of the net that was
trained in them, as a share of the full one's. Scoring is not in it; see ``job_claims.times``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich.table import Table

from splitgrow.paper.curves import Curve, Jobs, cell, curve_at, difference
from splitgrow.paper.job_claims import by_method, new_table, percent, points
from splitgrow.paper.jobs import FULL, UNIFORM

FROM_SCRATCH = (*UNIFORM, FULL)  # each net of a job has a way of its own


def efforts(job: Mapping[str, Any]) -> list[float]:
    """Of each net of a job; a net that was taken out of its job brings its own along."""
    if all("effort" in point for point in job["points"]):
        return [point["effort"] for point in job["points"]]
    full = job["full"]["macs"]
    found, spent, epochs = [], 0.0, 0
    for point in job["points"]:
        if job["job"]["method"] in FROM_SCRATCH:
            spent, epochs = 0.0, 0
        spent += (point["epochs"] - epochs) * point["macs"] / full
        epochs = point["epochs"]
        found.append(spent)
    return found


def effort_curve(job: Mapping[str, Any]) -> Curve:
    """Rising efforts, and accuracies."""
    return curve_at(job, efforts(job))


def finished(jobs: Jobs) -> list[dict[str, Any]]:
    """The last nets of those jobs that trained them to the end: see ``ends``."""
    return ends([job for job in jobs if job["points"] and job["points"][-1].get("finished")])


def ends(jobs: Jobs) -> list[dict[str, Any]]:
    """By group and method, the last nets of jobs, and how far splitting's are above them."""
    found = []
    by_group = {key: {job["job"]["seed"]: job for job in members}
                for key, members in by_method(jobs).items()}  # fmt: skip
    for (group, method), seeds in by_group.items():
        nets = [job["points"][-1] for job in seeds.values()]
        accuracies = _last(seeds)
        found.append({
            "group": group, "method": method, **(cell(accuracies) or {}),
            **{key: mean(net[key] for net in nets) for key in ("params", "macs", "epochs")},
            "effort": mean(efforts(job)[-1] for job in seeds.values()),
            "accuracies": list(accuracies.values()),
            "splitting above": None if method == "splitting" else
            difference(_last(by_group.get((group, "splitting"), {})), accuracies),
        })  # fmt: skip
    return found


def _last(seeds: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    return {seed: job["points"][-1]["accuracy"] for seed, job in seeds.items()}


def ends_tables(title: str, rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """A table for each group, with a line for each method."""
    groups = dict.fromkeys(row["group"] for row in rows)
    return [
        _ends_table(f"{group}: {title}", [row for row in rows if row["group"] == group])
        for group in groups
    ]


def _ends_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table(
        title, "method", "n", "test %", "ahead", "params K", "MACs M", "epochs", "effort",
        caption="means over n seeds; ahead: points of splitting above it, paired by seed; effort: "
        "epochs of the full net that cost as many MACs as all training up to this net",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["method"], str(row["seeds"]), percent(row), points(row["splitting above"]),
            f"{row['params'] / 1e3:.1f}", f"{row['macs'] / 1e6:.2f}", f"{row['epochs']:g}",
            f"{row['effort']:.2f}",
        )  # fmt: skip
    return table
