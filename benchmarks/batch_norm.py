"""What batch norm leaves of a split: the loss with running statistics, and with those of a batch.

Splitting indexes, and the loss that a step is searched by, are those of eval mode: batch norm takes
the statistics that it has gathered, which offspring that have moved no longer have. In training it
takes those of each batch. A VGG19 of 16 channels is trained on CIFAR-10, the 30% most negative of
its neurons are split by steps of several sizes, along their splitting gradients and along random
directions, and the loss is measured both ways, on the images that were scored and on others.

    python benchmarks/batch_norm.py --data DIR [--epochs 8] [--images 4096]
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.files import write_file
from splitgrow.paper.cifar10_bench import Bench, Setting
from splitgrow.paper.cifar10_jobs import Job
from splitgrow.paper.data import cifar10
from splitgrow.paper.results import hardware, rounded
from splitgrow.phase import Phase

RESULTS = Path(__file__).parent / "results" / "batch-norm.json"
STEPS = (0.01, 0.03, 0.1, 0.3)  # of each neuron's length
FRACTION = 0.3
BATCH = 1024  # images whose statistics are taken together

Batch = tuple[Tensor, Tensor]


def loss_of(net: nn.Module, batches: Sequence[Batch], *, statistics: str) -> float:
    """The mean loss, with ``"running"`` statistics or those of each ``"batch"``."""
    judged = copy.deepcopy(net).train(statistics == "batch")
    with torch.no_grad():
        losses = [F.cross_entropy(judged(images), labels).item() for images, labels in batches]
    return sum(losses) / len(losses)


def losses(net: nn.Module, parts: dict[str, Sequence[Batch]]) -> dict[str, float]:
    """Of every part, both ways."""
    return {
        f"{statistics}, {name}": loss_of(net, batches, statistics=statistics)
        for statistics in ("running", "batch") for name, batches in parts.items()
    }  # fmt: skip


def turned(plan: sg.SplitPlan) -> sg.SplitPlan:
    """The same neurons along random directions."""
    generator = torch.Generator().manual_seed(0)

    def random(entry: Any) -> Any:
        direction = torch.randn(entry.direction.shape, generator=generator)
        return replace(entry, direction=(direction / direction.norm()).to(entry.direction))

    return sg.SplitPlan([random(entry) for entry in plan], plan.units)


def measured(
    net: nn.Module,
    plan: sg.SplitPlan,
    step: float,
    parts: dict[str, Sequence[Batch]],
    before: dict[str, float],
) -> dict[str, float]:
    """What a split of this step is foretold to do, and what it does to each loss."""
    grown = copy.deepcopy(net)
    receipt = sg.split(grown, plan, step=sg.Relative(step))
    after = losses(grown, parts)
    return {"predicted": receipt.predicted, **{name: after[name] - before[name] for name in after}}


def trained(bench: Bench) -> nn.Module:
    """The seed of the study after its first phase."""
    torch.manual_seed(0)
    net = bench.build(Job("vgg19", "splitting"), "seed")
    bench.train(net, Phase(0, seed=0))
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=4096, help="to score, and others beside")
    args = parser.parse_args()
    setting = replace(
        Setting().in_batches(128), epochs=args.epochs, scored=2 * args.images, scored_batch=BATCH
    )
    bench = Bench(setting, cifar10(args.data), torch.device("cpu"))
    net, half = trained(bench), args.images // BATCH
    parts = {"scored": bench.scored[:half], "others": bench.scored[half:]}
    scores = sg.score(
        net, bench.loss_fn, parts["scored"], units=sg.find_units(net, bench.example())
    )
    plan = sg.select(scores, fraction=FRACTION)
    before, rows = losses(net, parts), []
    for direction, chosen in (("splitting gradient", plan), ("random", turned(plan))):
        for step in STEPS:
            row = {"direction": direction, "step": step}
            row |= measured(net, chosen, step, parts, before)
            if direction == "random":  # of which lambda says nothing
                del row["predicted"]
            rows.append(row)
            print(json.dumps(rounded(row)), flush=True)
    found = {
        "experiment": "batch-norm", "hardware": hardware("cpu"), "torch": torch.__version__,
        "settings": {"epochs": args.epochs, "images": args.images, "batch": BATCH,
                     "fraction": FRACTION},
        "neurons": len(plan), "loss": before, "rows": rows,
    }  # fmt: skip
    write_file(RESULTS, (json.dumps(rounded(found), indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
