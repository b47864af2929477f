"""The training after the last split; and a split of which only some neurons help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.methods import Site, Splitting
from splitgrow.policy import Limits
from splitgrow.split import rehearse

Batch = tuple[Tensor, Tensor]


def data() -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 3, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x[:, :1]) * x[:, 1:2]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Training:
    """A train() that notes the phases it was called for."""

    def __init__(self, epochs: int) -> None:
        self.trainer = sg.Trainer([data()], loss_fn, epochs=epochs, lr=0.02)
        self.seen: list[int] = []

    def __call__(self, model: nn.Module, phase: sg.Phase) -> None:
        self.seen.append(phase.number)
        self.trainer(model, phase)


def run(train: Training, finish: Training | None, run_dir: Path | None = None) -> sg.Result:
    return sg.grow(
        build(), train=train, finish=finish, loss_fn=loss_fn, batches=[data()],
        policy=sg.Policy(count=1), until=sg.Budget(phases=2), run_dir=run_dir,
        resume=run_dir is not None,
    )  # fmt: skip


def test_finish_trains_once_more_after_the_last_split() -> None:
    train, finish = Training(5), Training(20)
    result = run(train, finish)
    assert (train.seen, finish.seen) == ([0, 1], [2])
    assert [p.finish for p in result.history.phases] == [False, False, True]
    assert [p.iterations for p in result.history.phases] == [5, 5, 20]
    assert result.history.phases[1].params == result.history.phases[2].params
    assert result.history.phases[2].loss < result.history.phases[1].loss
    assert result.stopped == "phases"


def test_a_finished_run_is_over(tmp_path: Path) -> None:
    first = run(Training(5), Training(20), tmp_path / "run")
    train, finish = Training(5), Training(20)
    again = run(train, finish, tmp_path / "run")
    assert (train.seen, finish.seen) == ([], [])
    assert again.history == first.history
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_that_was_cut_before_its_finish_is_finished_with_the_same_result(
    tmp_path: Path,
) -> None:
    whole = run(Training(5), Training(20))
    run(Training(5), None, tmp_path / "run")
    finish = Training(20)
    resumed = run(Training(5), finish, tmp_path / "run")
    assert finish.seen == [2]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_finish_must_be_a_function() -> None:
    with pytest.raises(sg.InputError, match="finish: expected a function"):
        run(Training(1), 3)  # type: ignore[arg-type]


def test_an_optimizer_that_was_not_handed_over_gets_a_hint() -> None:
    kept: list[torch.optim.Optimizer] = []

    def train(model: nn.Module, phase: sg.Phase) -> None:
        if not kept:
            kept.append(torch.optim.Adam(model.parameters(), lr=0.01))
        for _ in range(3):
            kept[0].zero_grad()
            loss_fn(model, data()).backward()
            kept[0].step()

    with pytest.raises(RuntimeError) as caught:
        sg.grow(build(), train=train, loss_fn=loss_fn, batches=[data()], until=sg.Budget(phases=3))
    assert "phase.optimizer = optimizer" in caught.value.__notes__[0]


# ---- a plan of which only some neurons help --------------------------------------------------


def site_of(model: nn.Module) -> tuple[Site, sg.SplitPlan]:
    """A plan with one good direction and one that raises the loss at every step."""
    units = sg.find_units(model, data()[0][:1])
    scores = sg.score(model, loss_fn, [data()], units=units)["0"]
    entries = []
    for k, value in enumerate(scores.values.tolist()):
        entries.append(sg.Entry("0", k, value, scores.vectors[k], float(scores.scales[k])))
    plan = sg.SplitPlan(entries, units)
    site = Site(model, units, loss_fn, [data()], sg.Policy(count=2), Limits(2, None, None))
    return site, plan


def harmful(site: Site, plan: sg.SplitPlan, entry: sg.Entry, largest: int) -> sg.Entry:
    """The same neuron along a direction in which no step up to 10^(largest / 4) helps."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        drawn = torch.randn(4, generator=generator, dtype=torch.float64)
        other = sg.Entry(entry.unit, entry.neuron, entry.lambda_, drawn / drawn.norm(), entry.scale)
        alone = sg.SplitPlan([other], plan.units)
        steps = [10 ** (i / 4) for i in range(-12, largest + 1)]
        if min(rehearse(site.model, alone, steps, loss_fn, [data()])) > 0:
            return other
    raise AssertionError("no such direction")


def test_rehearsing_leaves_no_trace() -> None:
    model = build()
    site, plan = site_of(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changes = rehearse(model, plan, (1e-3, 1e-2), site.loss_fn, site.batches)
    assert len(changes) == 2
    assert all(change < 0 for change in changes)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model[0].out_features == 2


def test_neurons_that_do_not_help_are_left_out() -> None:
    model = build()
    site, plan = site_of(model)
    good, bad = plan[0], harmful(site, plan, plan[1], 16)
    loud = sg.Entry(bad.unit, bad.neuron, bad.lambda_, bad.direction, 1e3 * bad.scale)
    mixed = sg.SplitPlan([good, loud], plan.units)  # its steps are so large that all is lost
    with pytest.raises(sg.SplitRefused):
        sg.split(model, mixed, loss_fn=loss_fn, batches=[data()])
    growth = Splitting().carry_out(site, mixed)
    assert [(g.unit, g.neuron) for g in growth.neurons] == [("0", 0)]
    assert growth.measured is not None
    assert growth.measured < 0
    assert model[0].out_features == 3


def test_where_no_neuron_helps_nothing_is_changed() -> None:
    model = build()
    site, plan = site_of(model)
    mixed = sg.SplitPlan([harmful(site, plan, entry, 0) for entry in plan], plan.units)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(sg.SplitRefused, match="Nothing was changed"):
        Splitting().carry_out(site, mixed)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_new_neurons_have_the_effect_that_they_are_given(effect: float) -> None:
    result = sg.grow(
        build(), train=Training(5), loss_fn=loss_fn, batches=[data()],
        policy=sg.Policy(count=2), until=sg.Budget(phases=2), method=sg.NewNeuron(effect),
    )  # fmt: skip
    split = result.history.phases[0].split
    assert split is not None
    assert split.parity is not None
    assert (split.parity > 1e-6) == (effect > 0)
    assert split.parity < 1.0
    assert [event.parent for event in split.neurons] == [None, None]
