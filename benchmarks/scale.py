"""How scoring grows: time and memory against width, depth and number of images.

Each is varied alone, on a plain convolutional net; what is measured is set beside a forward and
backward pass over the same images in the same run. The law is the slope of log(seconds) and of
log(bytes) over the upper half of a sweep. Memory is counted above the model and the images: on CUDA
by the allocator, on a CPU as the largest resident size of a process that does nothing else. At last
the MLP neurons of a transformer with more than 10^9 parameters. On a CPU fewer images are scored,
and once.

    python benchmarks/scale.py [--device cuda] [--json FILE]
    python benchmarks/scale.py --quick          # small, anywhere
    python benchmarks/scale.py --redraw
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import meters
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import zoo
from splitgrow.files import write_file
from splitgrow.paper import figures
from splitgrow.paper.results import hardware, rounded

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A plain net of 3x3 convolutions on 32x32 images, halved after the first and the second."""

    width: int = 64
    depth: int = 8
    images: int = 512
    batch: int = 128

    def model(self) -> nn.Module:
        """Convolutions with batch norm and ReLU; most at 8 x 8."""
        return zoo.VGG([self.width, "M", self.width, "M", *[self.width] * (self.depth - 2)])

    def inputs(self) -> Tensor:
        """Noise."""
        return torch.randn(self.images, 3, 32, 32)


