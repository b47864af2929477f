"""Scoring that begins with the vectors of earlier scores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg
from splitgrow import methods, span, zoo
from splitgrow.runs import RunFolder
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


def test_in_the_span_of_the_data_a_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is solved there takes its eight steps, from nothing."""
    model, batches, _ = trained()
    monkeypatch.setattr(span, "pays", lambda unit, terms, *_: terms[0][1].has_rows)
    cold = sg.score(model, loss_fn, batches)
    warm = sg.score(model, loss_fn, batches, start=cold)
    by_span = [name for name, found in cold.items() if found.method == "span"]
    assert by_span
    for name in by_span:
        assert warm[name].method == "span"
        assert torch.equal(warm[name].values, cold[name].values)


def test_a_start_takes_fewer_steps() -> None:
    model, batches, _ = trained()
    found = sg.score(model, loss_fn, batches)
    assert Effort().products == LANCZOS_STEPS > WARM_STEPS == Effort(start=found).products
    assert Effort(3, found).products == 3


def test_scores_of_other_neurons_are_no_start() -> None:
    model, batches, _ = trained()
    other = zoo.VGG([6, "M", 5, "M", 6]).double().eval()
    earlier = sg.score(other, loss_fn, batches[:1])
    with pytest.raises(sg.InputError, match=r"start: .* \(6, 6, 3, 3\) in the model, .*\(5, 6"):
        sg.score(model, loss_fn, batches, start=earlier)
    with pytest.raises(sg.InputError, match="start: expected what score"):
        sg.score(model, loss_fn, batches, start={})  # type: ignore[arg-type]


# --- through a split ------------------------------------------------------------------------


def every(scores: sg.Scores, units: sg.Units, *names: str) -> sg.SplitPlan:
    """A plan that splits all neurons of some units, whatever their index."""
    entries = [
        sg.Entry(name, k, -1.0, scores[name].vectors[k], 1.0)
        for name in names
        for k in range(units[name].width)
    ]
    return sg.SplitPlan(entries, units)


def agreement(found: Tensor, exact: sg.UnitScores) -> float:
    """The least squared cosine with the vectors of unstable neurons; signs mean nothing.

    Of a stable one, the best direction of two equal inputs is that of their difference: lambda 0.
    """
    cosines = (found * exact.vectors).sum(1)
    return float(cosines.square()[exact.values < 0].min())


def mobilenet() -> nn.Module:
    """Its neurons have two filters each."""
    torch.manual_seed(0)
    return zoo.MobileNetV1([(5, 1), (6, 2), (7, 1)], stem=4).double().eval()


@pytest.mark.parametrize("net", ["vgg", "mobilenet"])
def test_directions_follow_the_neurons_through_a_split(net: str) -> None:
    """Where all inputs of a neuron become two, or none, what it had is what it has."""
    model, batches, images = trained()
    model = mobilenet() if net == "mobilenet" else model
    units = sg.find_units(model, images[:1])
    scores = sg.score(model, loss_fn, batches, units=units, steps=60)
    names = [unit.name for unit in units]
    plan = every(scores, units, *(names[-1:] if net == "mobilenet" else names))
    sg.split(model, plan, step=1e-7)
    grown = sg.find_units(model, images[:1])
    carried = scores.directions.after(plan)
    exact = sg.score(model, loss_fn, batches, units=grown, steps=60)
    for unit in grown:
        vectors = carried.of(unit)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(unit.width).double())
        assert agreement(vectors, exact[unit.name]) > 1 - 1e-6


