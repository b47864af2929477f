"""What nets cost to train, and methods compared by the nets that they trained to the end.

The effort of a net is that of its whole way: growth has trained smaller nets before, pruning larger
ones. It is counted in epochs of the full net: epochs times multiply-accumulates of the net that was
trained in them, as a share of the full one's. Scoring is not in it; see ``job_claims.times``.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from rich.table import Table

from splitgrow.paper.curves import Curve, Jobs, cell, curve_at
from splitgrow.paper.job_claims import by_method, new_table, percent
from splitgrow.paper.jobs import FULL, UNIFORM

FROM_SCRATCH = (*UNIFORM, FULL)  # each net of a job has a way of its own


def efforts(job: Mapping[str, Any]) -> list[float]:
    """Of each net of a job."""
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
    """By group and method, the last nets of those jobs that trained them to the end."""
    found = []
    for (group, method), members in by_method(jobs).items():
        ends = [job for job in members if job["points"] and job["points"][-1].get("finished")]
        if ends:
            nets = [job["points"][-1] for job in ends]
            accuracies = {
                job["job"]["seed"]: net["accuracy"] for job, net in zip(ends, nets, strict=True)
            }
            found.append({
                "group": group, "method": method, **(cell(accuracies) or {}),
                **{key: mean(net[key] for net in nets) for key in ("params", "macs", "epochs")},
                "effort": mean(efforts(job)[-1] for job in ends),
                "accuracies": list(accuracies.values()),
            })  # fmt: skip
    return found


def finished_table(rows: list[dict[str, Any]]) -> Table:
    """A line for each method."""
    table = new_table(
        "Nets trained to the end", "nets", "method", "seeds", "test %", "parameters K", "MACs M",
        "epochs", "effort",
        caption="means over the seeds; effort: epochs of the full net that cost as many MACs as "
        "all training up to this net",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["group"], row["method"], str(row["seeds"]), percent(row),
            f"{row['params'] / 1e3:.1f}", f"{row['macs'] / 1e6:.2f}", f"{row['epochs']:g}",
            f"{row['effort']:.2f}",
        )  # fmt: skip
    return table
