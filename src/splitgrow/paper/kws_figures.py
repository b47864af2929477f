"""Figure 4 of the paper from the keyword jobs, and the part of it below 100K parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitgrow.paper.curve_figures import LOOKS, finished_nets, legend, line, title_of
from splitgrow.paper.curves import Jobs, Members
from splitgrow.paper.figures import PAGE, both, sheet
from splitgrow.paper.jobs import FULL
from splitgrow.paper.kws_claims import ACCURACY, AXES, COMPARISON, LIMITS, METHODS, groups_of
from splitgrow.paper.kws_table import PUBLISHED, full_net

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = {"params": (1e3, "thousands"), "operations": (1e6, "millions")}
Rows = Mapping[str, Mapping[str, Any]]  # nets by their names
COARSE, FINE = (1, 2, 5), tuple(round(0.1 * k, 1) for k in range(10, 100))  # digits of ticks
MOST = 10  # ticks
GROWN = "splitting"  # in the published rows
ABOVE = ("CRNN",)  # names of marks that have others to either side
SMALL_PRINT: dict[str, Any] = {"fontsize": 5.5, "color": "#444444"}
SMALL = LIMITS[1].params
CLOSE = 1.5  # within this factor of the largest, names are put outside
APART = 0.032  # of the panel's height, between two names
OURS: dict[str, Any] = {"color": "#444444", "ls": "none", "ms": 5, "mfc": "none"}


@dataclass(frozen=True)
class View:
    """A part of the figure: nets of at most so many parameters."""

    name: str
    most: float = float("inf")


VIEWS = (View("figure4"), View("figure4-small", SMALL))


def draw(jobs: Jobs, folder: Path) -> list[Path]:
    """A figure for each group of jobs and each view; finetuned nets have the plain names."""
    paths: list[Path] = []
    for (_, after, _), members in groups_of(jobs).items():
        tail = "" if after == "finetune" else f"-{after}"
        for view in VIEWS:
            paths += _figure(jobs, members, view, folder / f"kws-{view.name}{tail}")
    return paths


def _figure(jobs: Jobs, members: Members, view: View, path: Path) -> list[Path]:
    """Against parameters left, against operations right."""
    seen = _within(members, view.most)
    if not seen:
        return []
    with sheet(path, (PAGE, 4.0), (1, 2)) as (figure, axes):
        for letter, axis, ax in zip("ab", AXES, axes.flat, strict=True):
            _accuracy(ax, seen, axis)
            ax.set_ylim(*_heights(seen, view))
            _references(ax, jobs, axis, view)
            _frame(ax, axis)
            ax.set_title(f"({letter}) against {AXES[axis]}")
        legend(figure, axes.flat, title_of(seen))
    return both(path)


def _within(members: Members, most: float) -> Members:
    """The same jobs without their larger nets."""
    found: Members = {}
    for method, seeds in members.items():
        for seed, job in seeds.items():
            if small := [point for point in job["points"] if point["params"] <= most]:
                found.setdefault(method, {})[seed] = {**job, "points": small}
    return found


def _accuracy(ax: Axes, members: Members, axis: str) -> None:
    unit = UNITS[axis][0]
    for method, curves in COMPARISON.curves(members, axis).items():
        scaled = [([size / unit for size in sizes], found) for sizes, found in curves.values()]
        line(ax, scaled, LOOKS[method])
        finished_nets(
            ax, members[method].values(), lambda job: [p[axis] / unit for p in job["points"]],
            LOOKS[method],
        )  # fmt: skip


def _references(ax: Axes, jobs: Jobs, axis: str, view: View) -> None:
    """The rows of Table 1, as published and as we trained them; the paper's accuracy as a line."""
    ax.axhline(100 * ACCURACY, color="#888888", lw=0.8, ls=(0, (2, 2)), zorder=1,
               label=f"The paper's grown net: {ACCURACY:.2%}")  # fmt: skip
    published = {name: row for name, row in PUBLISHED.items() if row["params"] <= view.most}
    _marks(ax, published, axis, {**OURS, "marker": "*", "label": "Published (Table 1)"})
    ours = {name: net for name, net in _trained(jobs).items() if net["params"] <= view.most}
    _marks(ax, ours, axis, {**OURS, "marker": "h", "label": "The same nets, trained here"})
    _names(ax, published, ours, axis)


