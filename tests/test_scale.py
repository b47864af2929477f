"""Scoring large units: nothing of size d x d, pieces of a batch, several passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import splitgrow as sg
from splitgrow import chunks, span, zoo


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def images(count: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, size, size, dtype=dtype), torch.arange(count) % 10


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def test_full_size_vgg19_is_scored_without_a_matrix_of_d_by_d() -> None:
    model = zoo.vgg19()
    batch = images(2, 32)
    units = sg.find_units(model, batch[0][:1])
    largest = max(unit.size for unit in units)
    assert largest == 4608
    with LargestTensor() as seen:
        scores = sg.score(model, loss_fn, [batch], units=units, steps=2)
    assert {found.method for found in scores.values()} == {"lanczos", "span"}
    assert seen.numel < largest * largest  # not even that of a single neuron
    assert all(torch.isfinite(found.values).all() for found in scores.values())


@pytest.mark.parametrize("make", [lambda: zoo.vgg19(width=4), lambda: zoo.mobilenet_v1(width=4)])
def test_pieces_of_a_batch_give_the_same_scores(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = make().double()
    batch = images(6, 32, torch.float64)
    units = sg.find_units(model, batch[0][:1])
    whole = sg.score(model, loss_fn, [batch], units=units, steps=4)
    monkeypatch.setattr(chunks, "CPU_PIECE", 2**14)
    found = _evidence(model, units, [batch])
    assert len(list(chunks.pieces(found, units[0], units.analysis))) > 1
    assert not found  # nobody else holds the batches
    cut = sg.score(model, loss_fn, [batch], units=units, steps=4)
    for name, found in whole.items():
        scale = found.values.abs().max().clamp_min(1e-30)
        assert ((found.values - cut[name].values).abs() / scale).max() < 1e-9


def test_samples_that_a_model_mixes_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.last(hidden - hidden.mean(dim=0))

    model = Centred().double()
    batch = (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 2)
    units = sg.find_units(model, batch[0])
    monkeypatch.setattr(chunks, "CPU_PIECE", 8)
    found = _evidence(model, units, [batch])
    assert len(list(chunks.pieces(found, units["first"], units.analysis))) == 1
    monkeypatch.setattr(chunks, "CPU_PIECE", 2**20)
    found = _evidence(model, units, [batch, batch])
    assert len(list(chunks.pieces(found, units["first"], units.analysis))) == 2


def _evidence(model: nn.Module, units: sg.Units, batches: list[Any]) -> list[Any]:
    from splitgrow.tap import collect

    per_batch = [found for _, _, found in collect(model, units, units, loss_fn, batches)]
    return [evidence for found in per_batch for evidence in found[units[0].name]]


@pytest.mark.parametrize("make", [lambda: zoo.vgg19(width=4), lambda: zoo.mobilenet_v1(width=4)])
def test_small_batches_are_scored_together(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal sizes: each sample counts the same, in a batch of its own or not."""
    model: nn.Module = make().double()
    x, labels = images(7, 32, torch.float64)
    batches = [(x[:1], labels[:1]), (x[1:3], labels[1:3]), (x[3:], labels[3:])]
    units = sg.find_units(model, x[:1])
    monkeypatch.setattr(chunks, "CPU_PIECE", 2**30)
    found = _evidence(model, units, batches)
    (piece,) = chunks.pieces(found, units[0], units.analysis)
    assert piece.samples == 7
    together = sg.score(model, loss_fn, batches, units=units, steps=4)
    monkeypatch.setattr(chunks, "_alike", lambda *_: False)
    apart = sg.score(model, loss_fn, batches, units=units, steps=4)
    one = sg.score(model, loss_fn, [(x, labels)], units=units, steps=4)
    for name, scores in together.items():
        scale = scores.values.abs().max().clamp_min(1e-30)
        for other in (apart, one):
            assert ((scores.values - other[name].values).abs() / scale).max() < 1e-9


def test_batches_that_use_different_outputs_stay_apart() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(4, 3)
            self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.tanh(self.trunk(x))
            return self.left(hidden), self.right(hidden)

    def use(sides: tuple[int, ...]) -> Any:
        return lambda m, x: sum((m(x)[side].square().mean() for side in sides), torch.zeros(()))

    model = Two().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    units = sg.find_units(model, x)
    left, right = (
        sg.score(model, use((side,)), [x], units=units, steps=99)["trunk"] for side in (0, 1)
    )
    calls = iter([0, 1] * 9)
    mixed = sg.score(model, lambda m, b: use((next(calls),))(m, b), [x, x], units=units, steps=99)
    both = sg.score(model, use((0, 1)), [x], units=units, steps=99)["trunk"]
    assert not torch.allclose(left.values, right.values)
    torch.testing.assert_close(mixed["trunk"].values, both.values / 2)


def test_late_layers_are_solved_in_the_span_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few places and many parameters: the same eigenpairs from a smaller problem."""
    model = nn.Sequential(
        nn.Conv2d(2, 9, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(9, 7, 3, padding=1), nn.BatchNorm2d(7), nn.GELU(),
        nn.Conv2d(7, 7, 3, groups=7, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(28, 30), nn.Tanh(), nn.Linear(30, 10),
    ).double()  # fmt: skip
    batch = (torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(10, (5,)))
    units = sg.find_units(model, batch[0])
    exact = sg.score(model, loss_fn, [batch], units=units, steps=10**9)
    halves = [(batch[0][:2], batch[1][:2]), (batch[0][2:], batch[1][2:])]
    found = sg.score(model, loss_fn, halves, units=units, steps=40)
    assert {name: u.method for name, u in found.items()} == {
        "0": "dense", "3": "span", "9": "dense"
    }  # fmt: skip
    monkeypatch.setattr(span, "pays", lambda *_: True)
    for steps in (27, 40):
        spanned = sg.score(model, loss_fn, halves, units=units, steps=steps)
        for name in ("3", "9") if steps == 27 else ("3",):
            assert spanned[name].method == "span"
            assert (spanned[name].values - exact[name].values).abs().max() < 1e-10
            assert spanned[name].residuals.max() < 1e-10
            overlap = (spanned[name].vectors * exact[name].vectors).sum(1).abs()
            assert overlap[exact[name].values < -1e-9].min() > 1 - 1e-8


def test_outside_of_the_span_lambda_is_zero() -> None:
    """A neuron whose S is positive where there is data has lambda_min = 0 elsewhere."""
    model = nn.Sequential(nn.Linear(40, 3), nn.Softplus(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[2].weight.fill_(1.0)
    x = torch.randn(4, 40, dtype=torch.float64)
    scores = sg.score(model, lambda m, b: m(b).mean(), [x], units=sg.find_units(model, x), steps=8)
    found = scores["0"]
    assert found.method == "span"
    assert found.values.eq(0).all()
    assert (found.vectors.norm(dim=1) - 1).abs().max() < 1e-12
    image = found.vectors[:, :40] @ x.T + found.vectors[:, 40:]
    assert image.abs().max() < 1e-10
