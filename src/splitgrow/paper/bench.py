"""What every study of jobs brings along: how its nets are trained, and its data on a device.

A study derives both: its setting gives what is left open here and adds what its data need, its
bench says what it trains and judges with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.paper.jobs import GROWN, PRUNED, WIDTH, Job, Size
from splitgrow.paper.training import Course, Rate
from splitgrow.phase import Phase
from splitgrow.split import Columns

# Fields of a setting that came later, with the values that leave a study as it was without them:
# results that lack them are those of these values.
LATER: Mapping[str, object] = {
    "max_growth": None, "floor": 0.0, "size": None, "restart": 1.0, "stand_in": 3.0, "at_least": 0,
    "columns": "halved", "growing": None, "thin": None,
}  # fmt: skip
# Fields that only these methods look at: the results of others hold whatever they are.
ONLY: Mapping[str, Sequence[str]] = {
    "floor": ("bn",),
    "sparsity": ("bn",),
    "keep": PRUNED,
    "lanczos": tuple(GROWN),
    "max_growth": tuple(GROWN),
    "step": tuple(GROWN),
    "stand_in": tuple(GROWN),
    "at_least": tuple(GROWN),
    "columns": tuple(GROWN),
    "restart": (*GROWN, *PRUNED),
    "growing": tuple(GROWN),
}
Batch = tuple[Tensor, Tensor]  # inputs and labels
Change = Callable[[nn.Module], None]  # of a net's gradients, before a step
Part = TypeVar("Part")  # of the data, as a study keeps it


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How nets are trained, grown and pruned: the same for every method of a study.

    It is kept with the results: those of a setting with any other value are computed anew. What
    has no default here differs between studies.

    Args:
        epochs: of every phase: after every split, every cut, and for every net from scratch.
        shape: how the learning rate falls in a phase; see :class:`splitgrow.paper.training.Rate`.
        warm_up: share of a phase in which the rate rises.
        restart: the highest rate after a split or a cut, as a part of that of the first phase.
            Nets from fresh weights, and the last long training of each, have the whole.
        growing: the shape of the rate in all phases of growth but the last long training; None:
            as everywhere. ``"constant"`` keeps nets that will be split from settling.
        scored: samples of the training part that splitting indexes and steps are found on.
        lanczos: steps of Lanczos in scoring; None leaves that to :func:`splitgrow.score`.
        stand_in: beta of the softplus whose curvature stands in for that of ReLU in scoring.
        growth: share of the neurons that is split in a phase. Uniform widths grow by the same.
        at_least: so many neurons of each layer are split in every phase, where there are as many.
        max_growth: no layer grows by more than this share of itself in a phase; None: no limit.
        step: how far offspring part, as a part of their parent's length; None: searched.
        columns: ``"halved"`` or ``"parted"``, what reads two offspring; see ``split``.
        largest: growth ends with the first net of at least this share of the full one's parameters.
        size: instead, all methods end with a net of this share: the last split, width or cut is as
            large as fits into it.
        sparsity: of the batch norms' scales, in training for "bn".
        keep: share of the channels that a pruning step leaves; without a ``size`` pruning ends with
            the first net that has no more parameters than the seed.
        floor: share of its channels that each layer keeps at least in a pruning step by the scales
            of batch norms. The L1 norm takes the same share of every layer anyway.
        phases: at most so many nets in a job.
        finish: for how many more phases the last net of growth is trained, under one fall of the
            learning rate; "uniform-long" has as many more, and where there is a ``size``, the last
            net of pruning too. It is told of before and after that.
        width: channels of the seed.
    """

    epochs: int
    batch: int = 256
    shape: str = "cosine"
    warm_up: float
    restart: float = 1.0
    growing: str | None = None
    weight_decay: float
    scored: int = 4096
    scored_batch: int
    lanczos: int | None = None
    stand_in: float = 3.0
    growth: float = 0.3
    at_least: int = 0
    max_growth: float | None = None
    step: float | None = None
    columns: Columns = "halved"
    largest: float
    size: float | None = None
    sparsity: float = 1e-4
    keep: float = 0.7
    floor: float = 0.0
    phases: int | None = None
    finish: int = 0
    width: int = WIDTH


class Bench(ABC, Generic[Part]):
    """The data of a study on one device, its nets, and what is done with both.

    Attributes:
        validation, test: what nets are judged by.
        scored: batches of what they are trained on, for their neurons' scores.
        full_phases: for how many phases the full net is trained.
    """

    validation: Part
    test: Part
    scored: Sequence[Batch]
    full_phases: int = 1

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device

    # ---- nets ---------------------------------------------------------------------------------

    @abstractmethod
    def build(self, job: Job, size: Size) -> nn.Module:
        """An untrained net of a job."""

    @abstractmethod
    def example(self) -> tuple[Tensor]:
        """Inputs to trace a net with."""

    def loss_fn(self, model: Any, batch: Batch) -> Tensor:
        """The loss that neurons are scored by."""
        return F.cross_entropy(model(batch[0]), batch[1])

    # ---- training -----------------------------------------------------------------------------

    def train(
        self,
        net: nn.Module,
        phase: Phase,
        *,
        phases: int = 1,
        rate: float = 1.0,
        shape: str | None = None,
        sparse: Change | None = None,
    ) -> None:
        """As many epochs as that many phases have, under one fall of the learning rate.

        ``rate`` is the highest one, as a part of the net's, ``shape`` how it falls if not as the
        setting says; ``sparse`` changes the gradients before each step.
        """
        self._train(net, phase, self.course(net, phases, rate, shape), sparse)

    def course(
        self, net: nn.Module, phases: int = 1, rate: float = 1.0, shape: str | None = None
    ) -> Course:
        """How long and how fast a net is trained."""
        setting = self.setting
        rates = Rate(rate * self.highest_rate(net), shape or setting.shape, setting.warm_up)
        return Course(self.samples, setting.batch, phases * setting.epochs, rates)

    @property
    @abstractmethod
    def samples(self) -> int:
        """Of an epoch."""

    @abstractmethod
    def highest_rate(self, net: nn.Module) -> float:
        """The highest learning rate of a net."""

    @abstractmethod
    def _train(self, net: nn.Module, phase: Phase, course: Course, change: Change | None) -> None:
        """Train in place; ``change`` is made to the gradients before each step."""

    # ---- evaluation ---------------------------------------------------------------------------

    def metrics(self, net: nn.Module) -> dict[str, float]:
        """``accuracy`` (test) and ``validation`` of a net in eval mode, and what a study counts."""
        return {
            "accuracy": self.accuracy(net, self.test),
            "validation": self.accuracy(net, self.validation),
        }

    @abstractmethod
    def accuracy(self, net: nn.Module, part: Part) -> float:
        """The share of a part that a net in eval mode gets right."""


def batches(inputs: Tensor, labels: Tensor, size: int) -> Iterator[Batch]:
    """Of that size, but for the last."""
    return zip(inputs.split(size), labels.split(size), strict=True)


@torch.no_grad()
def share_right(outputs: Callable[[Tensor], Tensor], data: Iterable[Batch]) -> float:
    """The share of all samples whose largest output is that of their label."""
    # Counted on the device: a number for each batch would wait for it each time.
    found = [((outputs(inputs).argmax(1) == labels).sum(), len(labels)) for inputs, labels in data]
    right, counts = zip(*found, strict=True)
    return int(torch.stack(right).sum()) / sum(counts)
