"""Figure 2 of the paper and its appendix figure: trees of pictures, and what splits are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitgrow.paper.figures import LOOKS, PAGE, band, both, sheet
from splitgrow.paper.prototype_claims import decreases
from splitgrow.paper.prototype_study import METHODS, unpacked
from splitgrow.paper.results import Results, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHOSEN = LOOKS["splitting"]["color"]  # the frame of a prototype that is split next
LINE = "#8A98A3"
Tree = Sequence[Mapping[str, Any]]  # neurons, as the history lists them


def draw_prototypes(results: Results, folder: Path) -> list[Path]:
    """Figure 2, the trees of all methods, and the curves."""
    shown = typical(results)
    figure_2, trees, curves = (folder / f"prototypes-{name}" for name in
                               ("figure2", "trees", "growth"))  # fmt: skip
    with sheet(figure_2, (PAGE, 3.9), (1, 2), widths=(1.55, 1)) as (_, axes):
        _tree(axes[0, 0], shown["methods"]["splitting"])
        axes[0, 0].set_title(f"(a) the tree of splitting, seed {shown['seed']}")
        _fifth_step(axes[0, 1], results, shown)
    with sheet(trees, (PAGE, 7.0), (2, 2)) as (_, axes):
        for ax, name in zip(axes.flat, METHODS, strict=True):
            _tree(ax, shown["methods"][name])
            ax.set_title(LOOKS[name]["label"])
    with sheet(curves, (PAGE, 2.5), (1, 3)) as (figure, axes):
        for ax, (key, words) in zip(axes[0], CURVES.items(), strict=True):
            _curves(ax, results, key, words)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return both(figure_2, trees, curves)


CURVES = {"error": "test error (%)", "loss": "training loss",
          "reconstruction": "squared error of pictures (test)"}  # fmt: skip


def typical(results: Results) -> Run:
    """The run whose final loss of splitting is the median: neither the best nor the worst."""

    def final(run: Run) -> float:
        found: float = run["methods"]["splitting"]["phases"][-1]["loss"]
        return found

    ordered = sorted(results["runs"], key=final)
    return ordered[(len(ordered) - 1) // 2]


# --- a tree of pictures --------------------------------------------------------------------


def _tree(ax: Axes, method: Mapping[str, Any]) -> None:
    """A row for each phase, from the top; a frame around the prototype that is split after it."""
    phases, tree = method["phases"], method["tree"]
    across = positions(tree)
    for row, phase in enumerate(phases):
        pictures, split = unpacked(phase["pictures"]), phase["split"]
        for neuron in (n for n in tree if _lives(n, row)):
            x = across[neuron["id"]]
            if row:
                before = neuron["id"] if neuron["born"] < row else neuron["parent"]
                if before is not None:
                    ax.plot([across[before], x], [row - 1, row], color=LINE, lw=0.8, zorder=1)
            chosen = split is not None and split["parent"] == neuron["id"]
            _picture(ax, pictures[neuron["place"]], x, row, chosen=chosen)
    ax.set_xlim(-0.7, max(across.values()) + 0.7)
    ax.set_ylim(len(phases) - 0.4, -0.6)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks(range(len(phases)), [str(phase["prototypes"]) for phase in phases])
    ax.set_ylabel("prototypes")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _lives(neuron: Mapping[str, Any], row: int) -> bool:
    return neuron["born"] <= row and (neuron["ended"] is None or row <= neuron["ended"])


def positions(tree: Tree) -> dict[int, float]:
    """Where each neuron stands from left to right: over the middle of its last descendants."""
    children: dict[int | None, list[int]] = {}
    for neuron in tree:
        children.setdefault(neuron["parent"], []).append(neuron["id"])
    found: dict[int, float] = {}
    leaves = 0

    def place(neuron: int) -> float:
        nonlocal leaves
        below = [place(child) for child in children.get(neuron, ())]
        if not below:
            below, leaves = [float(leaves)], leaves + 1
        found[neuron] = (below[0] + below[-1]) / 2
        return found[neuron]

    for root in children[None]:
        place(root)
    return found


def _picture(ax: Axes, picture: Any, x: float, y: float, *, chosen: bool) -> None:
    from matplotlib.patches import Rectangle

    half = 0.4
    ax.imshow(255 - picture, cmap="gray", vmin=0, vmax=255, zorder=2, interpolation="nearest",
              extent=(x - half, x + half, y + half, y - half))  # fmt: skip
    color, width = (CHOSEN, 1.6) if chosen else (LINE, 0.4)
    ax.add_patch(Rectangle((x - half, y - half), 2 * half, 2 * half, fill=False, lw=width,
                           edgecolor=color, zorder=3))  # fmt: skip


# --- Figure 2b and the curves --------------------------------------------------------------


def _fifth_step(ax: Axes, results: Results, run: Run) -> None:
    """For each prototype of one net, its index and what its split brought, with its picture."""
    count = results["settings"]["fifth"]
    ax.set_title(f"(b) splitting each of {count} prototypes, seed {run['seed']}")
    if not run["fifth"]:
        ax.text(0.5, 0.5, f"no net of {count} prototypes", ha="center", transform=ax.transAxes)
        return
    indexes, lowered = decreases(run["fifth"], "full")
    order = np.argsort(indexes)[::-1]
    x = np.arange(len(order))
    bars = (("eigenvalue, $-\\lambda$", indexes, -0.2, "#0072B2"),
            ("loss decrease after training", lowered, 0.2, CHOSEN))  # fmt: skip
    for words, values, shift, color in bars:
        largest = max(map(abs, values)) or 1.0
        ax.bar(x + shift, np.array(values)[order] / largest, 0.36, color=color, label=words)
    ax.axhline(0, color="black", lw=0.6)
    ax.set_ylabel("relative to the largest")
    low = min(0.0, *(min(v) / (max(map(abs, v)) or 1) for v in (indexes, lowered)))
    ax.set_ylim(low - 0.42, 1.25)
    ax.set_xticks([])
    ax.set_yticks([tick for tick in (-0.5, 0, 0.5, 1) if tick >= low])
    ax.spines["bottom"].set_visible(False)
    ax.spines["left"].set_bounds(low, 1)
    ax.legend(loc="upper right")
    phase = run["methods"]["splitting"]["phases"][count - 1]
    for i, picture in enumerate(unpacked(phase["pictures"])[order]):
        inset = ax.inset_axes((i - 0.28, low - 0.38, 0.56, 0.3), transform=ax.transData)
        inset.imshow(255 - picture, cmap="gray", vmin=0, vmax=255)
        inset.set_xticks([])
        inset.set_yticks([])
        inset.spines[:].set_visible(False)


def _curves(ax: Axes, results: Results, key: str, words: str) -> None:
    """Median and quartiles over the seeds, against the number of prototypes."""
    from matplotlib.ticker import LogLocator, NullLocator

    for name in METHODS:
        runs = [run["methods"][name]["phases"] for run in results["runs"]]
        sizes = sorted({phase["prototypes"] for phases in runs for phase in phases})
        rows = [[_value(phase, key) for phases in runs for phase in phases
                 if phase["prototypes"] == size] for size in sizes]  # fmt: skip
        band(ax, sizes, rows, LOOKS[name])
    ax.set_yscale("log")
    ax.set_xlabel("prototypes")
    ax.set_ylabel(words)
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if key == "error" else (1, 2, 3, 4, 6, 8)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def _value(phase: Mapping[str, Any], key: str) -> float:
    value: float = 100 * (1 - phase["accuracy"]) if key == "error" else phase[key]
    return value
