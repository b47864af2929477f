"""Accuracy against size, a line for each method: what the figures of several studies share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from splitgrow.paper.curves import Curve, Members

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours; methods differ in dashes and markers too.
LOOKS: dict[str, dict[str, Any]] = {
    "splitting": {"color": "#D55E00", "ls": "-", "marker": "o", "label": "Splitting"},
    "splitting-gain": {"color": "#7A4FA3", "ls": (0, (6, 2)), "marker": "p",
                       "label": "Splitting, gain"},
    "splitting-params": {"color": "#56B4E9", "ls": (0, (3, 1)), "marker": "P",
                         "label": "Splitting, gain per parameter"},
    "splitting-macs": {"color": "#000000", "ls": (0, (5, 1, 1, 1)), "marker": "X",
                       "label": "Splitting, gain per MAC"},
    "random": {"color": "#0072B2", "ls": "--", "marker": "s", "label": "Random split"},
    "uniform": {"color": "#009E73", "ls": "-.", "marker": "D", "label": "Uniform width"},
    "uniform-long": {"color": "#009E73", "ls": (0, (1, 1)), "marker": "d",
                     "label": "Uniform width, as many epochs as growth"},
    "l1": {"color": "#CC79A7", "ls": (0, (4, 1.5)), "marker": "v", "label": "Pruning, L1"},
    "bn": {"color": "#E69F00", "ls": ":", "marker": "^", "label": "Pruning, BN scale"},
}  # fmt: skip
Size = Callable[[Mapping[str, Any]], Sequence[float]]  # of every net of a job, as it is drawn
SEEDS = "lines and bands: mean and range over the seeds; faint points: their nets"


def legend(figure: Any, axes: Sequence[Axes], title: str = SEEDS) -> None:
    """One legend for all panels, below them."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=3,
                  handlelength=3, title=title, title_fontsize=7)  # fmt: skip


def line(ax: Axes, curves: Sequence[Curve], look: Mapping[str, Any]) -> None:
    """Every net as a point; mean and range where all seeds have nets on either side.

    Accuracies are drawn in percent, sizes as they are.
    """
    style = {key: look[key] for key in ("color", "marker", "label")} | {"mew": 0}
    low, high = max(c[0][0] for c in curves), min(c[0][-1] for c in curves)
    faint = style if low >= high else style | {"label": None}
    for sizes, accuracies in curves:
        ax.plot(sizes, _hundred(accuracies), **faint, ls="none", ms=2.6, alpha=0.45)
    if low >= high:
        return
    logs = np.linspace(log(low), log(high), 120)
    rows = np.array([np.interp(logs, np.log(sizes), found) for sizes, found in curves])
    x = np.exp(logs)
    ax.plot(x, _hundred(rows.mean(0)), **style, ls=look["ls"], ms=4, markevery=24)
    ax.fill_between(x, _hundred(rows.min(0)), _hundred(rows.max(0)), color=look["color"],
                    alpha=0.15, linewidth=0)  # fmt: skip


def finished_nets(
    ax: Axes, jobs: Iterable[Mapping[str, Any]], size: Size, look: Mapping[str, Any]
) -> None:
    """Nets that were trained on at the end, hollow: the lines leave them out."""
    nets = [
        (x, net)
        for job in jobs
        for x, net in zip(size(job), job["points"], strict=True)
        if net.get("finished")
    ]
    if nets:
        ax.plot([x for x, _ in nets], [100 * net["accuracy"] for _, net in nets], ls="none", ms=5,
                mfc="none", color=look["color"], marker=look["marker"])  # fmt: skip


def title_of(*groups: Members) -> str:
    """How to read a figure of these jobs."""
    jobs = [job for members in groups for seeds in members.values() for job in seeds.values()]
    hollow = any(net.get("finished") for job in jobs for net in job["points"])
    return f"{SEEDS}; hollow: last nets, trained on" if hollow else SEEDS


def _hundred(values: Any) -> Any:
    return 100 * np.asarray(values)
