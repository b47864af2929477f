"""One job on its bench: the nets that it gives, with a folder that it can go on from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from math import ceil, inf
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitgrow.checkpoint import load, read_metadata, save
from splitgrow.cost import Cost, CostModel
from splitgrow.curvature import Softplus
from splitgrow.errors import InputError
from splitgrow.files import clean, write_file
from splitgrow.fresh import reset
from splitgrow.grow import Train, grow
from splitgrow.history import History, PhaseRecord, Split, lasting_names
from splitgrow.paper.bench import Bench
from splitgrow.paper.jobs import FULL, GROWN, UNIFORM, Job, Point, Size
from splitgrow.paper.pruning import How, add_sparsity_gradient, prune, prune_to
from splitgrow.phase import Phase
from splitgrow.policy import Budget, Policy
from splitgrow.split import Relative
from splitgrow.stages import seed_of
from splitgrow.state import eval_mode, seeded
from splitgrow.units import find_units
from splitgrow.watch import Watcher

SIZE_REACHED = 0.97  # of the parameters that a net is to have: one neuron more may be too many
LONG_EVERY = 3  # of the uniform widths, one in so many (the last too) is trained as long as growth
COUNTS = ("operations",)  # metrics of a net that are whole numbers, where a bench has them
NET, POINTS = "net.safetensors", "points.json"
Tell = Callable[[int, int, Mapping[str, float]], None]


def measured(net: nn.Module, example: tuple[Tensor]) -> tuple[Cost, dict[str, int]]:
    """A net's cost, and the channels of each of its units by a name that stays as it grows."""
    units = find_units(net, example)
    names = lasting_names(units)
    return CostModel(units).total(), {names[unit.name]: unit.width for unit in units}


def count_parameters(net: nn.Module) -> int:
    """How many it has: all are used, so it is what ``measured`` counts, without the tracing."""
    return sum(p.numel() for p in net.parameters())