def test_after_a_split_and_training_on_two_steps_do_more_than_two_from_none() -> None:
    model, batches, images = trained()
    units = sg.find_units(model, images[:1])
    scores = sg.score(model, loss_fn, batches, units=units)
    plan = sg.select(scores, fraction=0.5)
    sg.split(model, plan, step=sg.Relative(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    grown = sg.find_units(model, images[:1])
    exact = sg.score(model, loss_fn, batches, units=grown, steps=60)
    start = scores.directions.after(plan)
    warm = sg.score(model, loss_fn, batches, units=grown, steps=2, start=start)
    cold = sg.score(model, loss_fn, batches, units=grown, steps=2)
    assert off(warm, exact) < 0.7 * off(cold, exact)


def test_directions_of_another_model_are_not_carried() -> None:
    model, batches, images = trained()
    found = sg.score(model, loss_fn, batches).directions
    other = mobilenet()
    units = sg.find_units(other, images[:1])
    plan = every(sg.score(other, loss_fn, batches, units=units), units, units[0].name)
    with pytest.raises(sg.InputError, match=r"plan: .* another model .*stem.* is missing"):
        found.after(plan)


class Shared(nn.Module):
    """Rows and columns of the same parameters are two units."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(3, 5)) for _ in range(2))
        self.last = nn.Linear(15, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(x[:, :1, None] * self.p + x[:, 1:, None] * self.q)
        return self.last(found.flatten(1))


def test_two_units_may_share_their_parameters() -> None:
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(40, 2).double()
    batches = [(x, torch.sin(3 * x[:, :1]))]
    scores = sg.score(model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), batches)
    assert [unit.size for unit in scores.units] == [10, 6]
    for name, found in scores.items():
        torch.testing.assert_close(scores.directions.of(scores.units[name]), found.vectors)


# --- in a run -------------------------------------------------------------------------------


def run(folder: Path, phases: int = 4, **changes: Any) -> sg.Result:
    """A run whose units are solved by Lanczos, in few steps: where it starts shows."""
    _, batches, _ = trained()
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "train": sg.Trainer(batches, loss_fn, epochs=1, lr=0.01), "loss_fn": loss_fn,
        "batches": batches, "policy": sg.Policy(count=3, lanczos=2, step=sg.Relative(0.1)),
        "until": sg.Budget(phases=phases), "run_dir": folder, "resume": True,
    }  # fmt: skip
    return sg.grow(zoo.VGG([4, "M", 4]).double(), **(settings | changes))


def by_itself(model: nn.Module, phase: sg.Phase) -> None:
    """A training whose optimizer stays with it: a run goes on from what was trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in trained()[1]:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        phase.log(loss)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def test_each_scoring_of_a_run_starts_from_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []
    score = methods.score
    monkeypatch.setattr(
        methods, "score", lambda *a, **k: starts.append(k["start"]) or score(*a, **k)
    )
    run(tmp_path / "run")
    assert [start is None for start in starts] == [True, False, False]
    saved = RunFolder(tmp_path / "run").saved()
    for kept, start in zip((s for s in saved if s.grown), starts[1:], strict=False):
        found = kept.directions()
        assert found is not None
        assert all(torch.equal(found.tensors[n], t) for n, t in start.tensors.items())
    starts.clear()
    run(tmp_path / "anew", policy=sg.Policy(count=3, lanczos=2, after="retrain"))
    assert [start is None for start in starts] == [True, True, True]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    run(tmp_path, 2, train=by_itself)
    (tmp_path / "phase-0001" / "directions.safetensors").unlink()
    assert len(run(tmp_path, 3, train=by_itself).history.phases) == 3


def test_excluded_units_have_no_directions(tmp_path: Path) -> None:
    run(tmp_path, 3, exclude=["features.0"])
    kept = RunFolder(tmp_path).saved()[-1].directions()
    assert kept is not None
    assert not any(key.startswith("features.0.") for key in kept.tensors)


def test_a_method_that_ranks_by_itself_is_asked(tmp_path: Path) -> None:
    class Last(methods.Splitting):
        """Of each unit the least promising neuron."""

        def rank(self, site: methods.Site) -> dict[str, Any]:
            return {name: found[-1:] for name, found in super().rank(site).items()}

    result = run(tmp_path, 2, method=Last(), policy=sg.Policy(count=9))
    split = result.history.phases[0].split
    assert split is not None
    assert len(split.neurons) <= len({event.unit for event in split.neurons})
    assert RunFolder(tmp_path).saved()[-1].directions() is None


@pytest.mark.parametrize("given", [{}, {"train": by_itself}], ids=["carried", "by itself"])
def test_a_resumed_run_starts_where_it_would_have(tmp_path: Path, given: dict[str, Any]) -> None:
    run(tmp_path / "whole", **given)
    whole = files(tmp_path / "whole")
    for number in (1, 3):
        part = tmp_path / f"part{number}"
        run(part, number, **given)  # ends after a training, and goes on from there or before
        run(part, **given)
        assert files(part) == whole
    shutil.rmtree(part / "phase-0003")
    run(part, **given)
    assert files(part) == whole


def test_where_training_changes_the_net_scoring_starts_from_nothing(tmp_path: Path) -> None:
    def rebuilt(model: Any, phase: sg.Phase) -> None:
        if phase.number == 1:  # a narrower net in the place of the grown one
            other = zoo.VGG([4, "M", 3]).double()
            model.features, model.classifier = other.features, other.classifier
        by_itself(model, phase)

    result = run(tmp_path, 3, train=rebuilt)
    assert len(result.history.phases) == 3
    assert result.history.phases[1].split is not None


def test_damaged_directions_are_named(tmp_path: Path) -> None:
    run(tmp_path, 2)
    file = tmp_path / "phase-0000-grown" / "directions.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(sg.CheckpointError, match=r"directions.safetensors .*Delete the folder"):
        run(tmp_path, 3)
