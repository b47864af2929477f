"""The figure of `peers.py`: cost against overlap, one panel a net, from the results alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peers_bench import NETS

Row = dict[str, Any]
# family of methods: (label, colour, marker)
FAMILIES = {
    "ours": ("splitgrow", "#1f6fb4", "o"),
    "dense": ("S built from its definition, eigh", "#555555", "s"),
    "rayleigh": ("Rayleigh-quotient descent", "#d1632f", "^"),
}
NAMES = {"ours": "default", "ours-4": "4 steps", "dense": "", "rayleigh-3": "3 passes",
         "rayleigh-10": "10", "rayleigh-40": "40"}  # fmt: skip
BESIDE = {"ours": (-2, 6), "ours-4": (-14, -12)}


def draw(folder: Path) -> None:
    """A row of panels for each device with results: peers.png and peers.svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "peers"
    found = {device: _read(folder / f"peers-{device}.json") for device in ("cpu", "cuda")}
    found = {device: rows for device, rows in found.items() if rows}
    if not found:
        print(f"no results in {folder}")
        return
    nets = [
        net for net in NETS if any(row["net"] == net for rows in found.values() for row in rows)
    ]
    size = (2.75 * len(nets) + 0.4, 2.75 * len(found) + 0.75)
    figure, grid = plt.subplots(len(found), len(nets), figsize=size, squeeze=False, sharey=True)
    for panels, (device, rows) in zip(grid, found.items(), strict=True):
        for axes, net in zip(panels, nets, strict=True):
            own = [row for row in rows if row["net"] == net]
            _panel(axes, own)
            axes.set_title(_title(net, own), fontsize=9)
        panels[0].set_ylabel(f"{_machine(rows, device)}\nright neurons found", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("time, in training passes\nover the same images", fontsize=9)
    _legend(figure, grid)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.4 if len(nets) > 3 else 0.6) / size[1]))
    for kind, more in (("png", {"dpi": 160}), ("svg", {"metadata": {"Date": None}})):
        figure.savefig(folder / f"peers.{kind}", **more)
    plt.close(figure)


def _read(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def _machine(rows: list[Row], device: str) -> str:
    return "CPU" if device == "cpu" else _listed(rows, "hardware")


def _title(net: str, rows: list[Row]) -> str:
    """On a CPU with the threads, which are not those of every net."""
    on_cpu = [row for row in rows if row["settings"]["device"] == "cpu"]
    if not on_cpu:
        return net
    threads = _listed(on_cpu, "threads")
    return f"{net}, {threads} thread{'s' * (threads != '1')}"


def _listed(rows: list[Row], setting: str) -> str:
    """What the rows were measured with."""
    return " or ".join(map(str, sorted({row["settings"][setting] for row in rows})))


def _panel(axes: Any, rows: list[Row]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(1, 400)
    axes.set_ylim(0.27, 1.09)
    axes.axhline(0.3, color="#bbbbbb", lw=1, ls=":")
    axes.text(1.1, 0.31, "chance", color="#888888", fontsize=7)
    axes.grid(visible=True, which="major", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.set_xticks([1, 10, 100], ["1", "10", "100"])
    for family, (_, colour, marker) in FAMILIES.items():
        own = [row for row in rows if row["method"].partition("-")[0] == family]
        points = sorted(
            (row["cost"], row["overlap over net"], row["method"])
            for row in own if row["status"] == "ok"
        )  # fmt: skip
        if points:
            x, y, methods = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, ms=6, lw=1.2, clip_on=False)
            for point in zip(x, y, methods, strict=True):
                _label(axes, *point, colour)
        elif family == "dense" and own:
            axes.text(0.97, 0.16, "definition: does not fit", color=colour, fontsize=7.5,
                      ha="right", transform=axes.transAxes)  # fmt: skip
    gromo = [row for row in rows if row["method"] == "gromo"]
    if gromo:
        _gromo(axes, gromo[0])


def _label(axes: Any, x: float, y: float, method: str, colour: str) -> None:
    axes.annotate(
        NAMES[method], (x, y), textcoords="offset points", xytext=BESIDE.get(method, (4, -11)),
        color=colour, fontsize=7, ha="left",
    )  # fmt: skip


def _gromo(axes: Any, row: Row) -> None:
    """It answers another question, so that it has a cost but no height."""
    colour = "#5b9a55"
    if row["status"] == "ok":
        axes.axvline(row["cost"], color=colour, lw=1.2, ls="--", ymax=0.4)
        axes.text(row["cost"] * 1.08, 0.45, "gromo", color=colour, fontsize=7.5)
    else:
        short = "not installed" if "installed" in row["status"] else "cannot express it"
        axes.text(0.97, 0.08, f"gromo: {short}", color=colour, fontsize=7.5, ha="right",
                  transform=axes.transAxes)  # fmt: skip


def _legend(figure: Any, grid: Any) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=colour, marker=marker, ms=6, lw=1.2, label=label)
        for label, colour, marker in FAMILIES.values()
    ]
    if any("gromo" in text.get_text() for axes in grid.flat for text in axes.texts):
        label = "gromo's TINY statistics (new neurons: time only)"
        handles.append(Line2D([], [], color="#5b9a55", ls="--", lw=1.2, label=label))
    columns = 4 if grid.shape[1] > 3 else 2
    figure.legend(handles=handles, loc="upper center", ncols=columns, fontsize=9, frameon=False)
