"""Figures of the experiments, drawn from their results files alone, as PNG and SVG."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitgrow.errors import InputError
from splitgrow.paper import mmd, rbf
from splitgrow.paper.results import Results, Run
from splitgrow.paper.stats import quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; lines differ in
# their dashes too.
LOOKS: dict[str, dict[str, Any]] = {
    "splitting": {"color": "#D55E00", "ls": "-", "label": "Splitting"},
    "random": {"color": "#0072B2", "ls": "--", "label": "Random split"},
    "new": {"color": "#009E73", "ls": "-.", "label": "New initialization"},
    "boosting": {"color": "#CC79A7", "ls": ":", "label": "Gradient boosting"},
    "classification": {"color": "#56B4E9", "ls": (0, (3, 1)), "label": "Splitting, paper's matrix"},
    "scratch": {"color": "#E69F00", "ls": (0, (5, 1, 1, 1, 1, 1)), "label": "From scratch"},
}
TRUTH: dict[str, Any] = {"color": "#9FB8C8", "lw": 3.5, "label": "Truth"}
STYLE: Any = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7,
    "xtick.labelsize": 7, "ytick.labelsize": 7, "lines.linewidth": 1.4,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "savefig.dpi": 200, "figure.constrained_layout.use": True,
    "svg.hashsalt": "splitgrow", "svg.fonttype": "path",
}  # fmt: skip
LOWEST = -0.25  # of the decreases in the eigenvalues' panel
COLUMN, PAGE = 3.4, 7.0  # widths in inches


def check_matplotlib() -> None:
    """Say how to get matplotlib where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "paper: figures are drawn with matplotlib, which is not installed. "
            'Install it with: pip install "splitgrow[report]"'
        )


@contextmanager
def sheet(
    path: Path, size: tuple[float, float], grid: tuple[int, int], widths: Sequence[float] = ()
) -> Iterator[Any]:
    """A grid of axes, written as PNG and SVG at the end; even, or with columns of some widths."""
    check_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size)
        yield figure, figure.subplots(*grid, squeeze=False, width_ratios=widths or None)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def draw(name: str, results: Results, folder: Path) -> list[Path]:
    """All figures of an experiment; the files that were written."""
    from splitgrow.paper.prototype_figures import draw_prototypes

    made = {"rbf": draw_rbf, "mmd": draw_mmd, "prototypes": draw_prototypes}
    return made[name](results, folder)


