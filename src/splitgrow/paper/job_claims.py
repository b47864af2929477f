"""What the jobs of any study tell beside accuracy: time, gains of splits, structures; as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log
from statistics import median
from typing import Any

from rich.markup import escape
from rich.table import Table

from splitgrow.paper.curves import Cell, Jobs, group_of, name_of
from splitgrow.paper.jobs import FULL
from splitgrow.paper.stats import pearson, quartiles

# The order in which methods are listed.
METHODS = (
    "splitting", "splitting-gain", "splitting-params", "splitting-macs", "random", "uniform",
    "uniform-long", "l1", "bn",
)  # fmt: skip


def by_method(jobs: Jobs) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The jobs of all seeds by group and method, without what a group borrows."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job in jobs:
        found.setdefault((name_of(group_of(job)), job["job"]["method"]), []).append(job)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], _rank(item[0][1]))))


def _rank(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def times(jobs: Jobs) -> list[dict[str, Any]]:
    """Seconds of all phases of all seeds; the share is scoring against training."""
    found = []
    for (group, method), members in by_method(jobs).items():
        spent = {
            kind: sum(p["seconds"].get(kind, 0.0) for job in members for p in job["points"])
            for kind in ("train", "score", "split")
        }
        share = spent["score"] / spent["train"] if spent["train"] else None
        found.append({"group": group, "method": method, "jobs": len(members), **spent,
                      "share": share})  # fmt: skip
    return found


def splits_of(jobs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, float]]:
    """Every split that was both predicted and measured."""
    splits = [point["split"] for job in jobs for point in job["points"] if point.get("split")]
    return [s for s in splits if s["predicted"] and s["measured"] is not None]


def gains(jobs: Jobs) -> list[dict[str, Any]]:
    """Whether the changes of the loss came as predicted, which is negative: a fall.

    Changes differ by orders of magnitude, so their logarithms are correlated too, over the splits
    that lowered the loss. The ratio is measured / predicted.
    """
    found = []
    for (group, method), members in by_method(jobs).items():
        splits = splits_of(members)
        if not splits:
            continue
        falls = [s for s in splits if s["predicted"] < 0 and s["measured"] < 0]
        low, middle, high = quartiles([s["measured"] / s["predicted"] for s in splits])
        found.append({
            "group": group, "method": method, "splits": len(splits), "falls": len(falls),
            "r": pearson([s["predicted"] for s in splits], [s["measured"] for s in splits]),
            "r of logs": pearson([log(-s["predicted"]) for s in falls],
                                 [log(-s["measured"]) for s in falls]),
            "median ratio": middle, "quartiles": [low, high],
        })  # fmt: skip
    return found


def told(jobs: Jobs) -> dict[str, list[dict[str, Any]]]:
    """All of it, as JSON has it; of structures, those of nets that are not as published."""
    nets = [job for job in jobs if job["points"] and job["job"]["method"] != FULL]
    return {"time": times(jobs), "gain": gains(jobs), "structures": list(map(structure, nets))}


def structure(job: Mapping[str, Any]) -> dict[str, Any]:
    """The last net of a job."""
    j, last = job["job"], job["points"][-1]
    return {
        "group": name_of(group_of(job)), "method": j["method"], "seed": j["seed"],
        "params": last["params"], "macs": last["macs"], "accuracy": last["accuracy"],
        "widths": dict(last["widths"]),
    }  # fmt: skip


# --- tables ----------------------------------------------------------------------------------


def new_table(title: str, *headers: str, caption: str | None = None) -> Table:
    """A table without rows, the first column to the left."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, header in enumerate(headers):
        # folded where a terminal is narrow: names that are cut look alike
        table.add_column(
            header, justify="right" if i else "left", overflow="fold", no_wrap=header == "method"
        )
    return table


def told_tables(found: Mapping[str, Any]) -> list[Table]:
    """What ``told`` says, as far as there is any."""
    shown = [time_table(found["time"])] if found["time"] else []
    shown += [gain_table(found["gain"])] if found["gain"] else []
    names = dict.fromkeys(row["group"] for row in found["structures"])
    return shown + [structure_table(name, found["structures"]) for name in names]


def points(cell: Mapping[str, Any] | None) -> str:
    """A difference in points, with its sign."""
    if cell is None:
        return ""
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.1f}"
    return f"{100 * cell['mean']:+.1f}{spread}"


