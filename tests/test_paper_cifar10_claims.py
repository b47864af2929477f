"""Answers and figures of the CIFAR-10 jobs, from made-up jobs whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import splitgrow as sg
from splitgrow.paper import cifar10_claims as cc
from splitgrow.paper import cifar10_ends as ends
from splitgrow.paper import cifar10_figures as cf
from splitgrow.paper.effort import effort_curve, efforts
from splitgrow.paper.job_runs import finished
from splitgrow.paper.results import rounded

RESULTS = Path(__file__).parents[1] / "results" / "paper" / "cifar10"

FULL = {"params": 1_000_000, "macs": 10_000_000}
GROWN = (0.002, 0.004, 0.05, 0.35)  # shares of the full net
PRUNED = (1.0, 0.3, 0.02, 0.002)


def point(share: float, accuracy: float, macs: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "params": round(share * FULL["params"]), "macs": round(macs * share * FULL["macs"]),
        "accuracy": accuracy, "validation": accuracy, "loss": 0.5, "epochs": 10,
        "widths": {"features.0": round(100 * share) + 1, "features.3": 7},
        "seconds": {"train": 10.0, "score": 0.5, "split": 0.1}, "split": None, **more,
    }  # fmt: skip


def job(
    method: str,
    accuracy: float,
    seed: int = 0,
    shares: Sequence[float] = GROWN,
    points: list[dict[str, Any]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Accuracy rises by 2 points with every factor e of the size, from ``accuracy`` at 1%."""
    if method in ("l1", "bn"):
        shares = PRUNED
    made = [point(s, accuracy + 0.02 * log(s / 0.01)) for s in shares]
    named = {"arch": "vgg19", "method": method, "after": "finetune", "activation": "relu",
             "seed": seed}  # fmt: skip
    return {"experiment": "cifar10", "job": named | more, "settings": {}, "hardware": "none",
            "versions": {}, "full": FULL, "points": made if points is None else points}  # fmt: skip


GROUP = "vgg19, finetune, relu"


