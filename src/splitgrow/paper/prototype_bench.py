"""MNIST for the prototypes on one device: training, scores, evaluation, a judge of pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import InputError
from splitgrow.paper.augment import elastic
from splitgrow.paper.data import DataSet
from splitgrow.paper.prototype_net import Objective, PrototypeClassifier, squared_error
from splitgrow.paper.training import Course, Rate, adam
from splitgrow.phase import Phase
from splitgrow.score import score
from splitgrow.scores import Scores
from splitgrow.state import seeded
from splitgrow.units import Units, find_units

Batch = tuple[Tensor, Tensor]  # images and labels
UNIT = "prototypes"
EVALUATED = 5000  # images at a time


@dataclass(frozen=True)
class Setting:
    """What is published of the network, and below the line what the paper leaves open."""

    learning_rate: float = 0.002
    batch: int = 250
    objective: Objective = field(default_factory=Objective)
    # ---------------------------------------------------------------------------------------
    prototypes: int = 10
    epochs: int = 12  # of every phase
    rate: str = "linear"  # down to 0 in every phase, so that it ends near a local optimum
    images: int = 60_000
    scored: int = 10_000
    step: float | None = None  # searched
    # Of the smooth minimum over prototypes, relative to the mean squared distance of the images to
    # their nearest one.
    temperature: float = 0.1
    fifth: int = 5  # prototypes at which each of them is split in turn
    judge_epochs: int = 10  # of the classifier that judges the pictures

    def quick(self) -> Setting:
        """The same in minutes on a CPU: few images, few prototypes, far from the optimum."""
        return replace(
            self, batch=100, prototypes=4, epochs=6, images=4000, scored=1000, fifth=3,
            judge_epochs=4,
        )  # fmt: skip


class Bench:
    """One seed's data and judge, on one device."""

    def __init__(self, setting: Setting, seed: int, data: DataSet, device: torch.device) -> None:
        self.setting, self.seed, self.device = setting, seed, device
        self._units: dict[int, Units] = {}
        self.images = _scaled(data.train.images[: setting.images]).to(device)
        self.labels = data.train.labels[: setting.images].to(device)
        self.test = _scaled(data.test.images).to(device), data.test.labels.to(device)
        if len(self.images) < setting.batch:
            raise InputError(f"prototypes: expected at least {setting.batch} images.")
        scored = self.images[: setting.scored], self.labels[: setting.scored]
        self.scored = list(zip(*(part.split(setting.batch) for part in scored), strict=True))
        self.course = Course(
            len(self.images), setting.batch, setting.epochs,
            Rate(setting.learning_rate, setting.rate),
        )  # fmt: skip

    def new_net(self) -> PrototypeClassifier:
        """One prototype, at random."""
        with seeded(self.seed):
            return PrototypeClassifier().to(self.device)

    def others(self, net: nn.Module) -> list[str]:
        """The units of encoder and decoder, which do not grow."""
        return [u.name for u in find_units(net, (self.images[:2],)) if u.name != UNIT]

    def units(self, net: PrototypeClassifier) -> Units:
        """The prototypes alone; traced once for each number of them."""
        count = len(net.prototypes.theta)
        if count not in self._units:
            example = (self.images[:2],)
            self._units[count] = find_units(net, example, exclude=self.others(net))
        return self._units[count]

    def scores(self, net: PrototypeClassifier, matrix: str) -> Scores:
        """Splitting index and direction of every prototype."""
        return score(net, self.loss_fn(matrix), self.scored, units=self.units(net))

    def loss_fn(self, matrix: str) -> Any:
        """The loss whose splitting matrix is taken."""
        objective = self.setting.objective
        return objective.classifying if matrix == "classification" else objective.full

    # ---- training -----------------------------------------------------------------------------

    def train(self, net: nn.Module, phase: Phase) -> None:
        """One phase with the published loss, on images that are bent anew every time."""
        net = cast("PrototypeClassifier", net)

        def loss_of(index: Tensor) -> Tensor:
            batch = elastic(self.images[index]), self.labels[index]
            return self.setting.objective.published(net, batch)

        self.course.train(net, loss_of, adam, phase)
        self._settle(net)

    @torch.no_grad()
    def _settle(self, net: PrototypeClassifier) -> None:
        """Prepare the terms that only scoring uses: even masses, a temperature that fits."""
        net.share_evenly()
        squares = torch.cat([net.prototypes(net.encoder(x)).amin(1) for x, _ in self.scored])
        net.temperature.copy_(self.setting.temperature * squares.mean().clamp_min(1e-6))

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """The loss on the training images as they are, and how the test images fare."""
        net = cast("PrototypeClassifier", net)
        loss = mean_over(partial(self.setting.objective.published, net), (self.images, self.labels))
        return {
            "loss": loss,
            "accuracy": mean_over(partial(_accuracy, net), self.test),
            "reconstruction": mean_over(partial(_reconstruction, net), self.test),
        }

    def judge(self) -> nn.Module:
        """A classifier of its own kind, which has seen nothing of the prototypes."""
        with seeded(self.seed + 1_000_000):
            net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Dropout(), nn.Linear(32 * 49, 10),
            ).to(self.device)  # fmt: skip

            def loss_of(index: Tensor) -> Tensor:
                return F.cross_entropy(net(elastic(self.images[index])), self.labels[index])

            rate = Rate(self.setting.learning_rate, "linear")
            course = replace(self.course, epochs=self.setting.judge_epochs, rate=rate)
            course.train(net, loss_of, adam, Phase())
        return net.eval()


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255


def mean_over(of: Callable[[Batch], Tensor], data: Batch) -> float:
    """The mean over a data set of something that takes batches of equal size."""
    parts = zip(*(part.split(EVALUATED) for part in data), strict=True)
    with torch.no_grad():
        found = [(float(of(batch)), len(batch[0])) for batch in parts]
    return sum(value * count for value, count in found) / sum(count for _, count in found)


def _accuracy(net: PrototypeClassifier, batch: Batch) -> Tensor:
    return (net(batch[0]).logits.argmax(1) == batch[1]).float().mean()


def _reconstruction(net: PrototypeClassifier, batch: Batch) -> Tensor:
    return squared_error(net(batch[0]).pictures, batch[0])
