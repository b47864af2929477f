"""What brings splitting ahead of random splits: VGG19 on CIFAR-10, one lever moved at a time.

The first rows have no lever: they are the committed study's jobs, run anew on the same machine.
Every lever is a study of its own with the same data, seeds and epochs, whose jobs can be
interrupted; what is done is not repeated. Validation accuracies, as nothing may be chosen by the
test images.

    python benchmarks/cifar10_levers.py --data DIR [--workers 2] [--only longer] [--redraw]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from splitgrow.files import write_file
from splitgrow.paper.cifar10_bench import Bench, Setting
from splitgrow.paper.cifar10_jobs import Job
from splitgrow.paper.data import cifar10
from splitgrow.paper.job_runs import Order, Ordered, Result, run_orders
from splitgrow.paper.results import hardware

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "paper" / "cifar10" / "levers.json"
FOLDER = ROOT / "runs" / "cifar10-levers"
STUDIED = replace(Setting().in_batches(128), epochs=4, step=0.3)
SIZES = (60_000, 100_000, 170_000)  # parameters that nets are compared at
SEEDS = (0, 1)


@dataclass(frozen=True)
class Lever:
    """A change of the study's setting, and the methods that are run with it."""

    words: str
    methods: Sequence[str]
    change: Mapping[str, Any] = field(default_factory=dict)
    phases: int = 4  # nets of up to 200,000 parameters

    def setting(self) -> Setting:
        """The study's, but for the change."""
        return replace(STUDIED, phases=self.phases, **self.change)


LEVERS = {
    "study": Lever("as in the study", ("splitting", "random")),
    "searched": Lever("searched step", ("splitting", "random"), {"step": None}),
    "parted": Lever(
        "searched step, parted columns", ("splitting", "random"),
        {"step": None, "columns": "parted"},
    ),
    "parted-gain": Lever(
        "the same, lambda times the squared norm", ("splitting-gain",),
        {"step": None, "columns": "parted"},
    ),
    "longer": Lever(
        "searched step, 12 epochs a phase", ("splitting", "random"),
        {"step": None, "epochs": 12},
    ),
    "finish": Lever(
        "the last net trained on, 16 epochs", ("splitting", "random", "uniform-long"),
        {"finish": 4},
    ),
    "constant": Lever(
        "the same, the rate stays high until then", ("splitting", "random"),
        {"finish": 4, "growing": "constant"},
    ),
    "gain": Lever("lambda times the squared norm", ("splitting-gain",)),
    "params": Lever("lambda per added parameter", ("splitting-params",)),
    "everywhere": Lever(
        "the same, at least 2 neurons of each layer", ("splitting-gain",), {"at_least": 2}
    ),
    "restart": Lever("0.3 of the rate after a split", ("splitting",), {"restart": 0.3}),
    "smooth": Lever("stand-in of beta 1", ("splitting",), {"stand_in": 1.0}),
    "sharp": Lever("stand-in of beta 10", ("splitting",), {"stand_in": 10.0}),
}  # fmt: skip


def orders(levers: Iterable[str], data: Path, folder: Path) -> list[Ordered]:
    """Every job of some levers, seed by seed."""
    return [
        (Job("vgg19", method, seed=seed),
         Order("cifar10", LEVERS[name].setting(), data, folder / name, "cpu", cifar10, Bench))
        for seed in SEEDS for name in levers for method in LEVERS[name].methods
    ]  # fmt: skip


def row(words: str, method: str, found: Sequence[Result]) -> dict[str, Any]:
    """The jobs of a lever, one for each seed, as numbers: a column for each size.

    ``finished`` has the net of each that was trained on at the end; it is in no column.
    """
    ends = [point for job in found for point in job["points"] if point["finished"]]
    return {
        "lever": words, "method": method, "seeds": [job["job"]["seed"] for job in found],
        **{key: [_mean([at(job, key, size) for job in found]) for size in SIZES]
           for key in ("validation", "loss")},
        "change": [p["split"]["measured"] for job in found for p in job["points"] if p["split"]],
        "finished": [{key: p[key] for key in ("params", "epochs", "validation")} for p in ends],
    }  # fmt: skip


def at(job: Result, key: str, size: int) -> float | None:
    """A number of a net of that size, linear in the size's logarithm between nets."""
    points = [point for point in job["points"] if not point["finished"]]
    sizes = [point["params"] for point in points]
    if not sizes or not min(sizes) <= size <= 1.02 * max(sizes):
        return None
    return float(np.interp(np.log(size), np.log(sizes), [p[key] for p in points]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if len(known) == len(values) else None


def summary(folder: Path) -> dict[str, Any]:
    """All levers whose jobs are done."""
    rows = [
        _rows(lever.words, folder / name / "jobs", method)
        for name, lever in LEVERS.items() for method in lever.methods
    ]  # fmt: skip
    return {"experiment": "cifar10-levers", "hardware": hardware("cpu"), "sizes": SIZES,
            "rows": [found for found in rows if found is not None]}  # fmt: skip


def _rows(words: str, place: Path, method: str) -> dict[str, Any] | None:
    files = [place / f"{Job('vgg19', method, seed=seed).name}.json" for seed in SEEDS]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return row(words, method, found) if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=LEVERS, default=list(LEVERS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--redraw", action="store_true", help="only the results file anew")
    args = parser.parse_args()
    if not args.redraw:
        run_orders(orders(args.only, args.data, args.folder), args.workers)
    found = summary(args.folder)
    write_file(RESULTS, (json.dumps(found, indent=1) + "\n").encode())
    for each in found["rows"]:
        print(each["lever"], each["method"], each["seeds"])


if __name__ == "__main__":
    main()