def _names(ax: Axes, published: Rows, ours: Rows, axis: str) -> None:
    """Beside a mark; the largest nets, whose marks hide each other, are listed outside."""
    every = [*published.values(), *ours.values()]
    edge = max((row[axis] for row in every), default=0.0) / CLOSE
    for name, row in [*published.items(), *ours.items()]:
        if name == GROWN or row[axis] < edge:
            _name(ax, name, row, axis)
    _list(ax, {n: row for n, row in published.items() if row[axis] >= edge and n != GROWN}, ours)


def _name(ax: Axes, name: str, row: Mapping[str, Any], axis: str) -> None:
    place = (row[axis] / UNITS[axis][0], 100 * row["accuracy"])
    # Our own nets are to the left of the paper's, on its line.
    words, at, side = name, (4.5, 0.0), "left"
    if name == GROWN:
        words, at, side = "the paper's splitting", (4.0, 11.0), "right"
    elif name in ABOVE:
        at, side = (0.0, 6.5), "center"
    ax.annotate(
        words, place, xytext=at, textcoords="offset points", ha=side, va="center", **SMALL_PRINT
    )


def _list(ax: Axes, published: Rows, ours: Rows) -> None:
    """Names with both accuracies, each about as high as its published mark."""
    low, high = ax.get_ylim()
    apart = APART * (high - low)
    style: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", **SMALL_PRINT}
    last = high - apart
    if published:
        ax.text(1.01, last, "published, here", **style)
    for name, row in sorted(published.items(), key=lambda item: -item[1]["accuracy"]):
        last = min(100 * row["accuracy"], last - apart)
        here = f", {100 * ours[name]['accuracy']:.2f}" if name in ours else ""
        ax.text(1.01, last, f"{name} {100 * row['accuracy']:.2f}{here}", **style)


def _trained(jobs: Jobs) -> dict[str, Mapping[str, Any]]:
    """Our nets of the zoo by their names."""
    archs = dict.fromkeys(job["job"]["arch"] for job in jobs if job["job"]["method"] == FULL)
    nets = {arch: full_net(jobs, arch) for arch in archs}
    return {arch: net for arch, net in nets.items() if net is not None}


def _marks(
    ax: Axes, rows: Mapping[str, Mapping[str, Any]], axis: str, look: Mapping[str, Any]
) -> None:
    if rows:
        x = [row[axis] / UNITS[axis][0] for row in rows.values()]
        ax.plot(x, [100 * row["accuracy"] for row in rows.values()], **look)


def _frame(ax: Axes, axis: str) -> None:
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xticks(_ticks(low, high))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.set_xlabel(f"{AXES[axis]} ({UNITS[axis][1]})")
    ax.set_ylabel("test accuracy (%)")
    ax.grid(color="#E4E4E4", lw=0.5)
    ax.set_axisbelow(True)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range: as few as will do, and two at least where there are any."""
    for digits in (COARSE, FINE):
        found = [d * 10.0**k for k in range(-2, 5) for d in digits if low <= d * 10.0**k <= high]
        if len(found) > 1:
            break
    return found[:: ceil(len(found) / MOST)] if found else []


def _heights(members: Members, view: View) -> tuple[float, float]:
    """From below the least net that was not pruned: pruned to almost nothing, nets only guess."""
    grown = _accuracies(members, [m for m in METHODS if m not in ("l1", "bn")])
    every = _accuracies(members, METHODS)
    shown = [row["accuracy"] for row in PUBLISHED.values() if row["params"] <= view.most]
    low = 100 * min([*(grown or every), *shown])
    high = 100 * max([*every, ACCURACY])
    room = 0.06 * (high - low) + 0.2
    return low - room, high + room


def _accuracies(members: Members, methods: Sequence[str]) -> list[float]:
    return [
        point["accuracy"]
        for method in methods
        for job in members.get(method, {}).values()
        for point in job["points"]
    ]
