"""Units that are solved together, a pass over the batches for each product, keep nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitgrow as sg
from cases import CASES, LOSSES, Case
from helpers_score import Counted, batch_of, model_of, parts_of, units_of
from splitgrow import stream
from splitgrow.keep import keep
from splitgrow.solve import Effort
from splitgrow.tap import Source


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_stream_finds_what_kept_activations_give(case: Case) -> None:
    batches = parts_of(batch_of(case, "mse"))
    given: Any = {"units": units_of(case), "stand_in": None, "steps": 6}
    kept = sg.score(model_of(case), LOSSES["mse"], batches, **given)
    streamed = sg.score(model_of(case), LOSSES["mse"], batches, memory=1, **given)
    assert streamed.loss == pytest.approx(kept.loss, rel=1e-12)
    assert streamed.samples == kept.samples
    for name, found in kept.items():
        other = streamed[name]
        assert other.method == ("zero" if found.method == "zero" else "stream")
        scale = found.values.abs().max().clamp_min(1e-12)
        # In the span of the data an index that is 0 is known to be; Lanczos gets close to it.
        tolerance = 1e-6 if found.method == "span" else 1e-8
        assert ((other.values - found.values).abs() / scale).max() < tolerance
        sure = found.values < -1e-6 * scale  # a direction counts only where there is curvature
        overlap = (other.vectors * found.vectors).sum(dim=1)[sure].abs()
        assert found.method == "span" or (overlap > 1 - 1e-6).all()
        assert torch.allclose(other.errors, found.errors, rtol=1e-4, atol=float(tolerance * scale))


def test_a_stream_reads_the_batches_once_for_each_step_and_once_for_the_errors() -> None:
    model = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(12, 12)
    batches = Counted([(x[i : i + 4],) for i in range(0, 12, 4)])

    def loss_fn(model: Any, batch: tuple[Tensor]) -> Tensor:
        return model(batch[0]).square().mean()

    units = sg.find_units(model, x[:1])
    found = sg.score(model, loss_fn, batches, units=units, steps=3, memory=1)
    assert {scores.method for scores in found.values()} == {"stream"}
    # One that finds out that there is no room, three products, and the standard errors.
    assert batches.passes == 1 + 3 + 1


def test_what_does_not_fit_is_not_even_gathered() -> None:
    """The pass that finds out ends as soon as it is clear, not after all batches are kept."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    seen: list[int] = []

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        seen.append(len(batch))
        return model(batch).square().mean()

    batches = [torch.randn(8, 4) for _ in range(50)]
    units = sg.find_units(model, batches[0])
    one = keep(
        Source(model, units, loss_fn, batches[:1]), list(units), None, _alone(), too_many=_no
    )
    assert one is not None
    size = sum(t.numel() * 4 for e in one.evidence[units[0].name] for t in e.tensors())
    seen.clear()
    source = Source(model, units, loss_fn, batches)
    assert keep(source, list(units), size, _alone(), too_many=lambda n: n > 5.5) is None
    assert len(seen) == 6


def test_nothing_of_a_batch_is_held_when_the_next_one_begins() -> None:
    model = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        made.clear()
        hidden = model(batch)
        made.append(weakref.ref(hidden))
        return hidden.square().mean()

    seen: list[weakref.ref[Any]] = []
    batches = [torch.randn(4, 12) for _ in range(3)]
    units = sg.find_units(model, batches[0])
    for _, _, evidence in Source(model, units, loss_fn, batches).collect(list(units)):
        assert not [ref for ref in seen if ref() is not None]
        seen = [weakref.ref(t) for found in evidence.values() for e in found for t in e.tensors()
                if t.shape[0] == 4 and t.requires_grad is False and t.ndim == 2
                and t.shape[1] != 12]  # fmt: skip
        assert seen
        del evidence
    assert alive == [0, 0, 0]


def _no(passes: float) -> bool:
    return False


def _alone() -> Any:
    from splitgrow.team import Team

    return Team()


def test_streaming_pays_where_keeping_would_pass_over_the_batches_often() -> None:
    assert not stream.pays(1, Effort())
    assert not stream.pays(11, Effort(8))
    assert stream.pays(12, Effort(8))
    assert stream.pays(8, Effort(4))
    assert not stream.pays(6, Effort(4))
