"""Figure 3 of the paper from CIFAR-10 jobs, and what stands beside it: MACs, widths, gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, log, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitgrow.paper.cifar10_claims import AXES, SPLITTING, curve, groups_of
from splitgrow.paper.curve_figures import LOOKS, SEEDS, finished_nets, legend, line, title_of
from splitgrow.paper.curves import Curve, Jobs, Members
from splitgrow.paper.effort import effort_curve, efforts
from splitgrow.paper.figures import PAGE, both, sheet
from splitgrow.paper.job_claims import splits_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARCHS = {"mobilenet": "MobileNet", "vgg19": "VGG19"}
AFTERS = {"finetune": "finetune", "retrain": "retrain from scratch"}
ORDER = [(arch, after) for after in AFTERS for arch in ARCHS]  # the paper's panels, row by row
FIGURE_3 = ("splitting", "random", "uniform", "uniform-long", "l1", "bn")
MACS = (*SPLITTING, "uniform", "l1", "bn")
STRUCTURES = (*SPLITTING, "bn")
TICKS = [digit * 10.0**power for power in range(-2, 4) for digit in (1, 2, 5)]


def draw(jobs: Jobs, folder: Path) -> list[Path]:
    """All figures that there are data for; ReLU's have the plain names."""
    paths: list[Path] = []
    for activation in dict.fromkeys(job["job"]["activation"] for job in jobs):
        mine = [job for job in jobs if job["job"]["activation"] == activation]
        groups = {(key[0], key[1]): found for key, found in groups_of(mine).items()}
        tail = "" if activation == "relu" else f"-{activation}"

        def place(name: str, tail: str = tail) -> Path:
            return folder / f"cifar10-{name}{tail}"

        paths += _curves(groups, place("figure3"), "params", FIGURE_3)
        paths += _curves(groups, place("macs"), "macs", MACS)
        paths += _efforts(groups, place("effort"))
        paths += _selections(groups, place("selections"))
        paths += _structures(groups, place("structures"))
        paths += _gains(groups, place("gain"))
    return paths


Groups = Mapping[tuple[str, str], Members]


def _present(groups: Groups, methods: Sequence[str], least: int = 1) -> list[tuple[str, str]]:
    """The panels, in the paper's order, that have some of the methods."""
    return [key for key in ORDER if sum(m in groups.get(key, {}) for m in methods) >= least]


def _title(i: int, key: tuple[str, str]) -> str:
    return f"({chr(ord('a') + i)}) {ARCHS[key[0]]}, {AFTERS[key[1]]}"


def _panels(
    path: Path,
    keys: Sequence[tuple[str, str]],
    fill: Callable[[Axes, tuple[str, str]], None],
    title: str = SEEDS,
) -> list[Path]:
    """A panel for each group, two in a row."""
    if not keys:
        return []
    columns, rows = min(2, len(keys)), ceil(len(keys) / 2)
    with sheet(path, (PAGE * columns / 2, 2.5 * rows + 0.7), (rows, columns)) as (figure, axes):
        for i, (ax, key) in enumerate(zip(axes.flat, keys, strict=False)):
            ax.set_title(_title(i, key))
            fill(ax, key)
        for ax in axes.flat[len(keys) :]:
            ax.set_axis_off()
        legend(figure, axes.flat[: len(keys)], title)
    return both(path)


@dataclass(frozen=True)
class Axis:
    """What accuracies are drawn against.

    Args:
        sizes: of every net of a job.
        curve: of the nets of a job that were not trained on at the end.
        unit: what both are multiplied with.
    """

    label: str
    sizes: Callable[[Mapping[str, Any]], Sequence[float]]
    curve: Callable[[Mapping[str, Any]], Curve]
    unit: float

    def scaled(self, sizes: Sequence[float]) -> list[float]:
        """As they are drawn."""
        return [self.unit * size for size in sizes]


def share_of(axis: str) -> Axis:
    """Percent of the full net's parameters or MACs."""

    def sizes(job: Mapping[str, Any]) -> list[float]:
        return [net[axis] / job["full"][axis] for net in job["points"]]

    return Axis(f"{AXES[axis]} (% of the full net)", sizes, partial(curve, axis=axis), 100.0)


