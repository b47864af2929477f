"""Growing on scikit-learn's handwritten digits: a study that takes minutes on a laptop.

A net of a few hundred parameters grows until a budget is spent and is then trained to the end.
Beside it, with as many epochs in all: random splitting under the same rules, the grown structure
with fresh weights, and a much larger net.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.errors import SplitgrowError
from splitgrow.fit import Trainer, fit
from splitgrow.grow import grow
from splitgrow.history import History
from splitgrow.phase import Phase
from splitgrow.policy import Budget, Policy
from splitgrow.state import seeded
from splitgrow.watch import Watcher

Batch = tuple[Tensor, Tensor]
Widths = Sequence[int]

SEED_WIDTHS = (2, 2, 3)
LARGE_WIDTHS = (16, 16, 24)


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in [0, 1] and labels, for training and for testing."""

    train: Batch
    test: Batch

    @property
    def batches(self) -> list[Batch]:
        """The training data in batches of 64, in a fixed random order."""
        images, labels = self.train
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return [(images[rows], labels[rows]) for rows in order.split(64)]


def load_digits() -> Digits:
    """scikit-learn's handwritten digits, every fourth one kept for testing."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise SplitgrowError(
            "the digits come with scikit-learn: pip install 'splitgrow[demo]'."
        ) from error
    raw = load()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    held_out = torch.arange(len(labels)) % 4 == 0
    return Digits((images[~held_out], labels[~held_out]), (images[held_out], labels[held_out]))


def cnn(widths: Widths = SEED_WIDTHS, seed: int = 0) -> nn.Module:
    """Three convolutions and a linear layer; with the seed's widths, too small for its task."""
    a, b, c = widths
    with seeded(seed):
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(1, a, 3, padding=1, bias=False)),
            ("norm1", nn.BatchNorm2d(a)),
            ("silu1", nn.SiLU()),
            ("conv2", nn.Conv2d(a, b, 3, padding=1, bias=False)),
            ("norm2", nn.BatchNorm2d(b)),
            ("silu2", nn.SiLU()),
            ("pool", nn.AvgPool2d(2)),
            ("conv3", nn.Conv2d(b, c, 3, padding=1, bias=False)),
            ("norm3", nn.BatchNorm2d(c)),
            ("silu3", nn.SiLU()),
            ("mean", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            ("classifier", nn.Linear(c, 10)),
        ]
    return nn.Sequential(OrderedDict(layers))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


@dataclass(frozen=True)
class Setting:
    """Sizes and lengths of the study."""

    params: int = 1200
    epochs: int = 10  # in a phase of growth
    total: int = 150  # in all, for every net
    fraction: float = 0.4
    lr: float = 1e-2
    weight_decay: float = 0.3


@dataclass(frozen=True)
class Row:
    """How one net did."""

    net: str
    seed: int
    widths: tuple[int, ...]
    params: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Study:
    """All nets of one seed."""

    data: Digits
    setting: Setting = Setting()
    seed: int = 0

    def grown(
        self,
        name: str,
        method: str,
        *,
        per_unit: int = 1,
        run_dir: Path | None = None,
        watch: Sequence[Watcher] = (),
    ) -> tuple[Row, History]:
        """A net grown from the seed and trained to the end."""
        setting, start = self.setting, time.perf_counter()
        model = cnn(seed=self.seed)
        train = Trainer(
            self.data.batches, loss_fn, epochs=setting.epochs, optimizer="adamw", lr=setting.lr,
            weight_decay=setting.weight_decay, shuffle=True,
        )  # fmt: skip
        result = grow(
            model, train=train, loss_fn=loss_fn, batches=[self.data.train],
            evaluate=lambda m: {"accuracy": accuracy(m, self.data.test)},
            policy=Policy(fraction=setting.fraction, min_per_unit=per_unit),
            until=Budget(params=setting.params, phases=20), method=method, finish=self._finish,
            run_dir=run_dir, seed=self.seed, watch=watch,
        )  # fmt: skip
        return self._row(name, model, time.perf_counter() - start), result.history

    def from_scratch(self, name: str, widths: Widths) -> Row:
        """A net of fixed widths, trained for as many epochs as a grown one in all."""
        start = time.perf_counter()
        model = cnn(widths, self.seed)
        self._finish(model, Phase())
        return self._row(name, model, time.perf_counter() - start)

    def _finish(self, model: nn.Module, phase: Phase) -> None:
        """The epochs that the phases of growth have left, with a new optimizer."""
        phase.forget_optimizer()
        fit(
            model, self.data.batches, loss_fn, optimizer="adamw", lr=self.setting.lr,
            epochs=max(self.setting.total - self.setting.epochs * phase.number, 1),
            weight_decay=self.setting.weight_decay, schedule="cosine", shuffle=True,
            seed=self.seed, phase=phase,
        )  # fmt: skip

    def _row(self, name: str, model: nn.Module, seconds: float) -> Row:
        model.eval()
        with torch.no_grad():
            loss = loss_fn(model, self.data.train).item()
        size = sum(p.numel() for p in model.parameters())
        return Row(
            name, self.seed, widths_of(model), size, loss, accuracy(model, self.data.test), seconds
        )


@torch.no_grad()
def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of a batch that is classified correctly, in eval mode."""
    images, labels = batch
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def widths_of(model: nn.Module) -> tuple[int, ...]:
    """The number of channels of each convolution."""
    return tuple(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
