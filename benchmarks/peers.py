"""Ours beside its peers, on the same nets and batches, in one run: cost, memory and quality.

    python benchmarks/peers.py [--net TEXT ...] [--method NAME ...] [--device cpu|cuda]
                               [--images N] [--batch N] [--quick] [--redraw]

Methods: `ours` (default settings), `ours-4` (4 Lanczos steps), `dense` (S built from its
definition), `rayleigh-3`, `-10` and `-40` (Rayleigh-quotient descent, so many passes) and `gromo`
(TINY statistics; `pip install --no-deps gromo`). Each gets the same images. What is measured:

- cost: time of a whole scoring over that of training (forward, backward, SGD) on the same images.
  Both are timed in turn, and the median of the ratios is given.
- epochs: the same for a split phase by the method's own recipe, in epochs of 45,000 images. Ours
  scores 2,048 images once; dense and gromo read the training set once, Rayleigh descent ten times.
  Parts that do not grow with the images (eigenvectors, proposals) are counted once.
- memory: the peak above model and data, over that of a training step on one batch.
- overlap: share of the 30% most negative neurons that a converged reference (ours, 64 Lanczos
  steps, in float64) names too: by layer, and over the net.
- error: of lambda, relative, median over the 30% most negative neurons of the net.
- change: of the loss on these images when those neurons are split, the step searched by `split`.

Rows go to benchmarks/results/peers-DEVICE.json one by one; a run that is cut short, or was given a
`--budget`, is continued by the same command. Rows measured with other settings are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import peers_gromo
import torch
from peers_bench import EPOCH, NETS, Bench, Trainer, interleave, peak
from peers_methods import Descent, DoesNotFit, Limits, Outcome, dense, ours, rayleigh
from peers_quality import (
    Answer,
    errors,
    gain,
    overlap_by_unit,
    overlap_over_net,
    reference,
)
from rich.console import Console
from rich.table import Table

import splitgrow as sg

RESULTS = Path(__file__).parent / "results"
# Images that a split phase needs by each method's own recipe, every pass counted.
RECIPE = {"ours": 2048, "dense": EPOCH, "rayleigh": 10 * EPOCH, "gromo": EPOCH}
RATE = 0.1  # of the descent: the best of 0.001 (as published), 0.01 and 0.1 on VGG19, 16 channels
Row = dict[str, Any]


def methods(args: argparse.Namespace) -> dict[str, Callable[[Bench], Outcome]]:
    """By name, in the order of the table."""
    limits = Limits(args.dense_numbers, args.dense_work, args.seconds)
    found: dict[str, Callable[[Bench], Outcome]] = {
        "ours": partial(ours, steps=None),
        "ours-4": partial(ours, steps=4),
        "dense": partial(dense, limits=limits),
    }
    for passes in (3, 10, 40):
        descent = Descent(passes, RATE)
        found[f"rayleigh-{passes}"] = partial(rayleigh, descent=descent)
    return found | {"gromo": peers_gromo.tiny}


# ---- one row -----------------------------------------------------------------------------------


class Session:
    """One net: what all methods share is made once, when it is first needed."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.settings = settings(name, args)
        self._bench: Bench | None = None
        self._truth: Answer | None = None
        self._train_bytes: float | None = None
        self._pass_seconds = 0.0  # of the descent

    @property
    def bench(self) -> Bench:
        """The net, trained."""
        if self._bench is None:
            used = self.settings
            self._bench = Bench(
                self.name, used["images"], used["batch"], self.args.device, used["trained"]
            )
            self.trainer = Trainer(self._bench)
            self.trainer()  # kernels are loaded and chosen
        return self._bench

    @property
    def truth(self) -> Answer:
        """The converged answer."""
        if self._truth is None:
            self._truth = reference(self.bench, getattr(torch, self.args.reference))
        return self._truth

    def measure(self, method: str) -> Row:
        """Everything about one method, or why there is nothing."""
        row: Row = {"net": self.name, "method": method, "settings": self.settings}
        run = partial(methods(self.args)[method], self.bench)
        row |= {"neurons": self.bench.neurons, "units": len(self.bench.units)}
        row |= {"accuracy": self.bench.accuracy()}
        try:
            self._check_time(method)
            outcomes: list[Outcome] = []
            memory = self._memory(method, lambda: outcomes.append(run()))
            times = interleave(
                self.bench, self.trainer, lambda: outcomes.append(run()),
                1 if method.startswith("rayleigh") else self.args.repeats, self.args.seconds,
            )  # fmt: skip
        except DoesNotFit as reason:
            return row | {"status": str(reason)}
        except torch.cuda.OutOfMemoryError:
            return row | {"status": "does not fit: the GPU's memory ran out"}
        outcome = outcomes[-1]
        if method.startswith("rayleigh"):
            self._pass_seconds = times.method[-1] / outcome.passes
        row |= {"status": "ok", **self._costs(method, times, outcome), "memory": memory}
        return row | self._quality(outcome)

    def _check_time(self, method: str) -> None:
        """A descent that would take too long by what the last one took is left out."""
        passes = int(method.partition("-")[2]) if method.startswith("rayleigh") else 0
        if passes * self._pass_seconds > self.args.seconds:
            raise DoesNotFit(f"left out: {passes * self._pass_seconds:.0f} s")

    def _costs(self, method: str, times: Any, outcome: Outcome) -> Row:
        images = RECIPE[method.partition("-")[0]]
        per_image = [(m - outcome.fixed) / outcome.passes / self.bench.images for m in times.method]
        epoch = [t / self.bench.images * EPOCH for t in times.train]
        epochs = [(p * images + outcome.fixed) / e for p, e in zip(per_image, epoch, strict=True)]
        return {
            "cost": times.ratio,
            "cost spread": [min(times.ratios), max(times.ratios)],
            "repeats": len(times.method),
            "seconds": sorted(times.method)[len(times.method) // 2],
            "training seconds": sorted(times.train)[len(times.train) // 2],
            "epochs": sorted(epochs)[len(epochs) // 2],
            "recipe images": images,
            "passes": outcome.passes,
        }

    def _quality(self, outcome: Outcome) -> Row:
        more = {k: v for k, v in (outcome.more or {}).items() if k in ("updates", "rate")}
        if outcome.answer is None:
            assert outcome.more is not None
            found = {"split": outcome.more["added"], "loss": outcome.more["loss"]}
            return more | found | {"change": peers_gromo.change(self.bench, outcome)}
        values, truth = outcome.answer.values, self.truth.values
        median, worst = errors(values, truth)
        done = gain(self.bench, outcome.answer)
        return more | {
            "overlap by layer": overlap_by_unit(values, truth),
            "overlap over net": overlap_over_net(values, truth),
            "error": median,
            "worst error": worst,
            "split": done.neurons,
            "change": done.change,
            "loss": done.loss,
        }

    # ---- memory ------------------------------------------------------------------------------

    def _memory(self, method: str, run: Callable[[], object]) -> float | None:
        """The method's peak over a training step's. The run also warms the method up."""
        if self.args.device == "cpu":
            if not method.startswith("rayleigh"):  # that one is long, and has nothing to warm up
                run()
            if self.args.no_memory:
                return None
            if self._train_bytes is None:
                self._train_bytes = self._probe("train")
            return self._probe(method) / self._train_bytes
        if self._train_bytes is None:
            fresh = Trainer(self.bench)
            self._train_bytes = peak(self.bench, lambda: fresh.step(self.bench.batches[0]))
        if method.startswith("rayleigh"):
            run = partial(rayleigh, self.bench, Descent(1))
        return peak(self.bench, run) / self._train_bytes

    def _probe(self, method: str) -> float:
        """The peak in a process of its own."""
        used = self.settings
        command = [sys.executable, __file__, "--probe", "--net", self.name, "--method", method,
                   "--images", str(used["images"]), "--batch", str(used["batch"]),
                   "--threads", str(used["threads"])]  # fmt: skip
        output = subprocess.run(  # noqa: S603  (our own file)
            command, check=True, capture_output=True, text=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"},
        )  # fmt: skip
        return float(output.stdout.split()[-1])


def probe(args: argparse.Namespace) -> float:
    """Inside of that process: a tiny run first, so that every kernel is loaded.

    Only ours keeps more when it is given more images (up to 256 MiB); the others get two batches.
    """
    method, name = args.method[0], args.net[0]
    images = args.images if method.startswith("ours") else min(args.images, 2 * args.batch)
    tiny = Bench(name, 2, 2, "cpu", 0)
    bench = Bench(name, images, args.batch, "cpu", 0)
    if method == "train":
        Trainer(tiny)()
        trainer = Trainer(bench)
        return peak(bench, lambda: [trainer.step(bench.batches[0]) for _ in range(2)])
    if method.startswith("rayleigh"):
        run: Callable[[Bench], Outcome] = partial(rayleigh, descent=Descent(1))
    else:
        run = methods(args)[method]
    run(tiny)
    return peak(bench, lambda: run(bench))


# ---- all rows ----------------------------------------------------------------------------------


class Results:
    """The rows of a results file, kept up to date on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []

    def has(self, net: str, method: str, used: dict[str, Any]) -> bool:
        """Was this measured already, with these settings?"""
        return any(
            (row["net"], row["method"], row["settings"]) == (net, method, used) for row in self.rows
        )

    def put(self, row: Row) -> None:
        """Add a row in place of an older one, and write the file, whole or not at all."""
        key = (row["net"], row["method"])
        kept = [old for old in self.rows if (old["net"], old["method"]) != key]
        self.rows = sorted([*kept, row], key=_place)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".tmp")
        new.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")
        new.replace(self.path)


def _place(row: Row) -> tuple[int, int]:
    known = ["ours", "ours-4", "dense", "rayleigh-3", "rayleigh-10", "rayleigh-40", "gromo"]
    return list(NETS).index(row["net"]), known.index(row["method"])


def settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a row needs to be understood later, and to be measured once more."""
    net, cuda = NETS[name], args.device == "cuda"
    images, batch = net.cuda if cuda else net.cpu
    trained = net.cuda_steps if cuda else net.cpu_steps
    if args.quick:
        images, batch, trained = min(images, 64), min(batch, 32), min(trained, 8)
    hardware = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {
        "images": args.images or images, "batch": args.batch or batch, "trained": trained,
        "device": args.device, "hardware": hardware, "threads": torch.get_num_threads(),
        "reference": args.reference, "repeats": args.repeats, "torch": torch.__version__,
        "splitgrow": sg.__version__, "gromo": _gromo_version(),
        "tf32 convolutions": cuda and torch.backends.cudnn.allow_tf32,
    }  # fmt: skip


def _gromo_version() -> str | None:
    try:
        return version("gromo")
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure what is missing, print the table, draw the figure."""
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.probe:
        print(probe(args))
        return
    if not args.redraw:
        measure_all(args)
    from peers_figure import draw

    draw(args.results)


def measure_all(args: argparse.Namespace) -> None:
    """Every net and method that was asked for and is not in the results yet."""
    results, start = Results(args.results / f"peers-{args.device}.json"), time.perf_counter()
    for name in NETS:
        session = Session(name, args)
        for method in methods(args):
            if not _wanted(name, method, args) or results.has(name, method, session.settings):
                continue
            if args.budget and time.perf_counter() - start > args.budget:
                print(f"{name}, {method}: left for the next run")
                continue
            row = session.measure(method)
            results.put(row)
            print(
                f"{time.perf_counter() - start:6.0f} s  {name}, {method}: {_brief(row)}", flush=True
            )
    show(results.rows)


def _wanted(name: str, method: str, args: argparse.Namespace) -> bool:
    nets = not args.net or any(text.lower() in name.lower() for text in args.net)
    return nets and (not args.method or method in args.method)


def _brief(row: Row) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    overlap = row.get("overlap over net")
    end = "" if overlap is None else f", overlap {overlap:.3f}"
    return f"{row['cost']:.1f} x training{end}"


def show(rows: list[Row]) -> None:
    """The table."""
    table = Table(title="finding the neurons to split")
    for header in ("net", "method", "cost, x training", "epochs a phase", "memory, x a step",
                   "error", "overlap, layer", "overlap, net", "change of loss"):  # fmt: skip
        table.add_column(header, justify="left" if header in ("net", "method") else "right")
    for row in rows:
        table.add_row(row["net"], row["method"], *_cells(row))
    Console(width=160).print(table)


def _cells(row: Row) -> list[str]:
    if row["status"] != "ok":
        return [str(row["status"])]

    def cell(key: str, form: str) -> str:
        return "" if row.get(key) is None else format(row[key], form)

    return [
        cell("cost", ".1f"), cell("epochs", ".3g"), cell("memory", ".2f"), cell("error", ".1e"),
        cell("overlap by layer", ".3f"), cell("overlap over net", ".3f"),
        f"{row['change']:+.4f} ({row['split']})",
    ]  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line; what is left out depends on the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--net", action="append", default=[], help="nets whose name has this")
    parser.add_argument("--method", action="append", default=[], help="only these")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=int, help="to score; by default as the net allows")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="for the repetitions of one method")
    parser.add_argument("--budget", type=float, help="seconds after which no new row is begun")
    parser.add_argument("--reference", choices=["float32", "float64"], default="float64")
    parser.add_argument("--dense-numbers", type=float, help="in the matrices of one layer, at most")
    parser.add_argument("--dense-work", type=float, help="multiplications of the dense method")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory (CPU)")
    parser.add_argument("--quick", action="store_true", help="few images, little training")
    parser.add_argument("--redraw", action="store_true", help="only the figure, from the results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.seconds = args.seconds or (10.0 if cuda else 120.0)
    args.dense_numbers = args.dense_numbers or (4e9 if cuda else 1e9)
    args.dense_work = args.dense_work or (2e14 if cuda else 5e12)
    return args


if __name__ == "__main__":
    main()