# --- accuracy against size -------------------------------------------------------------------


def _curves(groups: Groups, path: Path, axis: str, methods: Sequence[str]) -> list[Path]:
    """Figure 3: a panel for each net and for each way to train after a split."""

    def fill(ax: Axes, key: tuple[str, str]) -> None:
        _accuracy(ax, groups[key], share_of(axis), methods)

    keys = _present(groups, methods)
    return _panels(path, keys, fill, title_of(*(groups[key] for key in keys)))


def _selections(groups: Groups, path: Path) -> list[Path]:
    """The three ways to choose neurons: against parameters left, against MACs right."""
    keys = _present(groups, SPLITTING, least=2)
    if not keys:
        return []
    with sheet(path, (PAGE, 2.5 * len(keys) + 0.5), (len(keys), 2)) as (figure, axes):
        for i, (ax, (key, axis)) in enumerate(
            zip(axes.flat, [(key, axis) for key in keys for axis in AXES], strict=True)
        ):
            _accuracy(ax, groups[key], share_of(axis), SPLITTING)
            ax.set_title(_title(i, key))
        legend(figure, axes.flat, title_of(*(groups[key] for key in keys)))
    return both(path)


def _efforts(groups: Groups, path: Path) -> list[Path]:
    """Accuracy against all the training that led to a net."""
    effort = Axis("all training so far (epochs of the full net)", efforts, effort_curve, 1.0)

    def fill(ax: Axes, key: tuple[str, str]) -> None:
        _accuracy(ax, groups[key], effort, FIGURE_3)

    keys = _present(groups, FIGURE_3)
    return _panels(path, keys, fill, title_of(*(groups[key] for key in keys)))


def _accuracy(ax: Axes, members: Members, axis: Axis, methods: Sequence[str]) -> None:
    """Test accuracy, seeds as points, mean and range; last nets that were trained on hollow."""
    shown = [m for m in methods if m in members]
    for method in shown:
        jobs = members[method].values()
        found = [axis.curve(job) for job in jobs]
        line(ax, [(axis.scaled(sizes), heights) for sizes, heights in found], LOOKS[method])
        finished_nets(ax, jobs, lambda job: axis.scaled(axis.sizes(job)), LOOKS[method])
    _full_net(ax, members)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xticks([t for t in TICKS if low <= t <= high])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.set_xlabel(axis.label)
    ax.set_ylabel("test accuracy (%)")
    ax.set_ylim(*_heights(members, shown))
    ax.grid(color="#E4E4E4", lw=0.5)
    ax.set_axisbelow(True)


def _full_net(ax: Axes, members: Members) -> None:
    """The accuracy that pruning starts from."""
    firsts = [job["points"][0] for m in ("l1", "bn") for job in members.get(m, {}).values()]
    if firsts:
        height = 100 * float(np.mean([point["accuracy"] for point in firsts]))
        ax.axhline(height, color="#888888", lw=0.8, ls=(0, (2, 2)), zorder=1, label="Full net")


def _heights(members: Members, shown: Sequence[str]) -> tuple[float, float]:
    """From below the least net that was not pruned: pruned to almost nothing, nets only guess."""
    found = {m: [p["accuracy"] for job in members[m].values() for p in job["points"]]
             for m in shown}  # fmt: skip
    every = [a for values in found.values() for a in values]
    grown = [a for m, values in found.items() if m not in ("l1", "bn") for a in values]
    low, high = 100 * min(grown or every), 100 * max(every)
    room = 0.06 * (high - low) + 0.3
    return low - room, high + room


# --- widths ----------------------------------------------------------------------------------


def _structures(groups: Groups, path: Path) -> list[Path]:
    """Channels of every layer, at about the parameters of the smallest of the methods' nets."""
    keys = _present(groups, STRUCTURES)
    if not keys:
        return []
    with sheet(path, (PAGE, 2.7 * len(keys)), (len(keys), 1)) as (_, axes):
        for i, (ax, key) in enumerate(zip(axes[:, 0], keys, strict=True)):
            _widths(ax, groups[key])
            ax.set_title(_title(i, key))
    return both(path)


