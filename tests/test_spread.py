"""Standard errors of lambda: from batch to batch, whatever way the products are taken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import chunks, zoo
from splitgrow.spread import Spread
from splitgrow.spread import errors as errors_of
from splitgrow.team import Team


def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches_of(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    return [
        (torch.randn(n, 3, 32, 32, dtype=torch.float64), torch.randint(10, (n,))) for n in sizes
    ]


def literal_errors(model: nn.Module, units: sg.Units, batches: Any, scores: sg.Scores) -> Any:
    """From S of each batch alone, built column by column."""
    from splitgrow.eigen import dense
    from splitgrow.matrix import SplittingMatrix
    from splitgrow.tap import collect
    from splitgrow.units import named_tensors

    tensors = named_tensors(model)
    constants = {node: tensors[name].detach() for node, name in units.graph.tensors.items()}
    total = sum(len(labels) for _, labels in batches)
    parts: dict[str, list[tuple[int, Tensor]]] = {unit.name: [] for unit in units}
    for _, count, found in collect(model, units, list(units), loss_fn, batches):
        for unit in units:
            (evidence,) = found[unit.name]
            apply = SplittingMatrix(unit, evidence, constants, sg.Softplus())
            S = dense(apply, unit.width, unit.size, torch.zeros(0, dtype=torch.float64))
            v = scores[unit.name].vectors
            form = torch.einsum("ki,kij,kj->k", v, S, v)
            parts[unit.name].append((count, count / total * form))
    errors = {}
    for name, groups in parts.items():
        value = sum(c for _, c in groups)
        squares = sum((c - n / total * value) ** 2 for n, c in groups)
        errors[name] = (len(groups) / (len(groups) - 1) * squares).sqrt()
    return errors


NETS = {
    "vgg": lambda: zoo.VGG([4, "M", 5, "M", 3]),
    "mobilenet": lambda: zoo.MobileNetV1([(4, 2), (5, 2), (3, 2)], stem=4),
}


@pytest.mark.parametrize("make", NETS.values(), ids=NETS)
@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "streamed"])
@pytest.mark.parametrize("piece", [2**30, 1], ids=["joined", "apart"])
def test_errors_are_those_between_batches(
    make: Any, memory: int | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    # With pieces of one sample, batches of one are groups in any case.
    batches = batches_of([2, 1, 3] if piece > 1 else [1, 1, 1, 1])
    units = sg.find_units(model, batches[0][0])
    monkeypatch.setattr(chunks, "CPU_PIECE", piece)
    scores = sg.score(model, loss_fn, batches, units=units, memory=memory, steps=4)
    wanted = literal_errors(model, units, batches, scores)
    for name, found in scores.items():
        assert (found.errors > 0).any()
        scale = wanted[name].abs().max()
        assert ((found.errors - wanted[name]).abs() / scale).max() < 1e-7


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "streamed"])
def test_one_small_batch_has_no_error(memory: int | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    batch = (torch.randn(13, 4), torch.randint(2, (13,)))
    (found,) = sg.score(model, loss_fn, [batch], memory=memory).values()
    assert found.errors.isnan().all()
    assert found.values.isfinite().all()


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "streamed"])
def test_a_unit_without_curvature_is_sure_of_it(memory: int | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
    (found,) = sg.score(model, loss_fn, batches, memory=memory).values()
    assert found.method == "zero"
    assert (found.errors == 0).all()


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "streamed"])
def test_several_calls_for_one_batch_are_one_group(memory: int | None) -> None:
    """Half the loss from each of two equal calls is the loss of one, errors included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    sizes = (8, 5, 9, 7)
    batches = [(torch.randn(n, 4).double(), torch.randint(2, (n,))) for n in sizes]
    units = sg.find_units(model, batches[0][0])

    def twice(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (loss_fn(model, batch) + loss_fn(model, batch)) / 2

    one, two = (
        sg.score(model, f, batches, units=units, memory=memory)["0"] for f in (loss_fn, twice)
    )
    assert torch.allclose(one.values, two.values, rtol=1e-9)
    assert torch.allclose(one.errors, two.errors, rtol=1e-9)
    single = sg.score(model, twice, batches[:1], units=units, memory=memory)["0"]
    assert single.errors.isnan().all()


def test_equal_batches_have_no_error_whatever_is_called_on_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    batch = (torch.randn(8, 4).double(), torch.randint(2, (8,)))

    def uneven(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(model, batch) + 3 * loss_fn(model, (batch[0] / 2, batch[1]))

    found = sg.score(model, uneven, [batch] * 6)["0"]
    assert (found.errors < 1e-7 * found.values.abs()).all()


def test_errors_tell_how_far_samples_differ() -> None:
    """Of many samples of one population, lambda deviates as the errors say, for v held fixed."""
    torch.manual_seed(0)
    groups, samples, trials = 16, 64, 400
    population = torch.randn(trials, groups, samples, dtype=torch.float64) + 0.5
    forms = population.mean(dim=2) / groups  # (trials, groups): c_g
    spread, other = Spread(trials, forms.device), Spread(3, forms.device)
    other.add(torch.ones(1, 3), [samples])
    for some in forms.T.split(5):
        spread.add(some, [samples] * len(some))
    single, errors = errors_of([other, spread], Team(), "test")
    assert single.isnan().all()  # one group alone says nothing
    truth = 1 / math.sqrt(groups * samples)
    assert errors.square().mean().sqrt().item() == pytest.approx(truth, rel=0.05)
    assert forms.sum(dim=1).std().item() == pytest.approx(truth, rel=0.1)
    within = ((forms.sum(dim=1) - 0.5).abs() < 2 * errors).double().mean().item()
    assert 0.9 < within < 0.98
