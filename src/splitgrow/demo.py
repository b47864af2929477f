"""The demonstration: train a small CNN on handwritten digits, split it once, train on.

The data are the 1,797 digits that scikit-learn ships, so nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.errors import SplitgrowError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8) in [0, 1] and labels, for training and for testing."""

    train: Batch
    test: Batch


def load_digits() -> Digits:
    """scikit-learn's handwritten digits, every fourth one kept for testing."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise SplitgrowError(
            "the demo needs scikit-learn for its data: pip install 'splitgrow[demo]'."
        ) from error
    raw = load()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target)
    held_out = torch.arange(len(labels)) % 4 == 0
    return Digits((images[~held_out], labels[~held_out]), (images[held_out], labels[held_out]))


def small_cnn() -> nn.Module:
    """Three convolutions with very few channels: too small for its task."""
    layers: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(1, 3, 3, padding=1, bias=False)),
        ("norm1", nn.BatchNorm2d(3)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(3, 4, 3, padding=1, bias=False)),
        ("norm2", nn.BatchNorm2d(4)),
        ("relu2", nn.ReLU()),
        ("pool", nn.MaxPool2d(2)),
        ("conv3", nn.Conv2d(4, 5, 3, padding=1, bias=False)),
        ("norm3", nn.BatchNorm2d(5)),
        ("relu3", nn.ReLU()),
        ("mean", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        ("classifier", nn.Linear(5, 10)),
    ]
    return nn.Sequential(OrderedDict(layers))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of a batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Batch, epochs: int, label: str
) -> None:
    """Plain minibatch training, with a progress bar."""
    images, labels = data
    model.train()
    for _ in track(range(epochs), description=label, transient=True):
        for rows in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            loss_fn(model, (images[rows], labels[rows])).backward()
            optimizer.step()


@dataclass(frozen=True)
class Row:
    """A line of the table of results."""

    net: str
    parameters: int
    loss: float
    accuracy: float


@torch.no_grad()
def evaluate(name: str, model: nn.Module, data: Digits) -> Row:
    """Size, loss on the training images and accuracy on the test images."""
    model.eval()
    images, labels = data.test
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    size = sum(p.numel() for p in model.parameters())
    return Row(name, size, loss_fn(model, data.train).item(), accuracy)


def run(seed: int = 0, epochs: int = 40, fraction: float = 0.5) -> None:
    """Train, find units, score, select, split, and train on; show each step."""
    console = Console()
    torch.set_num_threads(1)  # a net this small only waits for a second thread
    torch.manual_seed(seed)
    data = load_digits()
    model = small_cnn()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    train(model, optimizer, data.train, epochs, "training the small net")
    rows = [evaluate("small net", model, data)]
    alone, alone_optimizer = _twin(model, optimizer)

    console.rule("1. find_units: what can be split")
    units = sg.find_units(model, data.train[0][:1])
    console.print(str(units), highlight=False)
    console.rule("2. score: which neurons are stuck")
    scores = sg.score(model, loss_fn, [data.train], units=units)
    console.print(str(scores), highlight=False)
    console.rule("3. select and split")
    plan = sg.select(scores, fraction=fraction)
    receipt = sg.split(model, plan, optimizer=optimizer, loss_fn=loss_fn, batches=[data.train])
    console.print(str(receipt), highlight=False)

    console.rule("4. train on")
    rows.append(evaluate("right after the split", model, data))
    train(model, optimizer, data.train, epochs, "training the split net")
    train(alone, alone_optimizer, data.train, epochs, "training the small net as long")
    rows.append(evaluate(f"split net, {epochs} epochs on", model, data))
    rows.append(evaluate(f"small net without a split, {epochs} epochs on", alone, data))
    console.print(_results(rows))


def _twin(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A copy that trains on without a split, for comparison."""
    other = copy.deepcopy(model)
    twin = torch.optim.Adam(other.parameters(), lr=5e-3)
    twin.load_state_dict(optimizer.state_dict())
    return other, twin


def _results(rows: list[Row]) -> Table:
    table = Table(title="scikit-learn's digits", title_justify="left")
    for header in ("net", "parameters", "training loss", "test accuracy"):
        table.add_column(header, justify="left" if header == "net" else "right")
    for row in rows:
        table.add_row(row.net, f"{row.parameters:,}", f"{row.loss:.4f}", f"{row.accuracy:.1%}")
    return table
