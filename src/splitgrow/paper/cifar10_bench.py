"""CIFAR-10 on the device: its three parts, the training that all methods share, the accuracies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper import bench
from splitgrow.paper.alignment import BLOCK, aligned
from splitgrow.paper.augment import mirror_and_shift
from splitgrow.paper.bench import Change, batches, share_right
from splitgrow.paper.cifar10_nets import arch_of, build, example
from splitgrow.paper.data import DataSet, ImageData
from splitgrow.paper.depthwise_kernels import depthwise_kernels, layout_for
from splitgrow.paper.jobs import Job, Size
from splitgrow.paper.norm_kernels import join_norms
from splitgrow.paper.training import Course, half_precision, sgd
from splitgrow.phase import Phase

HELD_OUT_BY = 10  # the seed that draws the validation images: the same ones in every run
EVALUATED = 500  # images at a time


@dataclass(frozen=True, kw_only=True)
class Setting(bench.Setting):
    """What the CIFAR-10 study adds to the fields of every study, and its values of some.

    Args:
        rate_vgg19, rate_mobilenet: the highest learning rate of each net.
        validation: images that are held out of the 50,000, always the same ones.
        images: of those left, how many to train with.
        tested: how many test images to report on.
        beta: of the softplus.
        thin: the seed has this share of the full net's channels in every layer; None: ``width``
            channels in each, as in the paper.
    """

    epochs: int = 8
    rate_vgg19: float = 0.1
    rate_mobilenet: float = 0.2
    warm_up: float = 0.1
    weight_decay: float = 5e-4
    validation: int = 5000
    images: int = 45_000
    tested: int = 10_000
    scored_batch: int = 512
    largest: float = 0.3
    floor: float = 0.5
    beta: float = 1.0
    thin: float | None = None

    def paper(self) -> Setting:
        """The published training: 160 epochs in small batches, the rate cut twice to a tenth."""
        return replace(
            self, epochs=160, batch=64, rate_vgg19=0.1, rate_mobilenet=0.1, shape="steps",
            warm_up=0.0, weight_decay=1e-4,
        )  # fmt: skip

    def in_batches(self, size: int) -> Setting:
        """Of another size, and learning rates in proportion to it."""
        vgg19, mobilenet = (
            rate * size / self.batch for rate in (self.rate_vgg19, self.rate_mobilenet)
        )
        return replace(self, batch=size, rate_vgg19=vgg19, rate_mobilenet=mobilenet)

    def quick(self) -> Setting:
        """The same in minutes on a CPU: a glimpse of each method, far from any optimum."""
        return replace(
            self, epochs=1, batch=32, images=512, validation=256, tested=256, scored=128,
            scored_batch=64, phases=3,
        )  # fmt: skip


class Bench(bench.Bench[ImageData]):
    """The images of a setting on one device, and what is done with them.

    Attributes:
        train_part: what nets are trained and scored on.
        validation, test: what they are judged by. Nothing is chosen by either.
        scored: batches of the training part, normalised and as they are.
    """

    setting: Setting

    def __init__(self, setting: Setting, data: DataSet, device: torch.device) -> None:
        super().__init__(setting, device)
        training, held_out = parted(data.train, setting)
        self.train_part = _moved(training, device)
        self.validation = _moved(held_out, device)
        self.test = _moved(_first(data.test, setting.tested), device)
        self._mean, self._std = _moments(self.train_part.images)
        scored = _first(self.train_part, setting.scored)
        self.scored = [
            (self.normalised(images), labels)
            for images, labels in batches(scored.images, scored.labels, setting.scored_batch)
        ]

    def build(self, job: Job, size: Size) -> nn.Module:
        """An untrained net of a job."""
        setting = self.setting
        return build(
            job.arch, job.activation, size,
            width=setting.width, thin=setting.thin, beta=setting.beta,
        )  # fmt: skip

    def example(self) -> tuple[Tensor]:
        """Inputs to trace a net with."""
        return example(self.device)

    def normalised(self, images: Tensor) -> Tensor:
        """(B, 3, 32, 32) bytes as floats of mean 0 and deviation 1 over the training part."""
        return (images.float() - self._mean) / self._std

    # ---- training -----------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """The whole training part."""
        return len(self.train_part.labels)

    def highest_rate(self, net: nn.Module) -> float:
        """Each net has its own."""
        vgg19, mobilenet = self.setting.rate_vgg19, self.setting.rate_mobilenet
        return vgg19 if arch_of(net) == "vgg19" else mobilenet

    def _train(self, net: nn.Module, phase: Phase, course: Course, change: Change | None) -> None:
        # cudnn.benchmark stays off: what it chooses depends on what else the GPU does just then, so
        # that a resumed job would differ, and it would choose anew for the shapes of every phase.
        data, layout = self.train_part, layout_for(net, self.device)
        with aligned(net, BLOCK if self.device.type == "cuda" else 1) as twin:
            twin.to(memory_format=layout)  # type: ignore[call-overload]
            if twin is not net:
                join_norms(twin)

            def loss_of(index: Tensor) -> Tensor:
                images = mirror_and_shift(data.images[index]).contiguous(memory_format=layout)
                images = self.normalised(images)
                with half_precision(twin, self.device), depthwise_kernels():
                    return F.cross_entropy(twin(images), data.labels[index])

            optimizer = partial(sgd, weight_decay=self.setting.weight_decay)
            before_step = None if change is None else partial(change, twin)
            course.train(twin, loss_of, optimizer, phase, before_step)

    # ---- evaluation ---------------------------------------------------------------------------

    def accuracy(self, net: nn.Module, part: ImageData) -> float:
        """The share of the images that a net in eval mode gets right."""
        layout = layout_for(net, self.device)

        def outputs(images: Tensor) -> Tensor:
            inputs = self.normalised(images).contiguous(memory_format=layout)
            with self._judging(net), depthwise_kernels():
                return net(inputs)

        return share_right(outputs, batches(part.images, part.labels, EVALUATED))

    def _judging(self, net: nn.Module) -> AbstractContextManager[None]:
        """As in training on a GPU; a CPU has the time to be exact."""
        return half_precision(net, self.device) if self.device.type == "cuda" else nullcontext()


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


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel, (1, 3, 1, 1) each."""
    # One channel at a time: as floats, all of them are four times as large as they are here.
    found = [torch.std_mean(images[:, c].float()) for c in range(images.shape[1])]
    std, mean = (torch.stack(each).view(1, -1, 1, 1) for each in zip(*found, strict=True))
    return mean, std
