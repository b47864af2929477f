"""How many images are enough to score on: the answer of a sample against that of all of them.

A net is trained on CIFAR-10 and scored on its whole training part. Then it is scored on random
samples of several sizes, a few draws of each, and three questions are asked of the 30% most
negative neurons that a sample names: how many of them all images name too (overlap), how much of
the best possible gain they have, by the lambda of all images (kept), and how far the sample's
lambda of those neurons is off (error). Two samples that do not overlap are also compared with each
other, which a user without the patience for all images can do. And what a sample says of itself, by
its standard errors: the overlap that it expects, and how many of those neurons have the lambda of
all images within two errors (within). At last `settle`, which chooses the number of images itself.

    python benchmarks/samples.py --data DIR [--device cuda] [--epochs 8]
    python benchmarks/samples.py --redraw
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.files import write_file
from splitgrow.paper import figures
from splitgrow.paper.cifar10_bench import Bench, Setting
from splitgrow.paper.cifar10_jobs import Job
from splitgrow.paper.data import cifar10
from splitgrow.paper.results import hardware, rounded
from splitgrow.paper.training import full_precision
from splitgrow.phase import Phase
from splitgrow.state import seeded

RESULTS = Path(__file__).parent / "results" / "samples.json"
SHARE = 0.3  # of the neurons is split
NETS = {"VGG19, 16 channels": ("vgg19", "seed"), "MobileNetV1, 16 channels": ("mobilenet", "seed"),
        "VGG19, 35 channels": ("vgg19", 1.3**3)}  # fmt: skip


class Sampled:
    """A trained net, and its scores on any of its images."""

    def __init__(self, bench: Bench, arch: str, size: Any) -> None:
        self._bench = bench
        with seeded(0):
            self._net: nn.Module = bench.build(Job(arch, "splitting"), size).to(bench.device)
            bench.train(self._net, Phase(0, seed=0))
        self._net.eval()
        self._units = sg.find_units(self._net, bench.example())

    def scores(self, images: Tensor, settle: sg.Settle | None = None) -> sg.Scores:
        """On the images with these numbers."""
        part, size = self._bench.train_part, self._bench.setting.scored_batch
        batches = [
            (self._bench.normalised(part.images[index]), part.labels[index])
            for index in images.to(self._bench.device).split(size)
        ]
        with full_precision():
            return sg.score(
                self._net, self._bench.loss_fn, batches, units=self._units, settle=settle
            )


def joined(scores: sg.Scores, what: str = "values") -> Tensor:
    """(neurons,) lambda of all units, or another of their values."""
    return torch.cat([getattr(found, what).double().cpu() for found in scores.values()])


def compared(found: sg.Scores, truth: sg.Scores) -> dict[str, float]:
    """The answers; see above."""
    mine, best = joined(found), joined(truth)
    count = round(SHARE * len(best))
    named, right = (values.sort(stable=True).indices[:count] for values in (mine, best))
    gain, errors = best.clamp_max(0), joined(found, "errors")
    within = ((mine - best).abs() <= 2 * errors).double().where(~errors.isnan(), torch.nan)
    error = (mine[named] - best[named]).abs() / best[named].abs().clamp_min(1e-30)
    return {
        "overlap": len(set(named.tolist()) & set(right.tolist())) / count,
        "kept": float(gain[named].sum() / gain[right].sum()),
        "error": float(error.median()),
        "expected": found.overlap(count, shrink=max(1 - found.samples / truth.samples, 0) ** 0.5),
        "within": float(within[named].mean()),
    }


def measured(net: Sampled, total: int, sizes: list[int], draws: int) -> Iterator[dict[str, Any]]:
    """One row for each size: what samples of it say, and how long they take."""
    start = time.perf_counter()
    truth = net.scores(torch.arange(total))
    yield {"images": total, "seconds": time.perf_counter() - start}
    for size in sizes:
        order = torch.randperm(total, generator=torch.Generator().manual_seed(size))
        samples = order.split(size)[: min(draws, total // size)]
        start = time.perf_counter()
        found = [net.scores(sample) for sample in samples]
        seconds = (time.perf_counter() - start) / len(found)
        answers = [compared(values, truth) for values in found]
        row = {key: statistics.mean(a[key] for a in answers) for key in answers[0]}
        lowest = {f"lowest_{key}": min(a[key] for a in answers) for key in ("overlap", "kept")}
        pairs = [compared(a, b)["overlap"] for a, b in pairwise(found)]
        between = statistics.mean(pairs) if pairs else None
        yield {"images": size, "draws": len(found), "seconds": seconds, **row, **lowest,
               "between_samples": between}  # fmt: skip
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    for wanted in (0.8, 0.9):
        start = time.perf_counter()
        settled = net.scores(order, sg.Settle(wanted, fraction=SHARE))
        seconds = time.perf_counter() - start
        answers = compared(settled, truth)
        yield {"settled": wanted, "images": settled.samples, "seconds": seconds, **answers}


def draw(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Overlap and kept gain against the number of images, the worst draw shaded."""
    titles = {"overlap": "Neurons that all images name too", "kept": "Part of the best gain"}
    with figures.sheet(path, (figures.PAGE, 2.6), (1, 2)) as (_, grid):
        for axes, (key, title) in zip(grid[0], titles.items(), strict=True):
            for i, (name, rows) in enumerate(results["nets"].items()):
                seen = [row for row in rows if f"lowest_{key}" in row]
                sizes, mean = [row["images"] for row in seen], [row[key] for row in seen]
                low = [row[f"lowest_{key}"] for row in seen]
                axes.plot(sizes, mean, marker=".", color=f"C{i}", label=name)
                axes.fill_between(sizes, low, mean, color=f"C{i}", alpha=0.15, lw=0)
                known = [row for row in seen if "expected" in row] if key == "overlap" else []
                if known:
                    x, y = ([row[k] for row in known] for k in ("images", "expected"))
                    axes.plot(x, y, color="#444444", lw=1, ls=":", label="expected by its errors")
                    axes.legend(loc="lower right")
            axes.set(title=title, xlabel="images scored", xscale="log")
            axes.set_xticks(sizes[::2], [f"{size:,}" for size in sizes[::2]])
            axes.minorticks_off()
            axes.set_ylim(top=1.0)
        grid[0][1].legend(loc="lower right")
    return figures.both(path)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--total", type=int, default=45_000)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--net", choices=list(NETS), nargs="*", default=list(NETS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--redraw", action="store_true")
    given = parser.parse_args()
    if not given.redraw:
        if given.data is None:
            parser.error("--data: name the folder of CIFAR-10's binary files")
        setting = replace(Setting(), epochs=given.epochs, images=given.total)
        bench = Bench(setting, cifar10(given.data), torch.device(given.device))
        sizes = [2**k for k in range(6, 15) if 2 ** (k + 1) <= given.total]
        results: dict[str, Any] = {
            "hardware": hardware(given.device), "torch": torch.__version__,
            "epochs": given.epochs, "share": SHARE, "nets": {},
        }  # fmt: skip
        for name in given.net:
            rows = []
            for row in measured(Sampled(bench, *NETS[name]), given.total, sizes, given.draws):
                rows.append(rounded({k: v for k, v in row.items() if v is None or not isnan(v)}))
                print(name, rows[-1], flush=True)
                results["nets"][name] = rows
                write_file(given.json, (json.dumps(results, indent=1) + "\n").encode())
    for file in draw(json.loads(given.json.read_text()), given.json):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