def draw_rbf(results: Results, folder: Path) -> list[Path]:
    """Figure 1 and the appendix figure."""
    shown = _typical(results)
    figure_1, appendix = folder / "rbf-figure1", folder / "rbf-appendix"
    with sheet(figure_1, (PAGE, 4.6), (2, 2)) as (_, axes):
        _fits(axes[0, 0], results, shown, "late", ("splitting",))
        axes[0, 0].set_title(f"(a) truth and fit, m = {results['settings']['neurons']}")
        _eigenvalues(axes[0, 1], results)
        _angles(axes[1, 0], results)
        _curves(axes[1, 1], results, rbf.METHODS, "training loss")
        axes[1, 1].set_title("(d) training loss, median and quartiles")
    with sheet(appendix, (PAGE, 2.9), (1, 2)) as (figure, axes):
        for ax, when, key in ((axes[0, 0], "early", "early"), (axes[0, 1], "late", "neurons")):
            names = [name for name in rbf.METHODS if name in shown[when]]
            _fits(ax, results, shown, when, names)
            ax.set_title(f"m = {results['settings'][key]}, seed {shown['seed']}")
            ax.get_legend().remove()
        handles, labels = axes[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return both(figure_1, appendix)


def draw_mmd(results: Results, folder: Path) -> list[Path]:
    """Particles over the phases, and log MMD against iterations."""
    particles, curve = folder / "mmd-particles", folder / "mmd-loss"
    shown = _typical(results)
    phases = min(mmd.SHOWN, results["settings"]["particles"])
    with sheet(particles, (PAGE, 4.4), (len(mmd.METHODS), phases)) as (_, axes):
        for row, name in zip(axes, mmd.METHODS, strict=True):
            row[0].set_ylabel(LOOKS[name]["label"].replace(" ", "\n"))
            for phase, ax in enumerate(row):
                _particles(ax, shown, name, phase)
                ax.tick_params(labelbottom=name == mmd.METHODS[-1])
        for phase, ax in enumerate(axes[0]):
            ax.set_title("1 particle" if phase == 0 else f"{phase + 1} particles")
        for ax in axes[-1]:
            ax.set_xlabel(r"$\theta$")
    with sheet(curve, (COLUMN, 2.8), (1, 1)) as (_, axes):
        _curves(axes[0, 0], results, mmd.METHODS, "MMD")
    return both(particles, curve)


def both(*paths: Path) -> list[Path]:
    """The files of some figures."""
    return [path.with_suffix(suffix) for path in paths for suffix in (".png", ".svg")]


def _typical(results: Results) -> Run:
    """The run whose final loss of splitting is the median: neither the best nor the worst."""
    ordered: Sequence[Run] = sorted(results["runs"], key=lambda run: run["final"]["splitting"])
    return ordered[(len(ordered) - 1) // 2]


# --- panels --------------------------------------------------------------------------------


def _fits(ax: Axes, results: Results, run: Run, when: str, names: Sequence[str]) -> None:
    edge = results["settings"]["interval"]
    x = np.linspace(-edge, edge, 400)
    ax.plot(x, _function(run["truth"], x), **TRUTH)
    for name in names:
        ax.plot(x, _function(run[when][name], x), **LOOKS[name])
    ax.set_xlabel("x")
    ax.set_ylabel("f(x)")
    ax.legend()


def _function(theta: Sequence[Sequence[float]], x: Any) -> Any:
    scale, shift, height = (np.array(row)[:, None] for row in theta)
    return (height * np.exp(-0.5 * (scale * x + shift) ** 2)).sum(0)


def _eigenvalues(ax: Axes, results: Results) -> None:
    """Every seed on its own scale: its largest index and its largest decrease are 1."""
    looks = {"at_once": ("o", "#0072B2", "right after the split"),
             "trained": ("^", "#D55E00", "after training")}  # fmt: skip
    found = rbf.claims(results)["eigenvalue and loss decrease correlate linearly"]
    for when, (marker, color, words) in looks.items():
        pairs = [_relative(run["eigenvalues"], when) for run in results["runs"]]
        x, y = ([v for pair in pairs for v in pair[i]] for i in (0, 1))
        r = found[when]["r"]
        label = words if r is None else f"{words}, median r = {r[1]:.2f}"
        ax.scatter(x, y, s=12, marker=marker, facecolors="none", edgecolors=color, label=label,
                   linewidths=0.8)  # fmt: skip
    ax.set_xlabel(r"$|\lambda_{\min}|$, relative to the seed's largest")
    ax.set_ylabel("loss decrease, relative")
    size = results["settings"]["neurons"]
    ax.set_title(f"(b) top {results['settings']['eigenvalues']} eigenvalues, {size - 1} to {size}")
    ax.legend(loc="upper left")
    ax.set_ylim(LOWEST, 1.75)
    _count_below(ax, results)


def _count_below(ax: Axes, results: Results) -> None:
    """Say how many points the panel leaves out: there the fixed step was too long for a neuron."""
    below = sum(
        decrease < LOWEST
        for run in results["runs"]
        for when in ("at_once", "trained")
        for decrease in _relative(run["eigenvalues"], when)[1]
    )
    if below:
        words = f"{below} point{'s' if below > 1 else ''} below the panel"
        ax.text(0.98, 0.03, words, transform=ax.transAxes, ha="right", fontsize=7)


def _relative(found: Mapping[str, Any], when: str) -> tuple[list[float], list[float]]:
    indexes, decreases = found["lambda"], found[when]
    if not indexes or max(decreases) <= 0:
        return [], []
    return [v / min(indexes) for v in indexes], [d / max(decreases) for d in decreases]


def _angles(ax: Axes, results: Results) -> None:
    looks = {"at_once": {"color": "#0072B2", "ls": "-", "label": "right after the split"},
             "trained": {"color": "#D55E00", "ls": "--", "label": "after training"}}  # fmt: skip
    degrees = results["runs"][0]["angles"]["degrees"]
    for when, look in looks.items():
        rows = [_unit(run["angles"][when]) for run in results["runs"]]
        band(ax, degrees, np.array(rows).T, look)
    ax.set_xlabel("angle from the minimum eigenvector (degrees)")
    ax.set_ylabel("loss decrease, relative")
    ax.set_xticks([-90, -45, 0, 45, 90])
    ax.set_ylim(bottom=-1.2, top=1.15)
    ax.set_title(f"(c) directions at m = {results['settings']['neurons'] - 1}")
    ax.legend(loc="lower center")


def _unit(values: Sequence[float]) -> list[float]:
    """Relative to the largest size, so that every seed has the same say."""
    largest = max(abs(value) for value in values) or 1.0
    return [value / largest for value in values]


def band(ax: Axes, x: Sequence[float], rows: Any, look: Mapping[str, Any]) -> None:
    """Median and quartiles of the rows' entries, (points, seeds)."""
    low, middle, high = np.array([quartiles(list(map(float, row))) for row in rows]).T
    ax.plot(x, middle, **look)
    ax.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _curves(ax: Axes, results: Results, names: Sequence[str], words: str) -> None:
    settings = results["settings"]
    for name in names:
        phases = [run["curves"][name] for run in results["runs"]]
        rows = np.array([[v for phase in run for v in phase] for run in phases]).T
        x = _iterations(settings, len(phases[0]))
        band(ax, x, rows, LOOKS[name])
    ax.set_yscale("log")
    ax.set_xlabel("iteration (thousands)")
    ax.set_ylabel(words)
    low, high = ax.get_ylim()
    ax.set_ylim(low * (low / high) ** 0.35, high)  # room for the legend
    ax.legend(ncols=2, loc="lower left", columnspacing=1.0, handlelength=2.4)


def _iterations(settings: Mapping[str, Any], phases: int) -> list[float]:
    """When each point of the phases' curves was taken, in thousands of iterations."""
    later = settings["iterations"]
    lengths = [settings.get("first_iterations", later)] + [later] * (phases - 1)
    starts = np.cumsum([0, *lengths[:-1]])
    steps = np.linspace(0, 1, settings["points"] + 1)
    return [
        float(start + length * step) / 1000
        for start, length in zip(starts, lengths, strict=True)
        for step in steps
    ]


def _particles(ax: Axes, run: Run, name: str, phase: int) -> None:
    """The data as a density, the points with their weights as areas."""
    counts = np.array(run["histogram"])
    edges = np.linspace(-6, 7, len(counts) + 1)
    ax.stairs(counts / counts.max(), edges, fill=True, color="#D5DDE3")
    theta, weight = run["points"][name][phase]
    ax.scatter(theta, [0.25] * len(theta), s=[260 * w for w in weight], zorder=3,
               color=LOOKS[name]["color"], alpha=0.8, edgecolors="black", linewidths=0.5,
               clip_on=False)  # fmt: skip
    ax.set_yticks([])
    ax.set_xlim(-6, 7)