def percent(cell: Mapping[str, Any] | None) -> str:
    """An accuracy."""
    if cell is None:
        return ""
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.1f}"
    return f"{100 * cell['mean']:.1f}{spread}"


def targets_table(
    rows: Sequence[Mapping[str, Any]], size_words: Callable[[str, float], str]
) -> Table:
    """A line for each target; ``size_words(axis, size)`` names a size."""
    caption = "differences in points of test accuracy; open: none failed, but some sizes lack a net"
    table = new_table("Targets, at equal size", "nets", "target", "verdict", "smallest difference",
                      "sizes met", "sizes without a net", caption=caption)  # fmt: skip
    for row in rows:
        axis, least = row["axis"], row["least"]
        number = f"{points(least)} at {size_words(axis, least['size'])}" if least else ""
        met = sum(each["met"] for each in row["sizes"])
        without = ", ".join(size_words(axis, size) for size in row["sizes without data"])
        table.add_row(row["group"], row["target"], row["verdict"], number,
                      f"{met} of {len(row['sizes'])}", without)  # fmt: skip
    return table


def accuracy_table(
    title: str, header: str, sizes: Sequence[str], methods: Mapping[str, Sequence[Cell | None]]
) -> Table:
    """A line for each size, a column for each method."""
    seeds = [cell["seeds"] for cells in methods.values() for cell in cells if cell]
    most = max(seeds, default=0)
    table = new_table(title, header, *methods, caption=_over(most, seeds))
    for i, size in enumerate(sizes):
        table.add_row(
            size, *(percent(cells[i]) + _fewer(cells[i], most) for cells in methods.values())
        )
    return table


def _over(most: int, seeds: Sequence[int]) -> str | None:
    if most <= 1:
        return "of 1 seed" if seeds else None
    fewer = "; [n]: over n seeds alone" if min(seeds) < most else ""
    return escape(f"mean ± standard deviation over {most} seeds{fewer}")


def _fewer(cell: Mapping[str, Any] | None, most: int) -> str:
    """How many seeds a mean is of, where others are of more."""
    return "" if cell is None or cell["seeds"] == most else escape(f" [{cell['seeds']}]")


def difference_table(
    title: str, header: str, sizes: Sequence[str], others: Mapping[str, Sequence[Cell | None]]
) -> Table:
    """The same with differences."""
    table = new_table(title, header, *others, caption="paired by seed")
    for i, size in enumerate(sizes):
        table.add_row(size, *(points(cells[i]) for cells in others.values()))
    return table


def time_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each method."""
    table = new_table("Time, all phases of all seeds", "nets", "method", "jobs", "training (s)",
                      "scoring (s)", "splitting (s)", "scoring / training")  # fmt: skip
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.2%}"
        spent = [f"{row[kind]:.1f}" for kind in ("train", "score", "split")]
        table.add_row(row["group"], row["method"], str(row["jobs"]), *spent, share)
    return table


def gain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line for each method that splits."""
    table = new_table(
        "Splits: measured change of the loss against the predicted", "nets", "method", "splits",
        "falls", "r", "r of logs", "ratio", "quartiles",
        caption="falls: splits that lowered the loss; ratio: measured / predicted, the median",
    )  # fmt: skip
    for row in rows:
        rs = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("r", "r of logs")]
        low, high = row["quartiles"]
        table.add_row(row["group"], row["method"], str(row["splits"]), str(row["falls"]), *rs,
                      f"{row['median ratio']:.2g}", f"{low:.2g} to {high:.2g}")  # fmt: skip
    return table


def structure_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Median widths over the seeds: a line for each unit, a column for each method."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted((r for r in rows if r["group"] == name), key=lambda r: _rank(r["method"])):
        found.setdefault(row["method"], []).append(row)
    table = new_table(f"{name}: channels of the last net, median of the seeds", "unit", *found)
    units = dict.fromkeys(unit for row in rows if row["group"] == name for unit in row["widths"])
    for unit in units:
        table.add_row(unit, *(_median_of([r["widths"].get(unit) for r in members])
                              for members in found.values()))  # fmt: skip
    table.add_section()
    for key, words in (("params", "parameters"), ("macs", "MACs")):
        table.add_row(words, *(_median_of([r[key] for r in members])
                               for members in found.values()))  # fmt: skip
    return table


def _median_of(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.0f}" if known else ""
