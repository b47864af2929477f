"""The jobs of the CIFAR-10 study: each gives a row of nets of several sizes, all trained alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import nn

from splitgrow.checkpoint import load, read_metadata, save
from splitgrow.cost import Cost
from splitgrow.errors import InputError
from splitgrow.files import clean, write_file
from splitgrow.grow import _reset, _seed_of, grow
from splitgrow.history import PhaseRecord, Split
from splitgrow.paper.cifar10_bench import Bench
from splitgrow.paper.cifar10_nets import (
    ACTIVATIONS,
    ARCHS,
    Size,
    build,
    count_parameters,
    example,
    measured,
)
from splitgrow.paper.pruning import How, add_sparsity_gradient, prune
from splitgrow.phase import Phase
from splitgrow.policy import After, Budget, Policy
from splitgrow.select import Per
from splitgrow.state import eval_mode, seeded

Point = dict[str, Any]  # one net of a job, as JSON has it

# Each method that grows: the library's own, and what it compares gains by.
GROWN: dict[str, tuple[str, Per]] = {
    "splitting": ("splitting", "neuron"),
    "splitting-params": ("splitting", "params"),
    "splitting-macs": ("splitting", "macs"),
    "random": ("random", "neuron"),
}
UNIFORM = ("uniform", "uniform-long")
PRUNED = get_args(How)
METHODS = (*GROWN, *UNIFORM, *PRUNED)
NET, POINTS = "net.safetensors", "points.json"


@dataclass(frozen=True)
class Job:
    """One row of nets.

    Args:
        arch: ``"vgg19"`` or ``"mobilenet"``.
        method: ``"splitting"``, by lambda alone, per added parameter (``"splitting-params"``) or
            operation (``"splitting-macs"``); ``"random"`` neurons along random directions;
            ``"uniform"`` widths, each net from scratch for one phase, or for as long as growth
            needs to its size (``"uniform-long"``); ``"l1"`` or ``"bn"`` pruning.
        after: a split or a cut, train on (``"finetune"``) or from fresh weights (``"retrain"``).
        activation: ``"relu"`` or ``"softplus"``.
    """

    arch: str
    method: str
    after: After = "finetune"
    activation: str = "relu"
    seed: int = 0

    def __post_init__(self) -> None:
        known = {"arch": ARCHS, "method": METHODS, "after": get_args(After),
                 "activation": ACTIVATIONS}  # fmt: skip
        wrong = [
            f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}"
            for name, values in known.items()
            if getattr(self, name) not in values
        ]
        if self.method in UNIFORM and self.after == "retrain":
            wrong.append('after: nets of uniform width are from scratch anyway; take "finetune"')
        if wrong:
            raise InputError(f"job: {'; '.join(wrong)}.")

    @property
    def name(self) -> str:
        """Its file's name, without the ending."""
        return f"{self.arch}-{self.method}-{self.after}-{self.activation}-{self.seed}"


def jobs(
    archs: Iterable[str] = ARCHS,
    seeds: Iterable[int] = range(3),
    methods: Iterable[str] = METHODS,
    afters: Iterable[After] = get_args(After),
    activations: Iterable[str] = ("relu",),
) -> list[Job]:
    """Every combination that there is, seed by seed."""
    return [
        Job(arch, method, after, activation, seed)
        for seed, arch, activation, after, method in product(
            seeds, archs, activations, afters, methods
        )
        if not (method in UNIFORM and after == "retrain")
    ]


def study(seeds: Iterable[int] = range(3), archs: Iterable[str] = ARCHS) -> list[Job]:
    """The jobs of the whole study, seed by seed, the most important ones of each first.

    Nets of uniform width that are trained as long as growth, and the paper's softplus, once.
    """
    listed: list[Job] = []
    for i, seed in enumerate(seeds):
        rows: list[tuple[Sequence[str], After, str]] = [
            (("splitting", "l1", "bn", "random", "splitting-macs"), "finetune", "relu"),
            (("uniform", "splitting-params"), "finetune", "relu"),
            (("splitting", "l1", "bn"), "retrain", "relu"),
        ]
        if i == 0:
            rows += [(("uniform-long",), "finetune", "relu"),
                     (("splitting",), "finetune", "softplus")]  # fmt: skip
        listed += [
            Job(arch, method, after, activation, seed)
            for methods, after, activation in rows
            for method in methods
            for arch in archs
        ]
    return listed


# --- a job on its data --------------------------------------------------------------------------


