"""The cost of scoring as a multiple of a training step on the same batch: time and peak memory.

Both are taken in one run, in turn, because machines are noisy and ratios are not. A training step
is zero_grad, forward in train mode, cross entropy, backward and SGD with momentum. Memory is the
largest resident size above that of the loaded program (on CUDA, of the allocator), each measured
in a process of its own.

    python benchmarks/scoring.py [--steps 8] [--batch 128] [--json benchmarks/results/scoring.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from meters import clock, largest_resident, reset_resident
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import zoo

NETS: dict[str, Callable[[], nn.Module]] = {
    "VGG19, 16 channels": lambda: zoo.vgg19(width=16),
    "VGG19, full size": lambda: zoo.vgg19(),
    "MobileNetV1, 16 channels": lambda: zoo.mobilenet_v1(width=16),
    "MobileNetV1, full size": lambda: zoo.mobilenet_v1(),
}


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class Bench:
    """A net with a batch, trained for a few steps so that its scores are not degenerate."""

    def __init__(self, name: str, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = NETS[name]().to(device)
        images = torch.randn(batch, 3, 32, 32, device=device)
        self.batch = (images, torch.randint(10, (batch,), device=device))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.units: sg.Units | None = None

    def train(self) -> None:
        """One training step."""
        self.model.train()
        self.optimizer.zero_grad()
        loss_fn(self.model, self.batch).backward()
        self.optimizer.step()

    def score(self, steps: int | None) -> sg.Scores:
        """One scoring of every neuron on the same batch."""
        if self.units is None:
            self.units = sg.find_units(self.model, self.batch[0][:2])
        return sg.score(self.model, loss_fn, [self.batch], units=self.units, steps=steps)


def peak_memory(name: str, batch: int, device: str, what: str, steps: int | None) -> float:
    """Bytes above the loaded program that a step or a scoring needs, in a fresh process."""
    arguments = ["--probe", name, "--what", what, "--batch", str(batch), "--device", device]
    arguments += [] if steps is None else ["--steps", str(steps)]
    # Freed memory goes back at once, so that the peak is what is needed, not what malloc keeps.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000"}
    output = subprocess.run(  # noqa: S603  (our own file)
        [sys.executable, __file__, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return float(output.stdout.split()[-1])


def probe(name: str, batch: int, device: str, what: str, steps: int | None) -> float:
    """Run inside that process."""
    tiny = Bench(name, 2, device)  # loads every kernel and makes export's own memory resident
    tiny.train()
    tiny.score(steps)
    del tiny
    bench = Bench(name, batch, device)
    if what == "score":
        bench.units = sg.find_units(bench.model, bench.batch[0][:2])
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        base = 0.0
    else:
        base = reset_resident()
    for _ in range(2):
        bench.train() if what == "train" else bench.score(steps)
    return (torch.cuda.max_memory_allocated() if device != "cpu" else largest_resident()) - base


def measure(
    name: str, batch: int, device: str, steps: int | None, repeats: int
) -> dict[str, object]:
    """Time and memory of one net, as ratios to a training step."""
    bench = Bench(name, batch, device)
    for _ in range(3):
        bench.train()
    scores = bench.score(steps)
    ratios, train_s = [], []
    for _ in range(repeats):
        train = min(clock(bench.train, device) for _ in range(3))
        score = clock(lambda: bench.score(steps), device)
        ratios.append(score / train)
        train_s.append(train)
    sizes = [found.vectors.shape[1] for found in scores.values()]
    train_bytes = peak_memory(name, batch, device, "train", steps)
    score_bytes = peak_memory(name, batch, device, "score", steps)
    return {
        "net": name,
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "largest d": max(sizes),
        "neurons": sum(len(found.values) for found in scores.values()),
        "step seconds": statistics.median(train_s),
        "time ratio": statistics.median(ratios),
        "time ratio spread": [min(ratios), max(ratios)],
        "step MB": train_bytes / 1e6,
        "memory ratio": score_bytes / train_bytes,
    }


def main() -> None:
    """Print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8, help="Lanczos steps for every unit")
    parser.add_argument("--auto", action="store_true", help="the library's own choice of solver")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="nets whose name contains this")
    parser.add_argument("--probe", choices=list(NETS), help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=["train", "score"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = None if args.auto else args.steps
    if args.probe:
        print(probe(args.probe, args.batch, args.device, args.what, steps))
        return
    rows: list[dict[str, object]] = []
    for name in NETS:
        if args.only in name:
            rows.append(measure(name, args.batch, args.device, steps, args.repeats))
            if args.json:  # as we go: a run that is cut short keeps what it has
                args.json.parent.mkdir(parents=True, exist_ok=True)
                found = {"settings": settings(args), "rows": rows}
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    show(rows, args.batch, "auto" if steps is None else f"{steps} Lanczos steps")


def settings(args: argparse.Namespace) -> dict[str, object]:
    """What a result needs to be understood later."""
    hardware = platform.processor() or platform.machine()
    if args.device != "cpu":
        hardware = torch.cuda.get_device_name()
    return {
        "batch": args.batch, "steps": None if args.auto else args.steps, "device": args.device,
        "repeats": args.repeats, "hardware": hardware, "threads": torch.get_num_threads(),
        "torch": torch.__version__, "splitgrow": sg.__version__,
    }  # fmt: skip


def show(rows: list[dict[str, object]], batch: int, solver: str) -> None:
    """The table."""
    table = Table(title=f"scoring all neurons on one batch of {batch}, {solver}")
    for header in ("net", "neurons", "largest d", "step, s", "score / step, time",
                   "step, MB", "score / step, memory"):  # fmt: skip
        table.add_column(header, justify="left" if header == "net" else "right")
    for row in rows:
        low, high = row["time ratio spread"]  # type: ignore[misc]
        table.add_row(
            str(row["net"]), str(row["neurons"]), str(row["largest d"]),
            f"{row['step seconds']:.3f}", f"{row['time ratio']:.1f}  ({low:.1f} to {high:.1f})",
            f"{row['step MB']:.0f}", f"{row['memory ratio']:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