def comparable(members: Members) -> dict[str, Mapping[str, Any]]:
    """By method, the net of the first seed whose parameters are nearest to the common size.

    That size is the smallest of the largest nets that growth came to, or of pruning alone, its
    last.
    """
    firsts = {m: next(iter(members[m].values())) for m in STRUCTURES if m in members}
    grown = [max(p["params"] for p in job["points"]) for m, job in firsts.items() if m != "bn"]
    size = min(grown) if grown else firsts["bn"]["points"][-1]["params"]
    return {
        m: min(job["points"], key=lambda p: abs(log(p["params"] / size)))
        for m, job in firsts.items()
    }


def _widths(ax: Axes, members: Members) -> None:
    nets = comparable(members)
    units = list(dict.fromkeys(unit for net in nets.values() for unit in net["widths"]))
    x = np.arange(1, len(units) + 1)
    if "bn" in nets:
        full = next(iter(members["bn"].values()))["points"][0]["widths"]
        ax.bar(x, [full.get(unit, 0) for unit in units], 0.8, color="#E3E7EA", label="Full net")
    for method, net in nets.items():
        look = LOOKS[method]
        label = f"{look['label']}\n{_size(net['params'])} parameters, {_size(net['macs'])} MACs, "
        label += f"{net['accuracy']:.1%}"
        ax.plot(x, [net["widths"].get(unit, np.nan) for unit in units], color=look["color"],
                ls=look["ls"], marker=look["marker"], ms=4, mew=0, label=label)  # fmt: skip
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(x)
    ax.set_xlim(0.4, len(units) + 0.6)
    ax.set_xlabel("layer that can be split, from the input")
    ax.set_ylabel("channels")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=3, labelspacing=0.9)


def _size(count: int) -> str:
    """Three digits and a unit: 0.312 M, 24.1 M."""
    millions = count / 1e6
    return f"{millions:,.0f} M" if millions >= 1000 else f"{millions:.3g} M"


# --- gains -----------------------------------------------------------------------------------


def _gains(groups: Groups, path: Path) -> list[Path]:
    """Predicted fall and measured change of the loss, a point for each split of a whole net."""

    def fill(ax: Axes, key: tuple[str, str]) -> None:
        _gain(ax, groups[key])

    keys = [key for key in ORDER if any(_splits(groups.get(key, {})).values())]
    return _panels(path, keys, fill, "a point for each split of many neurons at once")


def _splits(members: Members) -> dict[str, list[Mapping[str, float]]]:
    return {m: splits_of(members[m].values()) for m in LOOKS if m in members}


def _gain(ax: Axes, members: Members) -> None:
    """Changes of either sign: a step that is searched lowers the loss, a forced one may not."""
    predicted, sizes = [], []
    for method, splits in _splits(members).items():
        known = [s for s in splits if s["predicted"] < 0]
        if known:
            x, y = [-s["predicted"] for s in known], [s["measured"] for s in known]
            predicted += x
            sizes += x + [abs(change) for change in y]
            look = LOOKS[method]
            ax.plot(x, y, color=look["color"], ls="none", marker=look["marker"], ms=4, mew=0,
                    alpha=0.7, label=look["label"])  # fmt: skip
    sizes = [size for size in sizes if size > 0]
    least, most = (min(sizes), 1.5 * max(sizes)) if sizes else (0.1, 1.0)
    ends = (min(predicted) / 1.5, max(predicted) * 1.5) if predicted else (0.1, 1.0)
    fall = np.geomspace(*ends)
    ax.axhline(0.0, color="#bbbbbb", lw=0.6)
    ax.plot(fall, -fall, color="#444444", lw=0.8, ls="--", label="As predicted")
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=least)
    ax.set(xlim=ends, ylim=(-most, most))
    _plain_ticks(ax, least, most)
    ax.set_xlabel("predicted fall of the training loss (nats)")
    ax.set_ylabel("measured change (nats)")


def _plain_ticks(ax: Axes, least: float, most: float) -> None:
    """Few enough that no two labels meet: 1, 2, 5, 10 along, and powers of ten up and down."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    powers = [10.0**k for k in range(ceil(log10(2 * least)), ceil(log10(most)))]
    ax.set_yticks([*(-power for power in powers), 0.0, *powers])
    ax.yaxis.set_major_formatter("{x:g}")
