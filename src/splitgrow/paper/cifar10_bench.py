"""CIFAR-10 on the device: its three parts, the training that all methods share, the accuracies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper.alignment import BLOCK, aligned
from splitgrow.paper.augment import mirror_and_shift
from splitgrow.paper.cifar10_nets import WIDTH, arch_of, build, example
from splitgrow.paper.data import DataSet, ImageData
from splitgrow.paper.depthwise_kernels import depthwise_kernels, layout_for
from splitgrow.paper.jobs import Job, Size
from splitgrow.paper.training import Course, Rate, half_precision, sgd
from splitgrow.phase import Phase

HELD_OUT_BY = 10  # the seed that draws the validation images: the same ones in every run
EVALUATED = 500  # images at a time


@dataclass(frozen=True)
class Setting:
    """How nets are trained, grown and pruned: the same for every method.

    Args:
        epochs: of every phase: after every split, every cut, and for every net from scratch.
        rate_vgg19, rate_mobilenet: the highest learning rate of each net.
        shape: how the learning rate falls in a phase; see :class:`splitgrow.paper.training.Rate`.
        warm_up: share of a phase in which the rate rises.
        validation: images that are held out of the 50,000, always the same ones.
        images: of those left, how many to train with.
        tested: how many test images to report on.
        scored: images of the training part that splitting indexes and steps are found on.
        lanczos: steps of Lanczos in scoring; None leaves that to :func:`splitgrow.score`.
        growth: share of the neurons that is split in a phase. Uniform widths grow by the same.
        largest: growth ends with the first net of at least this share of the full one's parameters.
        sparsity: of the batch norms' scales, in training for "bn".
        keep: share of the channels that a pruning step leaves; it ends with the first net that has
            no more parameters than the seed.
        phases: at most so many nets in a job.
        width: channels of the seed.
        beta: of the softplus.
    """

    epochs: int = 8
    batch: int = 256
    rate_vgg19: float = 0.1
    rate_mobilenet: float = 0.2
    shape: str = "cosine"
    warm_up: float = 0.1
    weight_decay: float = 5e-4
    validation: int = 5000
    images: int = 45_000
    tested: int = 10_000
    scored: int = 4096
    scored_batch: int = 512
    lanczos: int | None = None
    growth: float = 0.3
    largest: float = 0.3
    sparsity: float = 1e-4
    keep: float = 0.7
    phases: int | None = None
    width: int = WIDTH
    beta: float = 1.0

    def paper(self) -> Setting:
        """The published training: 160 epochs in small batches, the rate cut twice to a tenth."""
        return replace(
            self, epochs=160, batch=64, rate_vgg19=0.1, rate_mobilenet=0.1, shape="steps",
            warm_up=0.0, weight_decay=1e-4,
        )  # fmt: skip

    def quick(self) -> Setting:
        """The same in minutes on a CPU: a glimpse of each method, far from any optimum."""
        return replace(
            self, epochs=1, batch=32, images=512, validation=256, tested=256, scored=128,
            scored_batch=64, phases=3,
        )  # fmt: skip


class Bench:
    """The data of a setting on one device, and what is done with it.

    Attributes:
        train_part: what nets are trained and scored on.
        validation, test: what they are judged by. Nothing is chosen by either.
        scored: batches of the training part, normalised and as they are.
    """

    full_phases = 1

    def __init__(self, setting: Setting, data: DataSet, device: torch.device) -> None:
        self.setting, self.device = setting, device
        training, held_out = parted(data.train, setting)
        self.train_part = _moved(training, device)
        self.validation = _moved(held_out, device)
        self.test = _moved(_first(data.test, setting.tested), device)
        self._mean, self._std = _moments(self.train_part.images)
        scored = _first(self.train_part, setting.scored)
        self.scored = [
            (self.normalised(images), labels)
            for images, labels in _batches(scored, setting.scored_batch)
        ]

    def build(self, job: Job, size: Size) -> nn.Module:
        """An untrained net of a job."""
        width, beta = self.setting.width, self.setting.beta
        return build(job.arch, job.activation, size, width=width, beta=beta)

    def example(self) -> tuple[Tensor]:
        """Inputs to trace a net with."""
        return example(self.device)

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 3, 32, 32) bytes as floats of mean 0 and deviation 1 over the training part."""
        return (images.float() - self._mean) / self._std

    def loss_fn(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss that neurons are scored by."""
        return F.cross_entropy(model(batch[0]), batch[1])

    # ---- training -----------------------------------------------------------------------------

    def train(self, net: nn.Module, phase: Phase) -> None:
        """One phase."""
        self.train_longer(net, phase, 1)

    def train_longer(self, net: nn.Module, phase: Phase, phases: int) -> None:
        """As many epochs as that many phases have, under one fall of the learning rate."""
        self._train(net, phase, self.course(net, phases), None)

    def train_sparsely(
        self, net: nn.Module, phase: Phase, sparse: Callable[[nn.Module], None], phases: int = 1
    ) -> None:
        """The same, and ``sparse`` changes the gradients before each step."""
        self._train(net, phase, self.course(net, phases), sparse)

    def course(self, net: nn.Module, phases: int = 1) -> Course:
        """How long and how fast a net is trained."""
        setting = self.setting
        highest = setting.rate_vgg19 if arch_of(net) == "vgg19" else setting.rate_mobilenet
        rate = Rate(highest, setting.shape, setting.warm_up)
        return Course(len(self.train_part.labels), setting.batch, phases * setting.epochs, rate)

    def _train(
        self,
        net: nn.Module,
        phase: Phase,
        course: Course,
        change: Callable[[nn.Module], None] | None,
    ) -> None:
        # cudnn.benchmark stays off: what it chooses depends on what else the GPU does just then, so
        # that a resumed job would differ, and it would choose anew for the shapes of every phase.
        data, layout = self.train_part, layout_for(net, self.device)
        with aligned(net, BLOCK if self.device.type == "cuda" else 1) as twin:
            twin.to(memory_format=layout)  # type: ignore[call-overload]

            def loss_of(index: Tensor) -> Tensor:
                images = mirror_and_shift(data.images[index]).contiguous(memory_format=layout)
                images = self.normalised(images)
                with half_precision(self.device), depthwise_kernels():
                    return F.cross_entropy(twin(images), data.labels[index])

            optimizer = partial(sgd, weight_decay=self.setting.weight_decay)
            before_step = None if change is None else partial(change, twin)
            course.train(twin, loss_of, optimizer, phase, before_step)

    # ---- evaluation ---------------------------------------------------------------------------

    def metrics(self, net: nn.Module) -> dict[str, float]:
        """Accuracies of a net in eval mode, on the test images and on those held out."""
        return {
            "accuracy": self._accuracy(net, self.test),
            "validation": self._accuracy(net, self.validation),
        }

    @torch.no_grad()
    def _accuracy(self, net: nn.Module, data: ImageData) -> float:
        right = torch.zeros((), dtype=torch.long, device=self.device)
        layout = layout_for(net, self.device)
        for images, labels in _batches(data, EVALUATED):
            inputs = self.normalised(images).contiguous(memory_format=layout)
            with half_precision(self.device), depthwise_kernels():
                right += (net(inputs).argmax(1) == labels).sum()
        return int(right) / len(data.labels)


def parted(data: ImageData, setting: Setting) -> tuple[ImageData, ImageData]:
    """What to train with, and what is held out, drawn once for all runs."""
    count = len(data.labels)
    if not 1 <= setting.validation < count or setting.images < 1:
        raise InputError(
            f"cifar10: of {count} images, {setting.validation} cannot be held out with "
            f"{setting.images} to train with. Choose validation= from 1 to {count - 1}, images= "
            "from 1."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(HELD_OUT_BY))
    held_out, rest = order[: setting.validation], order[setting.validation :][: setting.images]
    return _picked(data, rest), _picked(data, held_out)


def _picked(data: ImageData, index: Tensor) -> ImageData:
    return ImageData(data.images[index], data.labels[index])


def _first(data: ImageData, count: int) -> ImageData:
    return ImageData(data.images[:count], data.labels[:count])


def _moved(data: ImageData, device: torch.device) -> ImageData:
    return ImageData(data.images.to(device), data.labels.to(device))


def _batches(data: ImageData, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(data.images.split(size), data.labels.split(size), strict=True)


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel, (1, 3, 1, 1) each."""
    # One channel at a time: as floats, all of them are four times as large as they are here.
    found = [torch.std_mean(images[:, c].float()) for c in range(images.shape[1])]
    std, mean = (torch.stack(each).view(1, -1, 1, 1) for each in zip(*found, strict=True))
    return mean, std