@dataclass(frozen=True)
class Sequences(Case):
    """A transformer, of which the MLPs are scored; by default 1.2 * 10^9 parameters."""

    width: int = 8192
    depth: int = 24
    dim: int = 2048
    images: int = 16
    batch: int = 4
    length: int = 256

    def model(self) -> nn.Module:
        """Embed, blocks of attention and MLP, average."""
        heads = max(self.dim // 128, 1)
        return zoo.Transformer(64, self.length, self.dim, heads, self.width, self.depth)

    def inputs(self) -> Tensor:
        """Noise."""
        return torch.randn(self.images, self.length, 64)


def sweeps(case: Case) -> dict[str, list[Case]]:
    """One quantity at a time."""
    return {
        "width": [replace(case, width=2**k) for k in range(4, 11)],
        "depth": [replace(case, depth=2**k) for k in range(2, 7)],
        "images": [replace(case, images=int(case.images * 2.0**k)) for k in range(-2, 5)],
    }


def quick_sweeps() -> dict[str, list[Case]]:
    """The same in a minute on a CPU."""
    case = Case(width=8, depth=4, images=32, batch=16)
    return {
        "width": [replace(case, width=w) for w in (4, 8, 16)],
        "depth": [replace(case, depth=d) for d in (3, 4, 6)],
        "images": [replace(case, images=n) for n in (16, 32, 64)],
    }


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Work:
    """A case's model and batches, and what is done with them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:
            self.model = case.model().eval()
        inputs = case.inputs().to(device)
        labels = torch.arange(case.images, device=device) % 10
        self.batches = list(zip(inputs.split(case.batch), labels.split(case.batch), strict=True))
        start = time.perf_counter()
        self.units = sg.find_units(self.model, inputs[:2])
        self.found = time.perf_counter() - start

    def score(self) -> None:
        """What is measured."""
        sg.score(self.model, loss_fn, self.batches, units=self.units)

    def passes(self) -> None:
        """What it is set beside: forward and backward."""
        for batch in self.batches:
            self.model.zero_grad()
            loss_fn(self.model, batch).backward()
        self.model.zero_grad()


def measured(case: Case, device: torch.device) -> Row:
    """One case: seconds and bytes of scoring, and of a forward and backward pass."""
    repeats = 3 if device.type == "cuda" else 1
    score_bytes, pass_bytes = (_peak(case, name, device) for name in ("score", "passes"))
    work = Work(case, device)
    times: dict[Callable[[], None], list[float]] = {work.score: [], work.passes: []}
    for action in times:
        action()  # everything is warm now
    for _ in range(repeats):  # in turn
        for action, seconds in times.items():
            seconds.append(meters.clock(action, device.type))
    score_s, pass_s = (statistics.median(seconds) for seconds in times.values())
    return {
        "width": case.width, "depth": case.depth, "images": case.images, "batch": case.batch,
        "parameters": sum(p.numel() for p in work.model.parameters()), "units": len(work.units),
        "neurons": sum(unit.width for unit in work.units),
        "largest_d": max(unit.size for unit in work.units), "find_seconds": work.found,
        "seconds": score_s, "pass_seconds": pass_s, "ratio": score_s / pass_s,
        "bytes": score_bytes, "pass_bytes": pass_bytes,
    }  # fmt: skip


def _peak(case: Case, name: str, device: torch.device) -> float:
    """Bytes above the model and the images; on a CPU, of a process of its own."""
    if device.type == "cuda":
        return meters.allocated(getattr(Work(case, device), name))
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_resident, case, name).result()


def _resident(case: Case, name: str) -> float:
    device = torch.device("cpu")
    getattr(Work(Case(width=8, depth=3, images=2, batch=2), device), name)()  # libraries are loaded
    action = getattr(Work(case, device), name)
    base = meters.reset_resident()
    action()
    return meters.largest_resident() - base


def slope(rows: Sequence[Row], over: str, of: str) -> float | None:
    """The power of a quantity that another one grows with, by least squares; upper half."""
    upper = [row for row in rows[len(rows) // 2 :] if row[of]]
    if len(upper) < 2:
        return None
    x, y = ([math.log(row[key]) for row in upper] for key in (over, of))
    return statistics.linear_regression(x, y).slope


def run(cases: Mapping[str, list[Case]], device: torch.device) -> Iterator[tuple[str, Row]]:
    """Every case; one that does not fit says so, and its sweep ends there."""
    for name, sweep in cases.items():
        for case in sweep:
            try:
                yield name, rounded(measured(case, device))
            except torch.cuda.OutOfMemoryError as error:
                yield name, {**vars(case), "failed": str(error).splitlines()[0][:200]}
                torch.cuda.empty_cache()
                break


def draw(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Seconds above, memory below (where it was counted), one column for each quantity."""
    names = [name for name in ("width", "depth", "images") if name in results["sweeps"]]
    rows = {name: [r for r in results["sweeps"][name] if "failed" not in r] for name in names}
    kinds = [("seconds", "seconds", 1.0)]
    if all(row["bytes"] for row in chain(*rows.values())):
        kinds.append(("bytes", "GB", 1e9))
    size = (figures.PAGE, 0.3 + 2.0 * len(kinds))
    with figures.sheet(path, size, (len(kinds), len(names))) as (sheet, grid):
        for line, (key, label, unit) in zip(grid, kinds, strict=True):
            for axes, name in zip(line, names, strict=True):
                x = [row[name] for row in rows[name]]
                power = slope(rows[name], name, key)
                for of, words in ((key, "scoring"), (f"pass_{key}", "forward and backward")):
                    axes.plot(x, [row[of] / unit for row in rows[name]], marker=".", label=words)
                axes.set(xscale="log", yscale="log", xlabel=name, ylabel=label)
                axes.set_title("" if power is None else f"scoring: {name} to the power {power:.1f}")
                axes.minorticks_off()
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.set_xticks(x[::2], [f"{value:,}" for value in x[::2]])
        handles = grid[0][0].get_legend_handles_labels()
        sheet.legend(*handles, loc="outside upper center", ncols=2)
    return figures.both(path)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument("--json", type=Path, help="by default benchmarks/results/scale-DEVICE.json")
    given = parser.parse_args()
    path = given.json or RESULTS / f"scale-{given.device}.json"
    if not given.redraw:
        device = torch.device(given.device)
        small = Sequences(width=32, depth=2, dim=16, images=4, batch=2, length=8)
        cuda = device.type == "cuda"
        case = Case() if cuda else Case(images=16, batch=8)
        large = Sequences() if cuda else Sequences(images=2, batch=1)
        cases = quick_sweeps() if given.quick else sweeps(case)
        cases["transformer"] = [small if given.quick else large]
        results: dict[str, Any] = {
            "hardware": hardware(given.device), "torch": torch.__version__,
            "splitgrow": sg.__version__, "sweeps": {},
        }  # fmt: skip
        for name, row in run(cases, device):
            print(name, row, flush=True)
            results["sweeps"].setdefault(name, []).append(row)
            write_file(path, (json.dumps(results, indent=1) + "\n").encode())
    for file in draw(json.loads(path.read_text()), path):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