class _Teller(Watcher):
    """Tells of the nets of growth."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def on_trained(self, record: PhaseRecord, history: History) -> None:  # noqa: ARG002
        """Of each that has been trained."""
        self._tell(record.phase, record.params, record.metrics)


class Study:
    """One job on its bench, with a folder to go on from.

    Args:
        job, bench, folder: what to do, with what, and where.
        tell: told of each net that has been trained: its number, parameters and metrics.

    Attributes:
        full: the cost of the full net.
    """

    def __init__(self, job: Job, bench: Bench[Any], folder: Path, tell: Tell | None = None) -> None:
        self.job, self.bench, self.folder = job, bench, folder
        self._tell = tell or (lambda *_: None)
        self.setting = bench.setting
        self.full = measured(self.net("full"), bench.example())[0]

    def points(self) -> list[Point]:
        """Every net, in the order in which they come about."""
        if self.most is not None:
            self._check_size(self.most)
        self.folder.mkdir(parents=True, exist_ok=True)
        clean(self.folder)
        if self.job.method in GROWN:
            return self._grown()
        if self.job.method == FULL:
            return self._full()
        return self._uniform() if self.job.method in UNIFORM else self._pruned()

    def net(self, size: Size, stage: str = "start", number: int = 0) -> nn.Module:
        """A net with the random weights of a stage of this job's seed."""
        with seeded(seed_of(self.job.seed, number, stage)):
            net = self.bench.build(self.job, size)
        return net.to(self.bench.device)

    @property
    def most(self) -> int | None:
        """Parameters of the last net, where its size is given."""
        size = self.setting.size
        return None if size is None else round(size * self.full.params)

    def _check_size(self, most: int) -> None:
        least = count_parameters(self.net("seed"))
        if most < least:
            raise InputError(
                f"size: {self.setting.size} of the full net are {most:,} parameters, and the "
                f"seed of {self.job.arch} has {least:,} already. Choose at least "
                f"{ceil(1e5 * least / self.full.params) / 1e5:g}."
            )

    def _is_last(self, points: Sequence[Point]) -> bool:
        """As many nets as there may be?"""
        return self.setting.phases is not None and len(points) >= self.setting.phases

    # ---- growth -------------------------------------------------------------------------------

    def _grown(self) -> list[Point]:
        job, setting, bench = self.job, self.setting, self.bench
        method, rank, per = GROWN[job.method]
        step = None if setting.step is None else Relative(setting.step)
        result = grow(
            self.net("seed"), train=self._train_on, loss_fn=bench.loss_fn, batches=bench.scored,
            example_inputs=bench.example(), evaluate=self._judged, method=method,
            policy=Policy(
                fraction=setting.growth, min_per_unit=setting.at_least,
                max_growth=setting.max_growth, rank=rank, per=per, lanczos=setting.lanczos,
                stand_in=Softplus(setting.stand_in), after=job.after, step=step,
                columns=setting.columns,
            ),
            # The size as a metric, not as a budget alone: that would trim the last split, and then
            # go on with the few neurons that still fit, in a phase each time.
            until=Budget(
                phases=setting.phases, params=self.most, metric=("share", self._enough)
            ),
            finish=partial(bench.train, phases=setting.finish) if setting.finish else None,
            run_dir=self.folder, resume=True, seed=job.seed, watch=[_Teller(self._tell)],
        )  # fmt: skip
        epochs, points = 0, []
        for record in result.history.phases:
            epochs += record.iterations  # one is logged for each epoch
            points.append(_point_of(record, epochs))
        return points

    @property
    def _enough(self) -> float:
        """Growth ends with a net of this share."""
        size = self.setting.size
        return self.setting.largest if size is None else SIZE_REACHED * size

    def _train_on(self, net: nn.Module, phase: Phase, phases: int = 1) -> None:
        """A phase of growth or pruning; the first of all has nothing to train on from."""
        job, setting = self.job, self.setting
        goes_on = phase.number > 0 and job.after == "finetune"
        sparse = partial(add_sparsity_gradient, sparsity=setting.sparsity)
        self.bench.train(
            net, phase, phases=phases, rate=setting.restart if goes_on else 1.0,
            shape=setting.growing if job.method in GROWN else None,
            sparse=sparse if job.method == "bn" else None,
        )  # fmt: skip

    def _judged(self, net: nn.Module) -> dict[str, float]:
        share = count_parameters(net) / self.full.params
        return {**self.bench.metrics(net), "share": share}

    # ---- the full net -------------------------------------------------------------------------

    def _full(self) -> list[Point]:
        train = partial(self.bench.train, phases=self.bench.full_phases)
        return [self._trained(self.net("full"), train, 0, before=0)]

    # ---- uniform widths -----------------------------------------------------------------------

    def _uniform(self) -> list[Point]:
        """Widths that grow by the same share as the number of neurons does in growth."""
        file = self.folder / POINTS
        points: list[Point] = json.loads(file.read_text()) if file.exists() else []
        every = self._uniform_steps()
        long = self.job.method == "uniform-long"
        if long:  # where there is a size, nets on the way to it are not compared
            every = every[-1:] if self.most else every[::-LONG_EVERY][::-1]
        for k in every[len(points) :]:
            phases = k + 1 + (self.setting.finish if k == every[-1] else 0) if long else 1
            train = partial(self.bench.train, phases=phases)
            points.append(self._trained(self._uniform_net(k), train, k, before=0))
            write_file(file, json.dumps(points).encode())
        points[-1]["finished"] = long and self.setting.finish > 0
        return points

    def _uniform_steps(self) -> range:
        """How often a width has grown, up to the first net that is large enough."""
        most, enough = self.setting.phases, self._enough * self.full.params
        k = 0
        while (
            (most is None or k + 1 < most)
            and self._factor(k) < self._widest
            and count_parameters(self._uniform_net(k)) < enough
        ):
            k += 1
        return range(k + 1)

    def _uniform_net(self, k: int) -> nn.Module:
        return self.net(self._factor(k), "start", k)

    def _factor(self, k: int) -> float:
        """How many times the seed's channels, after so many steps."""
        return min((1 + self.setting.growth) ** k, self._widest)

    @cached_property
    def _widest(self) -> float:
        """How many times the seed's channels fit into the parameters that there may be."""
        if self.most is None:
            return inf
        width = seed = self.setting.width
        while count_parameters(self.net((width + 1) / seed)) <= self.most:
            width += 1
        return width / seed

    # ---- pruning ------------------------------------------------------------------------------

    def _pruned(self) -> list[Point]:
        """The full net, and what is left of it after every cut."""
        net, points = self._kept()
        if not points:
            self._train_and_keep(net, points)
        least = self.most or count_parameters(self.net("seed"))
        while points[-1]["params"] > least and not self._is_last(points):
            start = time.perf_counter()
            small = self._cut(net, len(points))
            points[-1]["seconds"]["split"] = time.perf_counter() - start
            if count_parameters(small) == points[-1]["params"]:
                break  # no layer can lose any more
            net = small
            self._train_and_keep(net, points)
        # Without a size to end with, the last net of pruning is the smallest, and of no interest.
        if self.setting.finish and self.most is not None and not points[-1]["finished"]:
            self._finish(net, points)
        return points

    def _train_and_keep(self, net: nn.Module, points: list[Point]) -> None:
        before = points[-1]["epochs"] if points else 0
        train = partial(self._train_on, phases=1 if points else self.bench.full_phases)
        points.append(self._trained(net, train, len(points), before))
        self._keep(net, points)

    def _finish(self, net: nn.Module, points: list[Point]) -> None:
        """Without a gradient of sparsity: no cut follows."""
        train = partial(self.bench.train, phases=self.setting.finish)
        point = self._trained(net, train, len(points), points[-1]["epochs"])
        points.append(point | {"finished": True})
        self._keep(net, points)

    def _keep(self, net: nn.Module, points: Sequence[Point]) -> None:
        save(net, self.folder / NET, metadata={"points": json.dumps(points)})

    def _kept(self) -> tuple[nn.Module, list[Point]]:
        """The last net that was trained, and all points up to it; at first the full net."""
        file = self.folder / NET
        if not file.exists():
            return self.net("full"), []
        return load(self.net("seed"), file), json.loads(read_metadata(file)["points"])

    def _cut(self, net: nn.Module, number: int) -> nn.Module:
        how = cast("How", self.job.method)
        example, keep = self.bench.example(), self.setting.keep
        floor = self.setting.floor if how == "bn" else 0.0
        small = prune(net, example, how, keep, floor=floor)
        if self.most is not None and count_parameters(small) < self.most:
            small = prune_to(net, example, how, self.most, floor=floor)
        if self.job.after == "retrain":
            with seeded(seed_of(self.job.seed, number, "retrain")), torch.no_grad():
                reset(small)
        return small

    # ---- one net ------------------------------------------------------------------------------

    def _trained(self, net: nn.Module, train: Train, number: int, before: int) -> Point:
        """Train a net in place, and say what came of it."""
        phase = Phase(number, seed=seed_of(self.job.seed, number, "train"))
        start = time.perf_counter()
        with seeded(phase.seed):
            train(net, phase)
        seconds = time.perf_counter() - start
        cost, widths = measured(net, self.bench.example())
        with eval_mode(net):
            found = self.bench.metrics(net)
        loss = phase.curve[-1][1]
        self._tell(number, cost.params, found)
        return _point(cost, widths, found, loss, before + phase.iterations, {"train": seconds})


def _point(
    cost: Cost,
    widths: dict[str, int],
    found: Mapping[str, float],
    loss: float,
    epochs: int,
    seconds: dict[str, float],
    split: Split | None = None,
    *,
    finished: bool = False,
) -> Point:
    """One net in numbers. Scoring, split or cut are those that follow it.

    A last net that is trained on at the end comes twice: before and after that.
    """
    return {
        "params": cost.params,
        "macs": cost.macs,
        **{name: int(found[name]) for name in COUNTS if name in found},
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
        "finished": finished,
    }  # fmt: skip


def _point_of(record: PhaseRecord, epochs: int) -> Point:
    return _point(
        Cost(record.params, record.macs), record.widths, record.metrics, record.curve[-1][1],
        epochs, record.seconds, record.split, finished=record.finish,
    )  # fmt: skip
