"""The paper's RBF experiment, small: it learns, it repeats, and its claims come from its file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import splitgrow as sg
from splitgrow.paper import figures, rbf, results, stats
from splitgrow.paper.cli import app

SMALL = replace(rbf.Setting(), neurons=4, early=2, iterations=60, points=6, angles=5, samples=200)
SEEDS = [0, 1]
COMMITTED = Path(__file__).parents[1] / "results" / "paper" / "rbf.json"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results.collect("rbf", rbf.run_seed, SMALL, SEEDS, workers=1)


def test_every_method_ends_below_its_start(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        assert set(run["final"]) == set(rbf.METHODS)
        for name, curve in run["curves"].items():
            assert len(curve) == SMALL.neurons
            assert run["final"][name] == curve[-1][-1] < 0.9 * curve[0][0]


def test_a_split_never_raises_the_loss_and_all_methods_start_alike(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        assert len({tuple(run["curves"][name][0]) for name in rbf.GROWN}) == 1
        splitting = run["curves"]["splitting"]
        for before, after in pairwise(splitting):
            assert after[0] < before[-1]


def test_the_file_is_recreated_bit_for_bit_also_by_processes(found: dict[str, Any]) -> None:
    again = results.collect("rbf", rbf.run_seed, SMALL, SEEDS, workers=2)
    assert results.to_text(again) == results.to_text(found)
    other = results.collect("rbf", rbf.run_seed, SMALL, [2], workers=1)
    assert other["runs"][0]["final"] != found["runs"][0]["final"]


def test_the_gradient_is_that_of_the_model() -> None:
    study = rbf.Study(SMALL, 0)
    nets = [rbf.Bumps(3, 1.0, torch.Generator().manual_seed(i)) for i in range(2)]
    for net in nets:
        net.weight.copy_(torch.tensor([1.0, 0.5, 0.25]))
    stack = {n: torch.stack([net.state_dict()[n] for net in nets]) for n in nets[0].state_dict()}
    losses, gradients = rbf.slope(study.batch, stack)
    for i, net in enumerate(nets):
        loss = rbf.loss_fn(net, study.batch)
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad)


def test_boosting_moves_the_newest_neuron_alone_and_folding_keeps_the_function() -> None:
    study = rbf.Study(SMALL, 0)
    net = rbf.Bumps(3, 1.0, torch.Generator().manual_seed(0))
    before = torch.tensor(net.numbers())
    study.descent.train([net], newest_only=[net])
    after = torch.tensor(net.numbers())
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2] != after[:, 2]).all()
    net.weight.copy_(torch.tensor([1.0, 0.5, 0.25]))
    outputs = net(study.batch[0])
    net.fold()
    torch.testing.assert_close(net(study.batch[0]), outputs)


def test_theory_holds_right_after_the_split(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        indexes, decreases = run["eigenvalues"]["lambda"], run["eigenvalues"]["at_once"]
        expected = [-v * SMALL.probe_step**2 / 2 for v in indexes]
        assert decreases == pytest.approx(expected, rel=0.1)
        angles = run["angles"]
        best = max(range(SMALL.angles), key=lambda i: angles["at_once"][i])
        assert angles["degrees"][best] == 0


def test_claims_are_computed_from_the_file(found: dict[str, Any], tmp_path: Path) -> None:
    results.save(found, tmp_path / "rbf.json")
    read = results.read(tmp_path / "rbf.json", "rbf")
    assert rbf.claims(read) == rbf.claims(found)
    changed = json.loads(json.dumps(read))
    for run in changed["runs"]:
        run["final"] |= dict.fromkeys(rbf.METHODS, 1.0) | {"splitting": 2.0}
    lowest = rbf.claims(changed)["splitting has the lowest final loss"]
    assert lowest["lowest of all"] == 0
    assert lowest["methods"]["random"]["losses"] == len(SEEDS)
    with pytest.raises(sg.InputError, match="splitgrow paper mmd"):
        results.read(tmp_path / "rbf.json", "mmd")


def test_the_error_out_of_sight_is_that_beyond_all_bumps() -> None:
    x = torch.linspace(-5, 5, 2001, dtype=torch.float64)
    left, right = [[3.0], [9.0], [1.0]], [[3.0], [-9.0], [1.0]]  # bumps at -3 and at 3
    both = [a + b for a, b in zip(left, right, strict=True)]
    assert rbf._share_out_of_sight(both, left, x) > 0.99
    lower = [[3.0], [9.0], [0.5]]
    assert rbf._share_out_of_sight(left, lower, x) < 0.05


def test_the_committed_claims_are_those_of_the_committed_runs() -> None:
    committed = results.read(COMMITTED, "rbf")
    assert committed["claims"] == results.rounded(rbf.claims(committed))
    assert len(committed["runs"]) == len(committed["seeds"]) >= 8


def test_figures_and_tables_of_a_quick_run(
    tmp_path: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rbf.Setting, "quick", lambda self: SMALL)
    arguments = ["rbf", "--quick", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 seed in " in result.output
    assert re.search(r"lowest of all methods on [01] of 1 seed\s", result.output)
    for name in ("rbf-figure1", "rbf-appendix"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    quick = results.read(tmp_path / "rbf.json", "rbf")
    assert quick["runs"] == found["runs"][:1]
    drawn = (tmp_path / "rbf-figure1.svg").read_bytes()
    assert CliRunner().invoke(app, [*arguments, "--redraw"]).exit_code == 0
    assert (tmp_path / "rbf-figure1.svg").read_bytes() == drawn


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sg.InputError, match=r"splitgrow\[report\]"):
        figures.check_matplotlib()


def test_a_loss_that_overflows_is_refused() -> None:
    study = rbf.Study(SMALL, 0)
    study.start.height.data.fill_(1e200)
    with pytest.raises(sg.LossError, match="learning rate"):
        study.descent.train([study.start])


# --- statistics ----------------------------------------------------------------------------


def test_the_signed_rank_test_counts_what_enumeration_counts() -> None:
    mine, theirs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 1.0, 5.0, 4.0, 9.0, 11.0]
    ranks = [2.5, 1.0, 2.5, 4.0, 5.0]  # of |2|, |-1|, |2|, |4|, |5|; the fourth pair is a tie
    reached = 2.5 + 2.5 + 4.0 + 5.0
    sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s)
            for signs in product((0, 1), repeat=5)]  # fmt: skip
    expected = sum(total >= reached for total in sums) / 2**5
    assert stats.wilcoxon(mine, theirs) == expected
    assert stats.wilcoxon(theirs, mine) > 0.5


def test_sign_test_quartiles_and_correlation() -> None:
    assert stats.sign_test(5, 0) == 1 / 32
    assert stats.sign_test(0, 0) == 1
    assert stats.sign_test(3, 2) == 0.5
    assert stats.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert stats.pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert stats.pearson([1, 2, 3, 4], [1, -1, -1, 1]) == pytest.approx(0)
    assert stats.pearson([1, 2, 3], [1, 1, 1]) is None
    assert stats.compare([1, 1, 2], [2, 1, 1])["wins"] == 1
    with pytest.raises(sg.InputError, match="pairs"):
        stats.wilcoxon([1.0], [])