def verdicts(jobs: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {row["target"]: row["verdict"] for row in cc.claims(jobs)["targets"]}


# --- equal size ------------------------------------------------------------------------------


def test_accuracy_is_linear_in_the_logarithm_of_the_size() -> None:
    found = job("splitting", 0.8)
    for size in cc.GRID:
        assert cc.accuracy_at(found, "params", size) == pytest.approx(0.8 + 0.02 * log(size / 0.01))
    half = exp((log(0.05) + log(0.35)) / 2)
    bent = job("splitting", 0, points=[point(0.05, 0.5), point(0.35, 0.9)])
    assert cc.accuracy_at(bent, "params", half) == pytest.approx(0.7)


def test_nothing_is_said_beyond_the_smallest_and_the_largest_net() -> None:
    found = job("splitting", 0.8)
    assert cc.accuracy_at(found, "params", 0.0019) is None
    assert cc.accuracy_at(found, "params", 0.36) is None
    assert cc.accuracy_at(found, "params", 0.002) is not None
    assert cc.accuracy_at(found, "params", 0.35) is not None


def test_macs_are_shares_of_the_full_nets_macs() -> None:
    dear = job("splitting", 0, points=[point(0.01, 0.5, macs=3), point(0.1, 0.9, macs=3)])
    assert cc.accuracy_at(dear, "macs", 0.03) == pytest.approx(0.5)
    assert cc.accuracy_at(dear, "macs", 0.02) is None
    assert cc.accuracy_at(dear, "params", 0.01) == pytest.approx(0.5)


def test_of_two_nets_of_one_size_the_last_counts_and_pruning_runs_down() -> None:
    down = job("l1", 0, points=[point(1, 0.9), point(0.1, 0.6), point(0.1, 0.8)])
    assert cc.curve(down, "params") == ([0.1, 1.0], [0.8, 0.9])


def test_mean_and_deviation_are_over_the_seeds_that_reach_a_size() -> None:
    jobs = [job("splitting", 0.80), job("splitting", 0.82, seed=1),
            job("splitting", 0.87, seed=2, shares=(0.002, 0.015))]  # fmt: skip
    cells = cc.claims(jobs)["groups"][GROUP]["accuracy"]["params"]["splitting"]
    at_one, at_five = cells[cc.GRID.index(0.01)], cells[cc.GRID.index(0.05)]
    assert (at_one["mean"], at_one["seeds"]) == (pytest.approx(0.83), 3)
    assert at_one["std"] == pytest.approx(0.0013**0.5)  # of a sample: n - 1
    assert at_five["seeds"] == 2
    assert at_five["mean"] == pytest.approx(0.81 + 0.02 * log(5))


def test_differences_are_paired_by_seed() -> None:
    jobs = [job("splitting", 0.80), job("splitting", 0.90, seed=1), job("splitting", 0.5, seed=7),
            job("random", 0.79), job("random", 0.87, seed=1), job("random", 0.1, seed=8),
            job("uniform", 0.6, seed=9)]  # fmt: skip
    found = cc.claims(jobs)["groups"][GROUP]["difference"]["params"]["splitting"]
    cell = found["random"][2]
    assert (cell["mean"], cell["pairs"]) == (pytest.approx(0.02), 2)
    assert cell["std"] == pytest.approx(0.02 / 2**0.5)
    alone = found["uniform"][2]
    assert alone["mean"] == pytest.approx((0.8 + 0.9 + 0.5) / 3 - 0.6)
    assert (alone["pairs"], alone["std"]) == (0, None)


# --- targets ---------------------------------------------------------------------------------


def test_targets_are_met_by_their_margins_alone() -> None:
    others = {"l1": 0.799, "bn": 0.799, "uniform": 0.7799, "random": 0.7899, "uniform-long": 0.799}
    jobs = [job("splitting", 0.8), *(job(name, at) for name, at in others.items())]
    found = verdicts(jobs)
    assert len(found) == 6
    assert set(found.values()) == {"met"}
    for name, at in {"uniform": 0.781, "l1": 0.8001, "uniform-long": 0.8001}.items():
        worse = [j if j["job"]["method"] != name else job(name, at) for j in jobs]
        missed = [target for target, verdict in verdicts(worse).items() if verdict == "missed"]
        assert len(missed) == 1
        assert f"{name}" in missed[0]


def test_random_may_come_within_a_point_beyond_five_percent() -> None:
    near = [*(point(s, 0.7) for s in (0.002, 0.05)), point(0.0501, 0.795), point(0.35, 0.8)]
    flat = [point(s, 0.8) for s in GROWN]
    random, splitting = job("random", 0, points=near), job("splitting", 0, points=flat)
    first, second = cc.claims([splitting, random])["targets"]
    assert (first["verdict"], second["verdict"]) == ("met", "met")
    assert [cell["size"] for cell in first["sizes"]] == [s for s in cc.GRID if s <= 0.05]
    assert second["least"]["size"] == 0.3
    near[-1]["accuracy"] = 0.81
    assert [row["verdict"] for row in cc.claims([splitting, random])["targets"]] == [
        "met", "missed",
    ]  # fmt: skip


def test_one_size_below_is_a_miss_and_its_number_is_told() -> None:
    dip = [point(1, 0.9), point(0.1, 0.9), point(0.05, 0.5), point(0.002, 0.3)]
    (row,) = cc.claims([job("splitting", 0.8), job("l1", 0, points=dip)])["targets"]
    assert row["verdict"] == "missed"
    assert row["least"]["size"] == 0.1
    assert row["least"]["mean"] == pytest.approx(0.8 + 0.02 * log(10) - 0.9)
    assert [cell["size"] for cell in row["sizes"] if not cell["met"]] == [0.1, 0.2, 0.3]


def test_sizes_without_a_net_leave_a_target_open() -> None:
    short = job("splitting", 0.8, shares=(0.004, 0.12))
    (row,) = cc.claims([short, job("bn", 0.7)])["targets"]
    assert row["verdict"] == "open"
    assert row["sizes without data"] == [0.2, 0.3]  # 0.3% is below the seed: not asked for
    assert [cell["size"] for cell in row["sizes"]] == [0.005, 0.01, 0.02, 0.03, 0.05, 0.1]
    (row,) = cc.claims([short, job("bn", 0.9)])["targets"]
    assert row["verdict"] == "missed"


def test_macs_are_judged_by_the_selection_by_macs() -> None:
    jobs = [job("splitting", 0.1), job("splitting-macs", 0.8), job("l1", 0.7)]
    rows = cc.claims(jobs)["targets"]
    assert [(r["axis"], r["mine"], r["verdict"]) for r in rows] == [
        ("params", "splitting", "missed"), ("macs", "splitting-macs", "met"),
    ]  # fmt: skip


def test_groups_are_not_mixed_but_for_nets_from_scratch() -> None:
    jobs = [job("splitting", 0.8), job("splitting", 0.7, after="retrain"),
            job("splitting", 0.6, activation="softplus"), job("splitting", 0.5, arch="mobilenet"),
            job("uniform", 0.75), job("uniform-long", 0.77), job("l1", 0.6)]  # fmt: skip
    found = cc.claims(jobs)["groups"]
    assert {name: list(group["accuracy"]["params"]) for name, group in found.items()} == {
        "mobilenet, finetune, relu": ["splitting"],
        GROUP: ["splitting", "uniform", "uniform-long", "l1"],
        "vgg19, finetune, softplus": ["splitting"],
        "vgg19, retrain, relu": ["splitting", "uniform"],
    }


# --- time, gain, structures ------------------------------------------------------------------


def test_time_and_gain_and_structures() -> None:
    gains = [(-1e-3, -2e-3), (-1e-2, -2e-2), (-1e-1, -5e-2), (-1e-3, 1e-3), (None, -1.0)]
    points = [point(0.01, 0.8)]
    points += [
        point(0.02 * (i + 1), 0.8, split={"predicted": p, "measured": m, "step": 0.1, "neurons": 3})
        for i, (p, m) in enumerate(gains)
    ]
    found = cc.claims([job("splitting", 0, points=points), job("l1", 0.5)])
    assert [row["share"] for row in found["time"]] == [pytest.approx(0.05)] * 2
    (gain,) = found["gain"]
    assert (gain["splits"], gain["falls"]) == (4, 3)
    assert gain["median ratio"] == pytest.approx(1.25)
    assert gain["quartiles"] == [pytest.approx(0.125), pytest.approx(2)]
    assert gain["r"] == pytest.approx(np.corrcoef([1, 10, 100, 1], [2, 20, 50, -1])[0, 1])
    logs = np.log([1, 10, 100]), np.log([2, 20, 50])
    assert gain["r of logs"] == pytest.approx(np.corrcoef(*logs)[0, 1])
    first, second = found["structures"]
    assert first["widths"] == {"features.0": 11, "features.3": 7}
    assert second["widths"]["features.0"] == 1  # the last net of pruning is its smallest


def test_nothing_is_an_error_where_jobs_are_missing() -> None:
    assert cc.claims([])["targets"] == []
    assert cc.tables(cc.claims([])) == []
    empty = job("splitting", 0.8, points=[])
    assert cc.claims([empty, job("l1", 0.7)])["targets"] == []
    with pytest.raises(sg.InputError, match=r"jobs\[1\]: expected .* 'cifar10', got one of 'rbf'"):
        cc.claims([empty, {"experiment": "rbf"}])


def everything() -> list[dict[str, Any]]:
    split = {"predicted": -1e-3, "measured": -2e-3, "step": 0.1, "neurons": 3}
    grown = [point(s, 0.8 + s / 10, split=split) for s in GROWN]
    jobs = [
        job(method, 0.7 + 0.01 * i, seed, arch=arch, after=after)
        for i, method in enumerate(cc.METHODS)
        for seed in (0, 1)
        for arch in ("vgg19", "mobilenet")
        for after in ("finetune", "retrain")
    ]
    return [*jobs, job("splitting", 0, 2, points=grown)]


def test_there_is_a_table_for_every_answer() -> None:
    found = cc.claims(everything())
    json.dumps(found, allow_nan=False)
    tables = cc.tables(found)
    titles = [str(table.title) for table in tables]
    assert len(titles) == 1 + 4 * (2 + 2) + 2 + 4
    assert titles[0].startswith("Targets")
    assert "vgg19, retrain, relu: test accuracy (%) against MACs" in titles
    assert all(table.row_count for table in tables)


def test_the_table_of_targets_prints_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [job("splitting", 0.8), job("splitting", 0.82, 1), job("l1", 0.75), job("l1", 0.75, 1)]
    Console(width=200).print(cc.tables(cc.claims(jobs))[0])
    text = capsys.readouterr().out
    assert "splitting above l1, up to 30% of params" in text
    assert "+6.0 ± 1.4 at" in text
    assert "9 of 9" in text


# --- effort ----------------------------------------------------------------------------------


def trained(share: float, macs: float, epochs: int, **more: Any) -> dict[str, Any]:
    return point(share, 0.8, macs=macs) | {"epochs": epochs, **more}


def test_effort_is_that_of_the_whole_way() -> None:
    nets = [trained(0.1, 2.0, 4), trained(0.2, 2.0, 8), trained(0.2, 2.0, 18, finished=True)]
    grown = job("splitting", 0, points=nets)
    assert efforts(grown) == pytest.approx([4 * 0.2, 4 * 0.2 + 4 * 0.4, 4 * 0.2 + 14 * 0.4])
    scratch = job("uniform-long", 0, points=nets)  # each from the start
    assert efforts(scratch) == pytest.approx([4 * 0.2, 8 * 0.4, 18 * 0.4])
    assert effort_curve(grown)[0] == pytest.approx([0.8, 2.4])
    down = job("l1", 0, points=[trained(1.0, 1.0, 2), trained(0.5, 1.0, 4)])
    assert efforts(down) == pytest.approx([2.0, 3.0])


def test_nets_that_were_trained_to_the_end_are_compared() -> None:
    def ending(method: str, seed: int, accuracy: float) -> dict[str, Any]:
        last = trained(0.1, 1.0, 10, finished=True, accuracy=accuracy)
        return job(method, 0, seed, points=[trained(0.1, 1.0, 2), last])

    jobs = [ending("random", 0, 0.8), ending("splitting", 0, 0.8), ending("splitting", 1, 0.9),
            job("uniform", 0.7)]  # fmt: skip
    found = cc.claims(jobs)
    first, second = found["finished"]
    assert (first["method"], second["method"]) == ("splitting", "random")
    assert (first["mean"], first["seeds"]) == (pytest.approx(0.85), 2)
    assert first["std"] == pytest.approx(0.005**0.5)
    assert (first["params"], first["macs"], first["epochs"]) == (100_000, 1_000_000, 10)
    assert first["effort"] == pytest.approx(1.0)
    assert second["std"] is None
    titles = [str(table.title) for table in cc.tables(found)]
    assert f"{GROUP}: nets trained to the end" in titles


def test_a_job_whose_only_net_was_trained_to_the_end_is_drawn(tmp_path: Path) -> None:
    alone = job("uniform-long", 0, points=[trained(0.1, 1.0, 10, finished=True)])
    assert effort_curve(alone) == ([pytest.approx(1.0)], [0.8])
    assert cf.draw([job("splitting", 0.8), alone], tmp_path)


def test_a_split_that_changed_nothing_is_drawn(tmp_path: Path) -> None:
    split = {"predicted": -1e-3, "measured": 0.0, "step": 0.1, "neurons": 3}
    nets = [point(share, 0.8, split=split) for share in GROWN]
    assert cf.draw([job("splitting", 0, points=nets)], tmp_path)


# --- figures ---------------------------------------------------------------------------------

NAMES = ("figure3", "macs", "effort", "selections", "structures", "gain")


KINDS = ("png", "svg")


def test_all_figures_are_drawn(tmp_path: Path) -> None:
    paths = cf.draw(everything(), tmp_path)
    assert [p.name for p in paths] == [f"cifar10-{name}.{kind}" for name in NAMES for kind in KINDS]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    assert cf.draw([], tmp_path) == []
    alone = [job("random", 0.8, activation="softplus", shares=(0.01,))]
    assert [p.name for p in cf.draw(alone, tmp_path)] == [
        f"cifar10-{name}-softplus.{kind}" for name in ("figure3", "effort") for kind in KINDS
    ]  # fmt: skip


def test_structures_are_compared_at_one_size() -> None:
    jobs = [job("splitting", 0.8), job("splitting-macs", 0.8, shares=(0.002, 0.02)), job("bn", 0.7)]
    (members,) = cc.groups_of(jobs).values()
    nets = cf.comparable(members)
    assert {m: net["params"] for m, net in nets.items()} == {
        "splitting": 50_000, "splitting-macs": 20_000, "bn": 20_000,
    }  # fmt: skip


def test_the_line_is_the_mean_where_all_seeds_have_nets() -> None:
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    rows = {0: [(0.01, 0.5), (0.1, 0.7)], 1: [(0.02, 0.6), (0.2, 0.8)]}
    seeds = {k: job("splitting", 0, k, points=[point(*net) for net in row])
             for k, row in rows.items()}  # fmt: skip
    cf._accuracy(ax, {"splitting": seeds}, cf.share_of("params"), ["splitting"])
    (line,) = (found for found in ax.lines if found.get_label() == "Splitting")
    x, y = line.get_xdata(), line.get_ydata()
    assert (x[0], x[-1]) == (pytest.approx(2), pytest.approx(10))
    assert y[0] == pytest.approx(50 * (0.5 + 0.2 * log(2) / log(10) + 0.6))
    assert len(ax.lines) == 3  # and the nets of either seed


def claims_of(folder: Path) -> dict[str, Any]:
    if folder.name == ends.PLACE:
        return ends.claims(ends.read(folder.parent))
    return cc.claims(finished(folder, "cifar10"))


@pytest.mark.parametrize(
    "folder", [path.parent for path in sorted(RESULTS.rglob("claims.json"))], ids=lambda f: f.name
)
def test_committed_claims_are_those_of_the_committed_jobs(folder: Path) -> None:
    committed = json.loads((folder / "claims.json").read_text())
    assert committed == rounded(claims_of(folder))
