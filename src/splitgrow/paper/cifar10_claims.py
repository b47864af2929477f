"""What the CIFAR-10 jobs answer: which method is better at equal size, and by how much.

Nets of different methods never have the same size, so curves are compared between their points:
accuracy is interpolated linearly in log(size), and nowhere beyond a job's smallest and largest
net. What a job lacks is left out of the comparison, and said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from rich.table import Table

from splitgrow.errors import InputError
from splitgrow.paper.stats import pearson, quartiles

Jobs = Sequence[Mapping[str, Any]]
Cell = dict[str, Any]  # a mean, a standard deviation (None for one seed), and of how many
Group = tuple[str, str, str]  # arch, after, activation

GRID = (0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)  # of the full net
AXES = {"params": "parameters", "macs": "MACs"}
SPLITTING = ("splitting", "splitting-params", "splitting-macs")
JUDGED = {"params": "splitting", "macs": "splitting-macs"}  # what the targets are about
METHODS = (*SPLITTING, "random", "uniform", "uniform-long", "l1", "bn")


@dataclass(frozen=True)
class Target:
    """``mine`` is to be above ``theirs`` by ``margin`` at every size of the grid up to ``limit``.

    A margin of 0 means above, or where ``ties`` is set, not below.
    """

    axis: str
    mine: str
    theirs: str
    margin: float = 0.0
    limit: float = 0.3
    ties: bool = False

    def is_met(self, difference: float) -> bool:
        """At one size."""
        if self.margin > 0 or self.ties:
            return difference >= self.margin
        return difference > 0

    def __str__(self) -> str:
        by = f" by {100 * self.margin:g} % points" if self.margin else ""
        words = "not below" if self.ties else "above"
        return f"{self.mine} {words} {self.theirs}{by}, up to {self.limit:.0%} of {self.axis}"


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
    _check(jobs)
    groups = groups_of(jobs)
    return {
        "grid": list(GRID),
        "groups": {name_of(key): _compared(members) for key, members in groups.items()},
        "targets": [
            answer
            for key, members in groups.items()
            for target in TARGETS
            if (answer := _answered(target, key, members)) is not None
        ],
        "time": _times(jobs),
        "gain": _gains(jobs),
        "structures": [_structure(job) for job in jobs if job["points"]],
    }


def _check(jobs: Jobs) -> None:
    for i, job in enumerate(jobs):
        if job.get("experiment") != "cifar10":
            raise InputError(
                f"jobs[{i}]: expected a result of the experiment 'cifar10', got one of "
                f"{job.get('experiment')!r}. Give the files that the cifar10 jobs wrote."
            )


# --- curves ----------------------------------------------------------------------------------

Members = dict[str, dict[int, Mapping[str, Any]]]  # method -> seed -> job


def groups_of(jobs: Jobs) -> dict[Group, Members]:
    """The jobs that are compared with each other, by method and seed; those with any net.

    Nets of uniform width start from scratch and train for one phase, just as every retrained net
    does: where they were run once, they stand beside the retrained ones too.
    """
    found: dict[Group, Members] = {}
    for job in (job for job in jobs if job["points"]):
        j = job["job"]
        group = found.setdefault((j["arch"], j["after"], j["activation"]), {})
        group.setdefault(j["method"], {})[j["seed"]] = job
    for (arch, _, activation), group in found.items():
        plain = found.get((arch, "finetune", activation), {}).get("uniform")
        if plain and "uniform" not in group:
            group["uniform"] = plain
    return {key: _ordered(found[key]) for key in sorted(found)}


def _ordered(group: Members) -> Members:
    known = [method for method in METHODS if method in group]
    return {method: dict(sorted(group[method].items())) for method in known}


def name_of(group: Group) -> str:
    """A group in words."""
    return ", ".join(group)


def curve(job: Mapping[str, Any], axis: str) -> tuple[list[float], list[float]]:
    """Rising sizes as shares of the full net, and accuracies; of equal sizes the last net's."""
    full = job["full"][axis]
    by_size = {point[axis] / full: point["accuracy"] for point in job["points"]}
    sizes = sorted(by_size)
    return sizes, [by_size[size] for size in sizes]


def accuracy_at(job: Mapping[str, Any], axis: str, size: float) -> float | None:
    """The accuracy at a share of the full net, linear in log(size); None out of the job's range."""
    sizes, accuracies = curve(job, axis)
    if not sizes[0] <= size <= sizes[-1]:
        return None
    return float(np.interp(log(size), [log(s) for s in sizes], accuracies))


