"""Scoring stops when the choice is settled, and says how sure it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import splitgrow as sg
from fake_scores import fake_scores
from splitgrow.distributed import length_of
from splitgrow.settle import settled


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def problem(samples: int, noise: float) -> tuple[nn.Module, Tensor, Tensor]:
    """A net whose neurons differ in how much there is to gain from each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(0.05, 2, 8)[None])
    x = torch.randn(samples, 3, dtype=torch.float64)
    y = model(x).detach() + x.square().sum(1, keepdim=True) - 3
    return model, x, y + noise * torch.randn_like(y)


def batches_of(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def test_overlap_by_hand() -> None:
    scores = fake_scores([-3.0, -2.0, -1.0, 1.0], [0.5, 0.5, 0.5, 0.5])
    # The cut between the second and the third is at -1.5: three errors and one error away.
    expected = sum(float(torch.special.ndtr(torch.tensor(z))) for z in (3.0, 1.0)) / 2
    assert scores.overlap(2) == pytest.approx(expected)
    assert scores.overlap(2, "gain") == pytest.approx(expected)  # all of the same length
    assert scores.overlap(2, shrink=1e-3) == pytest.approx(1)
    # A neuron that is to be chosen in any case needs a negative lambda all the same.
    last = float(torch.special.ndtr(torch.tensor(0.5 / 0.5)))
    rest = sum(float(torch.special.ndtr(torch.tensor(z))) for z in (5.0, 3.0))
    assert scores.overlap(4) == pytest.approx((rest + last) / 3)
    assert fake_scores([1.0, 2.0], [0.1, 0.1]).overlap(1) == 1.0
    nan = float("nan")
    assert torch.tensor(fake_scores([-2.0, -1.0], [nan, nan]).overlap(1)).isnan()


def test_overlap_is_what_samples_show() -> None:
    """Drawn from the distribution that the errors describe, choices agree as often as it says."""
    torch.manual_seed(0)
    truth, error = -torch.rand(60, dtype=torch.float64), 0.1
    claimed, seen = [], []
    for _ in range(15):
        drawn = truth + error * torch.randn(60, dtype=torch.float64)
        claimed.append(fake_scores(drawn.tolist(), [error] * 60).overlap(18))
        right, named = (set(v.argsort()[:18].tolist()) for v in (truth, drawn))
        seen.append(len(right & named) / 18)
    mean, found = (sum(v) / len(v) for v in (claimed, seen))
    assert mean == pytest.approx(found, abs=0.06)


def test_a_clear_choice_takes_few_batches_and_is_that_of_all() -> None:
    model, x, y = problem(4096, noise=0.01)
    batches = batches_of(x, y, 32)
    units = sg.find_units(model, x[:2])
    whole = sg.score(model, loss_fn, batches, units=units)
    found = sg.score(model, loss_fn, batches, units=units, settle=sg.Settle(0.9, fraction=0.125))
    assert found.samples < 4096
    assert found.overlap(1) > 0.5
    chosen = [sg.select(s, fraction=0.125).chosen for s in (whole, found)]
    assert chosen[0] == chosen[1]


def test_an_unclear_choice_takes_all_batches() -> None:
    model, x, y = problem(512, noise=30.0)
    batches = batches_of(x, y, 16)
    units = sg.find_units(model, x[:2])
    found = sg.score(model, loss_fn, batches, units=units, settle=sg.Settle(0.999, count=4))
    assert found.samples == 512
    whole = sg.score(model, loss_fn, batches, units=units)
    assert torch.equal(found[units[0].name].values, whole[units[0].name].values)


def test_portions_grow_as_far_as_the_errors_say() -> None:
    asked: list[int] = []
    found: list[sg.Scores] = []
    sure = {8: 0.3, 32: 1e-9}

    def score(batches: Any, start: sg.Directions | None) -> sg.Scores:
        assert (start is None) == (not found)
        if start is not None:  # each portion begins with the vectors of the one before
            (unit,) = found[-1].units
            torch.testing.assert_close(start.of(unit), F.normalize(found[-1][unit.name].vectors))
        asked.append(len(list(batches)))
        error = sure.get(asked[-1], 0.3)
        found.append(fake_scores([-3.0, -2.0, -1.0], [error * 2] * 3))
        return found[-1]

    settled(score, [0] * 64, sg.Settle(0.95, count=1))
    # 64 batches: the eighth is 8; twice as many would not do, four times as many would.
    assert asked == [8, 32]


@pytest.mark.parametrize("count", [1, 8])
def test_few_batches_are_all_scored_at_once(count: int) -> None:
    asked: list[int] = []

    def score(batches: Any, start: sg.Scores | None) -> sg.Scores:
        asked.append(len(list(batches)))
        return fake_scores([-3.0, -2.0], [float("nan")] * 2)

    settled(score, [0] * count, sg.Settle(0.9, count=1))
    assert asked == [count]


def test_a_shuffling_loader_is_read_in_one_order() -> None:
    """A generator of its own would make each pass see other batches among the first ones."""
    model, x, y = problem(512, noise=1.0)
    made = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=made)
    units = sg.find_units(model, x[:2])
    settle = sg.Settle(0.5, count=2)
    one, two = (
        sg.score(model, loss_fn, loader, units=units, settle=settle, steps=2, memory=memory)
        for memory in (None, 1)
    )
    assert one.samples == two.samples < 512
    name = units[0].name
    assert torch.allclose(one[name].values, two[name].values, rtol=1e-9)


