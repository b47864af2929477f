"""Scoring that begins with the vectors of earlier scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import zoo
from splitgrow.solve import LANCZOS_STEPS, WARM_STEPS, Effort


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """A small net after some steps, so that its neurons differ."""
    torch.manual_seed(0)
    model = zoo.VGG([6, "M", 6, "M", 6]).double()
    labels = torch.arange(96) % 10
    images = torch.randn(96, 3, 16, 16, dtype=torch.float64) + labels[:, None, None, None] / 5
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss_fn(model, (images, labels)).backward()
        optimizer.step()
    batches = list(zip(images.split(24), labels.split(24), strict=True))
    return model.eval(), batches, images


def off(found: sg.Scores, exact: sg.Scores) -> float:
    """How far lambda is above the truth, of all neurons, relative to the largest of each unit."""
    return max(
        float(((s.values - exact[n].values) / exact[n].values.abs().max()).max())
        for n, s in found.items()
    )


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "streamed"])
def test_two_steps_from_good_vectors_do_more_than_two_from_none(memory: int | None) -> None:
    model, batches, images = trained()
    units = sg.find_units(model, images[:1])
    exact = sg.score(model, loss_fn, batches, units=units, steps=60)
    earlier = sg.score(model, loss_fn, batches[:2], units=units, steps=60)
    given: Any = {"units": units, "steps": 2, "memory": memory}
    cold = sg.score(model, loss_fn, batches, **given)
    warm = sg.score(model, loss_fn, batches, start=earlier, **given)
    assert off(warm, exact) < 0.5 * off(cold, exact)


def test_a_start_with_the_wrong_eigenvectors_finds_the_right_ones() -> None:
    """The largest eigenvectors in place of the smallest: Lanczos gets away from them."""
    model, batches, images = trained()
    units = sg.find_units(model, images[:1])
    exact = sg.score(model, loss_fn, batches, units=units, steps=60)

    def negative(model: Any, batch: Any) -> Tensor:
        return -loss_fn(model, batch)

    wrong = sg.score(model, negative, batches, units=units, steps=60)
    warm = sg.score(model, loss_fn, batches, units=units, steps=30, start=wrong)
    assert off(warm, exact) < 1e-3


def test_a_start_takes_fewer_steps() -> None:
    model, batches, _ = trained()
    found = sg.score(model, loss_fn, batches)
    assert Effort().products == LANCZOS_STEPS > WARM_STEPS == Effort(start=found).products
    assert Effort(3, found).products == 3


def test_scores_of_other_neurons_are_no_start() -> None:
    model, batches, _ = trained()
    other = zoo.VGG([6, "M", 5, "M", 6]).double().eval()
    earlier = sg.score(other, loss_fn, batches[:1])
    with pytest.raises(
        sg.InputError, match=r"start: .* has 6 neurons of 54 parameters.* 5 neurons"
    ):
        sg.score(model, loss_fn, batches, start=earlier)
    with pytest.raises(sg.InputError, match="start: expected what score"):
        sg.score(model, loss_fn, batches, start={})  # type: ignore[arg-type]
