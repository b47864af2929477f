"""Does a grown net beat random splitting, and the same net from scratch? On digits, many seeds.

Every net has the same number of epochs in all. Rows: splitting with at least one neuron of each
layer in a phase, splitting by plain lambda (the paper's rule), random splitting under the first
rule, the structure that splitting found with fresh weights, and a net 16 times as large.

    python benchmarks/digits.py [--seeds 5] [--workers 2] [--json benchmarks/results/digits.json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import splitgrow
from splitgrow.digits import LARGE_WIDTHS, Row, Setting, Study, load_digits
from splitgrow.show import count

BUDGETS = (400, 1200)
GROWN = "splitting"
NETS = (GROWN, "splitting, plain lambda", "random splitting", "new neurons",
        "same widths from scratch", "16-16-24 from scratch")  # fmt: skip


def rows_of(task: tuple[int, int]) -> list[Row]:
    """All nets of one seed and one budget."""
    budget, seed = task
    torch.set_num_threads(1)
    study = Study(load_digits(), Setting(params=budget), seed)
    grown, _ = study.grown(GROWN, "splitting")
    return [
        grown,
        study.grown(NETS[1], "splitting", per_unit=0)[0],
        study.grown(NETS[2], "random")[0],
        study.grown(NETS[3], "new")[0],
        study.from_scratch(NETS[4], grown.widths),
        study.from_scratch(NETS[5], LARGE_WIDTHS),
    ]


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By net: means, and how often the grown net is better or worse on the same seed."""
    best = {row.seed: row.accuracy for row in rows if row.net == GROWN}
    found = {}
    for net in NETS:
        mine = [row for row in rows if row.net == net]
        accuracies = [row.accuracy for row in mine]
        found[net] = {
            "accuracy": statistics.mean(accuracies),
            "spread": statistics.stdev(accuracies) if len(mine) > 1 else 0.0,
            "params": statistics.mean(row.params for row in mine),
            "loss": statistics.mean(row.loss for row in mine),
            "splitting better": sum(best[row.seed] > row.accuracy for row in mine),
            "splitting worse": sum(best[row.seed] < row.accuracy for row in mine),
        }
    return found


def show(budget: int, found: dict[str, dict[str, float]], seeds: int) -> Table:
    table = Table(title=f"digits, at most {budget} parameters, {count(seeds, 'seed')}")
    for header in ("net", "parameters", "training loss", "test accuracy", "splitting wins, loses"):
        table.add_column(header, justify="left" if header == "net" else "right")
    for net, row in found.items():
        table.add_row(
            net, f"{row['params']:.0f}", f"{row['loss']:.4f}",
            f"{row['accuracy']:.2%} ± {row['spread']:.2%}",
            f"{row['splitting better']:.0f}, {row['splitting worse']:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    tasks = [(budget, seed) for budget in BUDGETS for seed in range(args.seeds)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        rows = dict(zip(tasks, pool.map(rows_of, tasks, chunksize=1), strict=True))
    results: dict[str, object] = {
        "settings": {
            "seeds": args.seeds, "setting": asdict(Setting()), "budgets": BUDGETS,
            "torch": torch.__version__, "python": platform.python_version(),
            "splitgrow": splitgrow.__version__,
        }
    }  # fmt: skip
    for budget in BUDGETS:
        here = [row for (b, _), listed in rows.items() if b == budget for row in listed]
        found = summary(here)
        Console(width=110).print(show(budget, found, args.seeds))
        results[str(budget)] = {"summary": found, "rows": [asdict(row) for row in here]}
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