def _seeds_at(seeds: Mapping[int, Mapping[str, Any]], axis: str, size: float) -> dict[int, float]:
    """By seed, the accuracy at a size, of the seeds that reach it."""
    found = {seed: accuracy_at(job, axis, size) for seed, job in seeds.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _compared(members: Members) -> dict[str, Any]:
    """Every method at every size, and how far each kind of splitting is above it."""
    return {
        "accuracy": {
            axis: {method: [_cell(_seeds_at(seeds, axis, size)) for size in GRID]
                   for method, seeds in members.items()}
            for axis in AXES
        },
        "difference": {
            axis: {mine: {theirs: [difference(members, axis, mine, theirs, size) for size in GRID]
                          for theirs in members if theirs != mine}
                   for mine in SPLITTING if mine in members}
            for axis in AXES
        },
    }  # fmt: skip


def _cell(by_seed: Mapping[int, float]) -> Cell | None:
    values = list(by_seed.values())
    return {"mean": mean(values), "std": _std(values), "seeds": len(values)} if values else None


def _std(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def difference(members: Members, axis: str, mine: str, theirs: str, size: float) -> Cell | None:
    """Mine minus theirs: over the seeds that both have, or of the means where they share none."""
    a, b = (_seeds_at(members[method], axis, size) for method in (mine, theirs))
    paired = [a[seed] - b[seed] for seed in a if seed in b]
    if paired:
        return {"mean": mean(paired), "std": _std(paired), "pairs": len(paired)}
    if not a or not b:
        return None
    return {"mean": mean(a.values()) - mean(b.values()), "std": None, "pairs": 0}


# --- targets ---------------------------------------------------------------------------------


def _answered(target: Target, group: Group, members: Members) -> dict[str, Any] | None:
    """Met, missed, or open: nothing failed, but some sizes from the seed on lack a net."""
    if target.mine not in members or target.theirs not in members:
        return None
    sizes, missing = [], []
    for size in _asked(target, members[target.mine]):
        found = difference(members, target.axis, target.mine, target.theirs, size)
        if found is None:
            missing.append(size)
        else:
            sizes.append({"size": size, **found, "met": target.is_met(found["mean"])})
    least = min(sizes, key=lambda cell: cell["mean"], default=None)
    return {
        "group": name_of(group), "axis": target.axis, "target": str(target),
        "mine": target.mine, "theirs": target.theirs, "margin": target.margin,
        "verdict": _verdict(sizes, missing), "least": least, "sizes": sizes,
        "sizes without data": missing,
    }  # fmt: skip


def _asked(target: Target, seeds: Mapping[int, Mapping[str, Any]]) -> list[float]:
    """The grid from the seed net's size to the limit."""
    starts = [curve(job, target.axis)[0][0] for job in seeds.values()]
    return [size for size in GRID if min(starts) <= size <= target.limit]


def _verdict(sizes: Sequence[Cell], missing: Sequence[float]) -> str:
    if not all(cell["met"] for cell in sizes):
        return "missed"
    return "met" if sizes and not missing else "open"


# --- time, gain, structures ------------------------------------------------------------------


def _by_method(jobs: Jobs) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The jobs of all seeds by group and method, without what a group borrows."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job in jobs:
        j = job["job"]
        group = name_of((j["arch"], j["after"], j["activation"]))
        found.setdefault((group, j["method"]), []).append(job)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], _rank(item[0][1]))))


def _rank(method: str) -> int:
    return METHODS.index(method) if method in METHODS else len(METHODS)


def _times(jobs: Jobs) -> list[dict[str, Any]]:
    """Seconds of all phases of all seeds; the share is scoring against training."""
    found = []
    for (group, method), members in _by_method(jobs).items():
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


def _gains(jobs: Jobs) -> list[dict[str, Any]]:
    """Whether the changes of the loss came as predicted, which is negative: a fall.

    Changes differ by orders of magnitude, so their logarithms are correlated too, over the splits
    that lowered the loss. The ratio is measured / predicted.
    """
    found = []
    for (group, method), members in _by_method(jobs).items():
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


def _structure(job: Mapping[str, Any]) -> dict[str, Any]:
    """The last net of a job."""
    j, last = job["job"], job["points"][-1]
    return {
        "group": name_of((j["arch"], j["after"], j["activation"])), "method": j["method"],
        "seed": j["seed"], "params": last["params"], "macs": last["macs"],
        "accuracy": last["accuracy"], "widths": dict(last["widths"]),
    }  # fmt: skip