def test_batches_without_a_length() -> None:
    model, x, y = problem(256, noise=0.1)

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(batches_of(x, y, 8))

    found = sg.score(model, loss_fn, Stream(), settle=sg.Settle(0.8, fraction=0.25))
    assert 0 < found.samples <= 256


def test_a_loader_that_cannot_tell_its_length() -> None:
    model, x, y = problem(256, noise=0.1)

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(zip(x, y, strict=True))

    loader = DataLoader(Endless(), 8)
    found = sg.score(model, loss_fn, loader, settle=sg.Settle(0.8, fraction=0.25))
    assert 0 < found.samples <= 256


def test_no_batches_at_all() -> None:
    model, x, _ = problem(16, noise=0.1)
    units = sg.find_units(model, x)
    with pytest.raises(sg.InputError, match="batches: there are none"):
        sg.score(model, loss_fn, [], units=units, settle=sg.Settle(0.8, fraction=0.25))


def test_lengths_are_known_without_reading() -> None:
    assert length_of([1, 2, 3]) == 3
    assert length_of(sg.Shard([1, 2, 3])) == 3
    assert length_of(sg.Shard.of([1, 2, 3])) == 3  # of one process
    assert length_of(x for x in (1, 2)) is None


def test_a_policy_hands_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem(1024, noise=0.01)
    result = sg.grow(
        model, train=lambda model, phase: phase.log(1.0), loss_fn=loss_fn,
        batches=batches_of(x, y, 16), policy=sg.Policy(fraction=0.25, settle=0.8),
        until=sg.Budget(phases=2),
    )  # fmt: skip
    assert model[0].out_features == 10
    assert sg.Policy(fraction=0.25, settle=0.8).settled(8) == sg.Settle(0.8, count=2)
    assert sg.Policy().settled(8) is None
    assert len(result.history.phases) == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: sg.Settle(1.0, count=1), "overlap"),
        (lambda: sg.Settle(0.9), "fraction= or count="),
        (lambda: sg.Settle(0.9, fraction=0.1, count=2), "fraction= or count="),
        (lambda: sg.Settle(0.9, fraction=1.5), "fraction"),
        (lambda: sg.Settle(0.9, count=0), "count"),
        (lambda: sg.Settle(0.9, count=2.5), "count"),  # type: ignore[arg-type]
        (lambda: sg.Settle("much", count=2), "overlap"),  # type: ignore[arg-type]
        (lambda: sg.Settle(0.9, count=2, rank="size"), "rank"),  # type: ignore[arg-type]
        (lambda: sg.Policy(settle=2.0), "settle"),
        (lambda: sg.Policy(settle="0.9"), "settle"),  # type: ignore[arg-type]
        (lambda: sg.Policy(step="0.3"), "step"),  # type: ignore[arg-type]
        (lambda: sg.Policy(step=True), "step"),
        (lambda: sg.Relative(0.0), "positive"),
        (lambda: sg.Relative("much"), "positive"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense(make: Any, says: str) -> None:
    with pytest.raises(sg.InputError, match=says):
        make()


def test_settle_must_be_one() -> None:
    model, x, y = problem(16, noise=0.1)
    with pytest.raises(sg.InputError, match=r"settle: expected splitgrow\.Settle"):
        sg.score(model, loss_fn, [(x, y)], settle=0.9)  # type: ignore[arg-type]
