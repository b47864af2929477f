"""The benchmark against peers: methods on tiny nets against dense truth, and its arithmetic."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import peers
import peers_bench
import peers_figure
import peers_gromo
from peers_bench import NETS, Bench, Net, Times
from peers_methods import Descent, DoesNotFit, Limits, dense, ours, rayleigh
from peers_quality import (
    Answer,
    errors,
    gain,
    most_negative,
    overlap_by_unit,
    overlap_over_net,
    reference,
)

from splitgrow import zoo
from splitgrow.zoo.resnet import Bottleneck

NO_LIMITS = Limits(1e9, 1e12, 1e3)

TINY: dict[str, Net] = {
    "vgg": Net(lambda: zoo.VGG((4, 5, "M", 6)), (16, 8), (16, 8)),
    "mobilenet": Net(lambda: zoo.MobileNetV1(((4, 2), (5, 2)), stem=4), (16, 8), (16, 8)),
    "resnet": Net(
        lambda: zoo.ResNet((2,), (6,), hidden=(3,), stem=4, block=Bottleneck), (8, 4), (8, 4)
    ),
    "transformer": Net(
        lambda: zoo.Transformer(48, 64, dim=8, heads=2, hidden=6, depth=1),
        (16, 8), (16, 8), peers_bench.as_patches,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=TINY)
def bench(request: pytest.FixtureRequest) -> Bench:
    NETS[request.param] = TINY[request.param]
    images, batch = TINY[request.param].cpu
    try:
        return as_double(Bench(request.param, images, batch, "cpu", 4))
    finally:
        del NETS[request.param]


@pytest.fixture(scope="module")
def truth(bench: Bench) -> Answer:
    """In tiny nets the reference has more steps than parameters: it is exact."""
    return reference(bench, torch.float64, steps=max(unit.size for unit in bench.units))


def as_double(bench: Bench) -> Bench:
    import splitgrow as sg

    bench.model.double()
    bench.batches = [(images.double(), labels) for images, labels in bench.batches]
    bench.units = sg.find_units(bench.model, bench.batches[0][0][:2])
    return bench


def assert_same(found: Answer, truth: Answer, tolerance: float) -> None:
    for name, values in truth.values.items():
        scale = values.abs().max().item()
        torch.testing.assert_close(
            found.values[name].double(), values, rtol=0, atol=tolerance * scale
        )


# ---- methods -------------------------------------------------------------------------------------


def test_the_literal_definition_equals_ours(bench: Bench, truth: Answer) -> None:
    found = dense(bench, NO_LIMITS).answer
    assert found is not None
    assert_same(found, truth, 1e-6)
    assert overlap_over_net(found.values, truth.values) == 1


def test_the_literal_definition_builds_both_kinds_of_unit() -> None:
    kinds = set()
    for name, net in TINY.items():
        NETS[name] = net
        kinds |= {unit.subgraph.diagonal for unit in Bench(name, 2, 2, "cpu", 0).units}
        del NETS[name]
    assert kinds == {True, False}


def test_rayleigh_descent_converges_to_the_smallest_eigenvalue(bench: Bench, truth: Answer) -> None:
    bench_of_one = as_one_batch(bench)  # without noise between batches it has a limit
    found = rayleigh(bench_of_one, Descent(passes=250, rate=0.03)).answer
    assert found is not None
    median, _ = errors(found.values, truth.values)
    assert median < 1e-4
    for name, values in truth.values.items():  # a quotient is never below the smallest eigenvalue
        assert bool((found.values[name] >= values - 1e-6 * values.abs().max()).all())


def as_one_batch(bench: Bench) -> Bench:
    import copy

    one = copy.copy(bench)
    one.batches = [tuple(torch.cat(parts) for parts in zip(*bench.batches, strict=True))]  # type: ignore[list-item]
    return one


def test_few_passes_of_the_descent_are_worse_than_many(bench: Bench, truth: Answer) -> None:
    few, many = (rayleigh(bench, Descent(passes, 0.03)).answer for passes in (1, 60))
    assert few is not None
    assert many is not None
    assert errors(few.values, truth.values)[0] > errors(many.values, truth.values)[0]


def test_the_rate_falls_as_published() -> None:
    descent = Descent(passes=10, rate=1.0)
    rates = [descent.rate_at(i) for i in range(10)]
    assert rates == pytest.approx([1, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008, 0.0016, 0.0016, 0.00032])


def test_ours_is_what_score_returns(bench: Bench, truth: Answer) -> None:
    found = ours(bench, None).answer
    assert found is not None
    assert overlap_by_unit(found.values, truth.values) == 1


def test_dense_says_what_does_not_fit(bench: Bench) -> None:
    with pytest.raises(DoesNotFit, match=r"matrices of \d+ x \d+ float32 = .* GB"):
        dense(bench, Limits(10, 1e12, 1e3))
    with pytest.raises(DoesNotFit, match="multiplications"):
        dense(bench, Limits(1e9, 10, 1e3))
    with pytest.raises(DoesNotFit, match="stopped after"):
        dense(bench, Limits(1e9, 1e12, 0))


def test_splits_of_the_right_neurons_lower_the_loss(bench: Bench, truth: Answer) -> None:
    before = {name: p.clone() for name, p in bench.model.state_dict().items()}
    done = gain(bench, truth)
    assert done.neurons == max(round(0.3 * bench.neurons), 1)
    assert done.change < 0
    for name, tensor in bench.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_gromo_has_the_same_weights_and_lowers_the_loss() -> None:
    pytest.importorskip("gromo")
    for name in ("vgg", "resnet", "transformer"):
        NETS[name] = TINY[name]
        bench = Bench(name, 16, 8, "cpu", 4)
        del NETS[name]
        wrapped, growable = peers_gromo.growing(bench.model)
        images = bench.batches[0][0]
        torch.testing.assert_close(wrapped(images), bench.model(images))
        assert growable
        outcome = peers_gromo.tiny(bench)
        assert peers_gromo.change(bench, outcome) <= 0


def test_what_gromo_cannot_express_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_gromo, "find_spec", lambda _: None)
    with pytest.raises(DoesNotFit, match="not installed"):
        peers_gromo.growing(zoo.vgg19(4))
    monkeypatch.setattr(peers_gromo, "find_spec", lambda _: True)
    with pytest.raises(DoesNotFit, match="depthwise"):
        peers_gromo.growing(zoo.mobilenet_v1(4))
    with pytest.raises(DoesNotFit, match="no two plain layers"):
        peers_gromo.growing(nn.Linear(2, 2))


# ---- arithmetic ----------------------------------------------------------------------------------

RIGHT: dict[str, Tensor] = {
    "a": torch.tensor([-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    "b": torch.tensor([-9.0, -8.0, -7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
}


def test_most_negative() -> None:
    assert most_negative(RIGHT["a"]) == {0, 1, 2}
    assert most_negative(torch.tensor([1.0, 1.0])) == {0}
    assert most_negative(torch.zeros(10)) == {0, 1, 2}


def test_overlap_of_made_up_numbers() -> None:
    assert overlap_by_unit(RIGHT, RIGHT) == overlap_over_net(RIGHT, RIGHT) == 1
    found = RIGHT | {"a": RIGHT["a"].flip(0)}
    assert overlap_by_unit(found, RIGHT) == 0.5
    assert overlap_over_net(found, RIGHT) == 0.5
    assert overlap_over_net(RIGHT | {"b": -RIGHT["b"]}, RIGHT) == pytest.approx(3 / 6)


def test_units_without_negative_lambda_do_not_count() -> None:
    flat = {"a": RIGHT["a"], "c": torch.ones(10)}
    assert overlap_by_unit({"a": RIGHT["a"], "c": torch.randn(10)}, flat) == 1


def test_errors_are_relative_and_of_the_neurons_worth_splitting() -> None:
    found = {"a": RIGHT["a"] * 1.1, "b": RIGHT["b"].clone()}
    found["a"][9] = 1e9
    median, worst = errors(found, RIGHT)
    assert median == 0.0  # the lower of the two in the middle
    assert worst == pytest.approx(0.1)


def test_ratios_are_of_neighbours_in_time() -> None:
    times = Times(method=[6.0, 20.0, 9.0], train=[2.0, 5.0, 3.0])
    assert times.ratios == [3.0, 4.0, 3.0]
    assert times.ratio == 3.0


# ---- the results file ----------------------------------------------------------------------------


def row(method: str, images: int = 8) -> dict[str, object]:
    return {"net": "VGG19, 16 channels", "method": method, "settings": {"images": images}}


def test_results_survive_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "peers-cpu.json"
    first = peers.Results(path)
    first.put(row("dense"))
    first.put(row("ours"))
    again = peers.Results(path)
    assert [r["method"] for r in again.rows] == ["ours", "dense"]
    assert again.has("VGG19, 16 channels", "ours", {"images": 8})
    assert not again.has("VGG19, 16 channels", "ours", {"images": 16})
    assert not again.has("VGG19, 16 channels", "ours-4", {"images": 8})
    again.put(row("ours", images=16))
    assert [r["settings"] for r in json.loads(path.read_text())["rows"]] == [
        {"images": 16}, {"images": 8},
    ]  # fmt: skip


def test_a_run_writes_each_row_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(session: peers.Session, method: str) -> dict[str, object]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(method)
        return {"net": session.name, "method": method, "settings": session.settings,
                "status": "not installed"}  # fmt: skip

    monkeypatch.setattr(peers.Session, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["peers.py", "--net", "VGG19, 16", "--quick", "--results", str(tmp_path)]
    )
    args: argparse.Namespace = peers.parse()
    with pytest.raises(KeyboardInterrupt):
        peers.measure_all(args)
    assert len(json.loads((tmp_path / "peers-cpu.json").read_text())["rows"]) == 2
    first, measured[:] = list(measured), []
    with pytest.raises(KeyboardInterrupt):
        peers.measure_all(args)
    assert not set(first) & set(measured)


def titles(figure: Path) -> list[str]:
    return re.findall(r"<!-- (.* threads?) -->", figure.read_text())


def test_the_figure_tells_the_threads_of_each_net(tmp_path: Path) -> None:
    rows = json.loads((peers.RESULTS / "peers-cpu.json").read_text())["rows"]
    used = {row["net"]: row["settings"]["threads"] for row in rows}
    told = [f"{net}, {n} thread{'s' if n > 1 else ''}" for net, n in used.items()]
    assert len(set(used.values())) > 1
    assert titles(peers.RESULTS / "peers.svg") == told
    rows[0]["settings"]["threads"] = 3  # beside other methods on the same net
    (tmp_path / "peers-cpu.json").write_text(json.dumps({"rows": rows}))
    peers_figure.draw(tmp_path)
    assert titles(tmp_path / "peers.svg") == [f"{rows[0]['net']}, 1 or 3 threads", *told[1:]]


def test_a_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the figure, on a tiny net."""
    monkeypatch.setitem(NETS, "vgg", TINY["vgg"])
    monkeypatch.setattr(
        sys, "argv",
        ["peers.py", "--net", "vgg", "--method", "ours", "--method", "dense", "--quick",
         "--no-memory", "--results", str(tmp_path)],
    )  # fmt: skip
    for name in [name for name in NETS if name != "vgg"]:
        monkeypatch.delitem(NETS, name)
    peers.main()
    ours_row, dense_row = json.loads((tmp_path / "peers-cpu.json").read_text())["rows"]
    assert ours_row["overlap over net"] == dense_row["overlap over net"] == 1
    assert ours_row["epochs"] == pytest.approx(ours_row["cost"] * 2048 / 45_000, rel=0.5)
    assert dense_row["recipe images"] == 45_000
    assert ours_row["change"] < 0
    assert (tmp_path / "peers.png").stat().st_size > 0
    assert (tmp_path / "peers.svg").stat().st_size > 0
