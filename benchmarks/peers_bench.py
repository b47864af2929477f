"""What is compared in `peers.py`, and on what: nets, data, a training pass, time and memory.

The data are scikit-learn's digits, enlarged to 32x32, shifted and coloured at random, so that any
number of images can be drawn and a net learns something within a few dozen steps: at random weights
or random labels second derivatives say little. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import meters
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import zoo
from splitgrow.zoo.resnet import resnet50

Batch = tuple[Tensor, Tensor]
EPOCH = 45_000  # images of the training set that a split phase is expressed in


def as_patches(images: Tensor) -> Tensor:
    """Images (B, 3, 32, 32) as sequences of 4x4 patches (B, 64, 48)."""
    return F.unfold(images, 4, stride=4).mT.contiguous()


@dataclass(frozen=True)
class Net:
    """A net, how its images look, and how much of it one machine can do: (images, batch)."""

    build: Callable[[], nn.Module]
    cpu: tuple[int, int]
    cuda: tuple[int, int]
    prepare: Callable[[Tensor], Tensor] = lambda images: images
    cpu_steps: int = 240  # of training before anything is measured
    cuda_steps: int = 240
    rate: float = 1e-3  # of that training


NETS: dict[str, Net] = {
    "VGG19, 16 channels": Net(lambda: zoo.vgg19(width=16), (256, 64), (2048, 128)),
    "MobileNetV1, 16 channels": Net(
        lambda: zoo.mobilenet_v1(width=16), (128, 64), (2048, 128),
        cpu_steps=400, cuda_steps=400, rate=1e-2,  # it learns nothing for the first hundred steps
    ),
    "VGG19, full size": Net(lambda: zoo.vgg19(), (64, 32), (1024, 128), cpu_steps=16),
    "ResNet-50, full size": Net(lambda: resnet50(), (32, 16), (512, 64), cpu_steps=16),
    "Transformer, 12 layers": Net(
        lambda: zoo.Transformer(48, 64, dim=192, heads=3, hidden=768, depth=12),
        (64, 32), (1024, 128), as_patches, cpu_steps=400, cuda_steps=400, rate=3e-4,
    ),
}  # fmt: skip


def loss_fn(model: Any, batch: Batch) -> Tensor:
    """Cross entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(images, size=(24, 24), mode="bilinear")
    return F.pad(large, (4, 4, 4, 4)), torch.tensor(found.target)


def draw(count: int, seed: int) -> Batch:
    """Digits, drawn with replacement: shifted by up to 4 places, coloured, with noise."""
    random = torch.Generator().manual_seed(seed)
    images, labels = _digits()
    which = torch.randint(len(labels), (count,), generator=random)
    shifts = torch.randint(-4, 5, (count, 2), generator=random).tolist()
    shifted = [
        torch.roll(images[i], s, (1, 2)) for i, s in zip(which.tolist(), shifts, strict=True)
    ]
    colour = 1 + 0.3 * torch.randn(count, 3, 1, 1, generator=random)
    noise = 0.3 * torch.randn(count, 3, 32, 32, generator=random)
    return 2 * torch.stack(shifted) * colour - 0.5 + noise, labels[which]


class Bench:
    """A briefly trained net with the batches that every method is given."""

    def __init__(self, name: str, images: int, batch: int, device: str, steps: int) -> None:
        torch.manual_seed(0)
        net = NETS[name]
        self.name, self.images, self.batch, self.device = name, images, batch, device
        self.model = net.build().to(device)
        inputs, labels = draw(images, seed=1)
        data = net.prepare(inputs).to(device), labels.to(device)
        self.batches: list[Batch] = list(zip(*(t.split(batch) for t in data), strict=True))
        if steps:
            self._warm_up(net, steps)
        self.model.eval()
        self.units = sg.find_units(self.model, self.batches[0][0][:2])

    def _warm_up(self, net: Net, steps: int) -> None:
        """Adam, and then running statistics of the weights as they are now."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=net.rate)
        inputs, labels = draw(steps * self.batch, seed=2)
        data = net.prepare(inputs).to(self.device), labels.to(self.device)
        batches = list(zip(*(t.split(self.batch) for t in data), strict=True))
        self.model.train()
        for batch in batches:
            optimizer.zero_grad()
            loss_fn(self.model, batch).backward()
            optimizer.step()
        with torch.no_grad():
            for batch in batches[-20:]:
                self.model(batch[0])

    def accuracy(self) -> float:
        """On the scored images. At chance (0.1) what is measured of quality means little."""
        with torch.no_grad():
            right = [(self.model(x).argmax(1) == y).sum().item() for x, y in self.batches]
        return sum(right) / self.images

    @property
    def neurons(self) -> int:
        """How many neurons there are to choose from."""
        return sum(unit.width for unit in self.units)

    def wait(self) -> None:
        """For kernels that still run."""
        meters.wait(self.device)

    def clock(self, action: Callable[[], object]) -> float:
        """Seconds that an action takes."""
        return meters.clock(action, self.device)


class Trainer:
    """Training without any method: the unit of cost. The bench's own net stays as it is."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model = copy.deepcopy(bench.model).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)

    def step(self, batch: Batch) -> None:
        """Forward in train mode, backward, SGD with momentum."""
        self.optimizer.zero_grad()
        loss_fn(self.model, batch).backward()
        self.optimizer.step()

    def __call__(self) -> None:
        """One step on each batch."""
        for batch in self.bench.batches:
            self.step(batch)


@dataclass
class Times:
    """A method's time beside that of a training pass over the same images, taken in turn."""

    method: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """By repetition."""
        return [m / t for m, t in zip(self.method, self.train, strict=True)]

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


def interleave(
    bench: Bench, trainer: Trainer, action: Callable[[], object], repeats: int, seconds: float
) -> Times:
    """Training and the method in turn, until `repeats` are done or `seconds` have passed."""
    times, start = Times(), time.perf_counter()
    while not times.method or (
        len(times.method) < repeats and time.perf_counter() - start < seconds
    ):
        before = bench.clock(trainer)
        times.method.append(bench.clock(action))
        times.train.append(statistics.median([before, bench.clock(trainer)]))
    return times


def peak(bench: Bench, action: Callable[[], object]) -> float:
    """Bytes that an action needs above the model and the data.

    On a CPU that is the largest resident size, so that it has to run in a process of its own.
    """
    if bench.device != "cpu":
        return meters.allocated(action)
    base = meters.reset_resident()
    action()
    return meters.largest_resident() - base