class Study:
    """One job on its data, with a folder to go on from.

    Attributes:
        full: the cost of the full net.
    """

    def __init__(self, job: Job, bench: Bench, folder: Path) -> None:
        self.job, self.bench, self.folder = job, bench, folder
        self.setting = bench.setting
        self.full = measured(self.net("full"))[0]

    def points(self) -> list[Point]:
        """Every net, in the order in which they come about."""
        self.folder.mkdir(parents=True, exist_ok=True)
        clean(self.folder)
        if self.job.method in GROWN:
            return self._grown()
        return self._uniform() if self.job.method in UNIFORM else self._pruned()

    def net(self, size: Size, stage: str = "start", number: int = 0) -> nn.Module:
        """A net with the random weights of a stage of this job's seed."""
        job, setting = self.job, self.setting
        with seeded(_seed_of(job.seed, number, stage)):
            net = build(job.arch, job.activation, size, width=setting.width, beta=setting.beta)
        return net.to(self.bench.device)

    def _is_last(self, points: Sequence[Point]) -> bool:
        """As many nets as there may be?"""
        return self.setting.phases is not None and len(points) >= self.setting.phases

    # ---- growth -------------------------------------------------------------------------------

    def _grown(self) -> list[Point]:
        job, setting, bench = self.job, self.setting, self.bench
        method, per = GROWN[job.method]
        result = grow(
            self.net("seed"), train=bench.train, loss_fn=bench.loss_fn, batches=bench.scored,
            example_inputs=example(bench.device), evaluate=self._judged, method=method,
            policy=Policy(
                fraction=setting.growth, rank="lambda", per=per, lanczos=setting.lanczos,
                after=job.after,
            ),
            # The size as a metric, not as a budget: that would trim the last split, and then go
            # on with the few neurons that still fit, in a phase each time.
            until=Budget(phases=setting.phases, metric=("share", setting.largest)),
            run_dir=self.folder, resume=True, seed=job.seed,
        )  # fmt: skip
        epochs, points = 0, []
        for record in result.history.phases:
            epochs += record.iterations  # one is logged for each epoch
            points.append(_point_of(record, epochs))
        return points

    def _judged(self, net: nn.Module) -> dict[str, float]:
        share = count_parameters(net) / self.full.params
        return {**self.bench.accuracies(net), "share": share}

    # ---- uniform widths -----------------------------------------------------------------------

    def _uniform(self) -> list[Point]:
        """Widths that grow by the same share as the number of neurons does in growth."""
        file = self.folder / POINTS
        points: list[Point] = json.loads(file.read_text()) if file.exists() else []
        enough = self.setting.largest * self.full.params
        while not (points and points[-1]["params"] >= enough) and not self._is_last(points):
            k = len(points)
            net = self.net((1 + self.setting.growth) ** k, "start", k)
            phases = k + 1 if self.job.method == "uniform-long" else 1
            train = partial(self.bench.train_longer, phases=phases)
            points.append(self._trained(net, train, k, before=0))
            write_file(file, json.dumps(points).encode())
        return points

    # ---- pruning ------------------------------------------------------------------------------

    def _pruned(self) -> list[Point]:
        """The full net, and what is left of it after every cut."""
        net, points = self._kept()
        if not points:
            self._train_and_keep(net, points)
        least = count_parameters(self.net("seed"))
        while points[-1]["params"] > least and not self._is_last(points):
            start = time.perf_counter()
            net = self._cut(net, len(points))
            points[-1]["seconds"]["split"] = time.perf_counter() - start
            if count_parameters(net) == points[-1]["params"]:
                break  # no layer can lose any more
            self._train_and_keep(net, points)
        return points

    def _train_and_keep(self, net: nn.Module, points: list[Point]) -> None:
        before = points[-1]["epochs"] if points else 0
        points.append(self._trained(net, self._pruning_train, len(points), before))
        save(net, self.folder / NET, metadata={"points": json.dumps(points)})

    def _kept(self) -> tuple[nn.Module, list[Point]]:
        """The last net that was trained, and all points up to it; at first the full net."""
        file = self.folder / NET
        if not file.exists():
            return self.net("full"), []
        return load(self.net("seed"), file), json.loads(read_metadata(file)["points"])

    def _cut(self, net: nn.Module, number: int) -> nn.Module:
        how = cast("How", self.job.method)
        small = prune(net, example(self.bench.device), how, self.setting.keep)
        if self.job.after == "retrain":
            with seeded(_seed_of(self.job.seed, number, "retrain")), torch.no_grad():
                _reset(small)
        return small

    def _pruning_train(self, net: nn.Module, phase: Phase) -> None:
        if self.job.method == "bn":
            sparse = partial(add_sparsity_gradient, sparsity=self.setting.sparsity)
            self.bench.train_sparsely(net, phase, sparse)
        else:
            self.bench.train(net, phase)

    # ---- one net ------------------------------------------------------------------------------

    def _trained(
        self, net: nn.Module, train: Callable[[nn.Module, Phase], None], number: int, before: int
    ) -> Point:
        """Train a net in place, and say what came of it."""
        phase = Phase(number, seed=_seed_of(self.job.seed, number, "train"))
        start = time.perf_counter()
        with seeded(phase.seed):
            train(net, phase)
        seconds = time.perf_counter() - start
        cost, widths = measured(net)
        with eval_mode(net):
            found = self.bench.accuracies(net)
        loss = phase.curve[-1][1]
        return _point(cost, widths, found, loss, before + phase.iterations, {"train": seconds})


def _point(
    cost: Cost,
    widths: dict[str, int],
    found: dict[str, float],
    loss: float,
    epochs: int,
    seconds: dict[str, float],
    split: Split | None = None,
) -> Point:
    """One net in numbers. Scoring, split or cut are those that follow it."""
    return {
        "params": cost.params,
        "macs": cost.macs,
        "accuracy": found["accuracy"],
        "validation": found["validation"],
        "loss": loss,
        "epochs": epochs,
        "widths": widths,
        "seconds": {name: seconds.get(name, 0.0) for name in ("train", "score", "split")},
        "split": None if split is None else {
            "predicted": split.predicted, "measured": split.measured, "step": split.step,
            "neurons": len(split.neurons),
        },
    }  # fmt: skip


def _point_of(record: PhaseRecord, epochs: int) -> Point:
    return _point(
        Cost(record.params, record.macs), record.widths, record.metrics, record.curve[-1][1],
        epochs, record.seconds, record.split,
    )  # fmt: skip