# --- tables ----------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """The claims for the terminal: targets first, then what they rest on."""
    shown = [_targets_table(found["targets"])] if found["targets"] else []
    for name, group in found["groups"].items():
        shown += [_accuracy_table(found["grid"], name, axis, group["accuracy"][axis])
                  for axis in AXES]  # fmt: skip
        shown += [
            _difference_table(found["grid"], name, axis, mine, group["difference"][axis][mine])
            for axis, mine in JUDGED.items()
            if group["difference"][axis].get(mine)
        ]
    shown += [_time_table(found["time"])] if found["time"] else []
    shown += [_gain_table(found["gain"])] if found["gain"] else []
    names = dict.fromkeys(row["group"] for row in found["structures"])
    shown += [_structure_table(name, found["structures"]) for name in names]
    return shown


def _table(title: str, *headers: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    return table


def _targets_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    caption = "differences in points of test accuracy; open: none failed, but some sizes lack a net"
    table = _table("Targets, at equal size", "nets", "target", "verdict", "smallest difference",
                   "sizes met", "sizes without a net", caption=caption)  # fmt: skip
    for row in rows:
        least = row["least"]
        number = f"{_points(least)} at {_share(least['size'])}" if least else ""
        met = sum(cell["met"] for cell in row["sizes"])
        without = ", ".join(map(_share, row["sizes without data"]))
        table.add_row(row["group"], row["target"], row["verdict"], number,
                      f"{met} of {len(row['sizes'])}", without)  # fmt: skip
    return table


def _share(size: float) -> str:
    return f"{100 * size:g}%"


def _points(cell: Mapping[str, Any] | None) -> str:
    """A difference in points, with its sign."""
    if cell is None:
        return ""
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.1f}"
    return f"{100 * cell['mean']:+.1f}{spread}"


def _percent(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    spread = "" if cell["std"] is None else f" ± {100 * cell['std']:.1f}"
    return f"{100 * cell['mean']:.1f}{spread}"


def _accuracy_table(
    grid: Sequence[float], name: str, axis: str, methods: Mapping[str, Sequence[Cell | None]]
) -> Table:
    seeds = [cell["seeds"] for cells in methods.values() for cell in cells if cell]
    title = f"{name}: test accuracy (%) against {AXES[axis]}"
    caption = f"mean ± standard deviation over at most {max(seeds)} seeds" if seeds else None
    table = _table(title, "of the full net", *methods, caption=caption)
    for i, size in enumerate(grid):
        table.add_row(_share(size), *(_percent(cells[i]) for cells in methods.values()))
    return table


def _difference_table(
    grid: Sequence[float],
    name: str,
    axis: str,
    mine: str,
    others: Mapping[str, Sequence[Cell | None]],
) -> Table:
    title = f"{name}: {mine} minus each method, in points, against {AXES[axis]}"
    table = _table(title, "of the full net", *others, caption="paired by seed")
    for i, size in enumerate(grid):
        table.add_row(_share(size), *(_points(cells[i]) for cells in others.values()))
    return table


def _time_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Time, all phases of all seeds", "nets", "method", "jobs", "training (s)",
                   "scoring (s)", "splitting (s)", "scoring / training")  # fmt: skip
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.2%}"
        spent = [f"{row[kind]:.1f}" for kind in ("train", "score", "split")]
        table.add_row(row["group"], row["method"], str(row["jobs"]), *spent, share)
    return table


def _gain_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Splits: measured change of the loss against the predicted", "nets", "method",
                   "splits", "lowered the loss", "r", "r of logs",
                   "measured / predicted, median", "quartiles")  # fmt: skip
    for row in rows:
        rs = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("r", "r of logs")]
        low, high = row["quartiles"]
        table.add_row(row["group"], row["method"], str(row["splits"]), str(row["falls"]), *rs,
                      f"{row['median ratio']:.2g}", f"{low:.2g} to {high:.2g}")  # fmt: skip
    return table


def _structure_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Median widths over the seeds: a line for each unit, a column for each method."""
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted((r for r in rows if r["group"] == name), key=lambda r: _rank(r["method"])):
        by_method.setdefault(row["method"], []).append(row)
    table = _table(f"{name}: channels of the last net, median of the seeds", "unit", *by_method)
    units = dict.fromkeys(unit for row in rows if row["group"] == name for unit in row["widths"])
    for unit in units:
        table.add_row(unit, *(_median_of([r["widths"].get(unit) for r in members])
                              for members in by_method.values()))  # fmt: skip
    table.add_section()
    for key, words in (("params", "parameters"), ("macs", "MACs")):
        table.add_row(words, *(_median_of([r[key] for r in members])
                               for members in by_method.values()))  # fmt: skip
    return table


def _median_of(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.0f}" if known else ""
