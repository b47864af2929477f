"""The paper's compression experiment, small; its kernel three ways."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from splitgrow.paper import mmd, results
from splitgrow.paper.cli import app

SMALL = replace(
    mmd.Setting(), samples=200, particles=5, first_iterations=300, iterations=100, points=5,
    random_features=(100, 10_000),
)  # fmt: skip
SEEDS = [0, 1]
COMMITTED = Path(__file__).parents[1] / "results" / "paper" / "mmd.json"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return results.collect("mmd", mmd.run_seed, SMALL, SEEDS, workers=1)


@pytest.fixture
def study() -> mmd.Study:
    return mmd.Study(SMALL, 3)


@pytest.fixture
def net() -> mmd.Particles:
    made = mmd.Particles(torch.tensor([-4.0, -1.0, 1.5, 3.0], dtype=torch.float64), SMALL.fresh)
    made.weight.copy_(torch.tensor([0.125, 0.125, 0.25, 0.5]))
    return made


def test_every_method_ends_below_its_start(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        assert set(run["final"]) == set(mmd.METHODS)
        for name, curve in run["curves"].items():
            assert len(curve) == SMALL.particles
            assert run["final"][name] == curve[-1][-1] < 0.9 * curve[0][0]


def test_splits_halve_weights_and_the_others_share_them_evenly(found: dict[str, Any]) -> None:
    for run in found["runs"]:
        for name in mmd.METHODS:
            theta, weights = run["points"][name][-1]
            assert len(theta) == SMALL.particles
            assert sum(weights) == pytest.approx(1)
            even = weights == pytest.approx([1 / SMALL.particles] * SMALL.particles)
            assert even == (name in {"new", "boosting"})
        herded = [points for points, _ in run["points"]["boosting"]]
        assert all(b[: len(a)] == a for a, b in itertools.pairwise(herded))


def test_the_file_is_recreated_bit_for_bit_also_by_processes(found: dict[str, Any]) -> None:
    again = results.collect("mmd", mmd.run_seed, SMALL, SEEDS, workers=2)
    assert results.to_text(again) == results.to_text(found)


def test_the_net_over_exact_features_is_mmd(study: mmd.Study, net: mmd.Particles) -> None:
    loss = mmd.loss_fn(net, study.field.batch)
    by_kernel = mmd.mmd(net.theta, net.weight, study.data, study.bandwidth)
    torch.testing.assert_close(loss, by_kernel, rtol=1e-10, atol=1e-12)
    loss.backward()
    stack = {name: tensor.unsqueeze(0) for name, tensor in net.state_dict().items()}
    losses, gradients = mmd.slope(study.field.batch, stack)
    torch.testing.assert_close(losses[0], loss.detach())
    torch.testing.assert_close(gradients["theta"][0], net.theta.grad)


def test_the_librarys_index_is_the_kernels_second_derivative(
    study: mmd.Study, net: mmd.Particles
) -> None:
    by_kernel = mmd.kernel_indexes(net, study.data, study.bandwidth)
    (scores,) = study.field.score(net).values()
    torch.testing.assert_close(scores.values, by_kernel, rtol=1e-9, atol=1e-12)
    distance = torch.linspace(-3, 3, 7, dtype=torch.float64, requires_grad=True)
    kernel = torch.exp(-0.5 * (distance / 1.5).square())
    (first,) = torch.autograd.grad(kernel.sum(), distance, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), distance)
    torch.testing.assert_close(mmd.curvature(distance.detach(), 1.5), second)


def test_random_features_come_closer_the_more_there_are(
    study: mmd.Study, net: mmd.Particles
) -> None:
    by_kernel = mmd.kernel_indexes(net, study.data, study.bandwidth)

    def error(count: int) -> float:
        features = mmd.random_features(study.bandwidth, count, torch.Generator().manual_seed(0))
        (scores,) = study._field(features).score(net).values()
        return ((scores.values - by_kernel).abs().max() / by_kernel.abs().max()).item()

    assert error(100_000) < 0.03
    assert error(100_000) < error(100) / 5


def test_herding_starts_where_mmd_is_lowest(study: mmd.Study, net: mmd.Particles) -> None:
    study._herd(net)

    def at(place: torch.Tensor) -> float:
        theta = torch.cat([net.theta.detach()[:-1], place.reshape(1)])
        return mmd.mmd(theta, net.weight, study.data, study.bandwidth).item()

    assert at(net.theta.detach()[-1]) == pytest.approx(min(at(place) for place in study.data))


def test_the_committed_claims_are_those_of_the_committed_runs() -> None:
    committed = results.read(COMMITTED, "mmd")
    assert committed["claims"] == results.rounded(mmd.claims(committed))
    assert len(committed["runs"]) == len(committed["seeds"]) >= 8


def test_figures_and_tables_of_a_quick_run(
    tmp_path: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmd.Setting, "quick", lambda self: SMALL)
    result = CliRunner().invoke(app, ["mmd", "--quick", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "random features" in result.output
    for name in ("mmd-particles", "mmd-loss"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    assert results.read(tmp_path / "mmd.json", "mmd")["runs"] == found["runs"][:1]
