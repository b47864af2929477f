"""Answers, table and figures of the keyword jobs, from made-up jobs whose answers are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import splitgrow as sg
from splitgrow.paper import kws_claims as kc
from splitgrow.paper import kws_figures as kf
from splitgrow.paper import kws_table as kt
from splitgrow.paper.cli import app
from splitgrow.paper.job_runs import finished
from splitgrow.paper.results import rounded
from splitgrow.zoo.kws import HELLO_EDGE

RESULTS = Path(__file__).parents[1] / "results" / "paper" / "kws"

SIZES = (3_196, 9_000, 60_000, 90_000, 250_000)
PRUNED = (413_736, 200_000, 20_000, 3_000)
LONG = (6_870, 24_000, 270_000)


def point(params: int, accuracy: float, validation: float | None = None, **more: Any) -> Any:
    return {
        "params": params, "macs": 68 * params, "operations": 140 * params, "accuracy": accuracy,
        "validation": accuracy if validation is None else validation, "loss": 0.5, "epochs": 4,
        "widths": {"features.0": params // 1000, "features.3": 7},
        "seconds": {"train": 10.0, "score": 0.5, "split": 0.1}, "split": None, **more,
    }  # fmt: skip


def job(
    method: str, accuracy: float, seed: int = 0, points: Sequence[Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Accuracy rises by half a point with every factor e of the size, from that at 10K."""
    sizes = {"bn": PRUNED, "uniform-long": LONG, "full": (413_736,)}.get(method, SIZES)
    made = [point(size, accuracy + 0.005 * log(size / 1e4)) for size in sizes]
    named = {"arch": "DS-CNN", "method": method, "after": "finetune", "activation": "relu",
             "seed": seed}  # fmt: skip
    return {"experiment": "kws", "job": named | more, "settings": {}, "hardware": "none",
            "versions": {}, "full": {"params": 413_736, "macs": 28_000_000},
            "points": made if points is None else list(points)}  # fmt: skip


def verdict(jobs: Sequence[Any], limit: str, method: str = "splitting") -> str:
    return str(row(jobs, limit, method)["verdict"])


def row(jobs: Sequence[Any], limit: str, method: str = "splitting") -> dict[str, Any]:
    (found,) = (r for r in kc.claims(jobs)["reached"] if (r["limit"], r["method"])
                == (limit, method))  # fmt: skip
    return dict(found)


# --- nets that were trained on at the end ----------------------------------------------------


def test_curves_leave_out_finished_nets() -> None:
    grown = [point(4_000, 0.8), point(9_000, 0.85), point(9_000, 0.95, finished=True)]
    assert kc.curve_of(job("splitting", 0.9, points=grown), "params") == (
        [4_000, 9_000], [0.8, 0.85],
    )  # fmt: skip
    alone = job("uniform-long", 0.9, points=grown[-1:])
    assert kc.curve_of(alone, "params") == ([9_000], [0.95])
    assert row([job("splitting", 0.9, points=grown)], "small")["accuracy"] == 0.95


def test_figures_show_finished_nets(tmp_path: Path) -> None:
    jobs = [job("splitting", 0.9, points=[*job("splitting", 0.9)["points"], last])
            for last in (point(250_000, 0.93), point(250_000, 0.93, finished=True))]  # fmt: skip
    texts = []
    for i, each in enumerate(jobs):
        kf.draw([each], tmp_path / str(i))
        texts.append((tmp_path / str(i) / "kws-figure4.svg").read_text())
    assert ["hollow" in text for text in texts] == [False, True]


# --- within a size ---------------------------------------------------------------------------


def rounds(points: Sequence[Any], count: int = 5) -> list[Any]:
    return [job("splitting", 0, seed, points) for seed in range(count)]


def test_the_net_within_a_size_is_chosen_by_validation_never_by_test() -> None:
    lucky = [point(50_000, 0.99, 0.90), point(60_000, 0.94, 0.95), point(200_000, 0.96, 0.96),
             point(290_000, 1.0, 1.0)]  # fmt: skip
    small = row(rounds(lucky), "small")
    assert (small["verdict"], small["accuracy"], small["params"]) == (
        "missed", pytest.approx(0.94), 60_000,
    )  # fmt: skip
    large = row(rounds(lucky), "paper")
    assert (large["verdict"], large["accuracy"], large["params"]) == (
        "met", pytest.approx(0.96), 200_000,
    )  # fmt: skip


def test_a_net_must_be_small_enough_in_parameters_and_in_operations() -> None:
    at_limit = point(282_600, 0.9536, operations=39_200_000)
    assert verdict(rounds([at_limit]), "paper") == "met"
    for name in ("params", "operations"):
        over = [point(1000, 0.5), at_limit | {name: at_limit[name] + 1}]
        assert row(rounds(over), "paper")["accuracy"] == 0.5
    assert verdict(rounds([point(100_000, 0.96, operations=10**9)]), "small") == "met"
    assert not [r for r in kc.claims(rounds([at_limit]))["reached"] if r["limit"] == "small"]


def test_five_rounds_are_needed_and_their_mean_counts() -> None:
    assert verdict(rounds([point(90_000, 0.99)], 4), "small") == "open"
    mixed = [job("splitting", 0, s, [point(90_000, a)])
             for s, a in enumerate((0.95, 0.95, 0.96, 0.96, 0.9483))]  # fmt: skip
    found = row(mixed, "small")
    assert (found["verdict"], found["rounds"]) == ("met", 5)
    assert found["accuracies"] == [0.95, 0.95, 0.96, 0.96, 0.9483]
    mixed[0]["points"][0]["accuracy"] = 0.949
    assert verdict(mixed, "small") == "missed"


def test_other_methods_are_shown_but_not_judged() -> None:
    found = row([job("uniform", 0.95)], "paper", "uniform")
    assert found["verdict"] is None
    assert found["rounds"] == 1


# --- at equal size ---------------------------------------------------------------------------


def targets(jobs: Sequence[Any]) -> dict[tuple[str, str, str], str]:
    return {(t["axis"], t["mine"], t["theirs"]): t["verdict"] for t in kc.claims(jobs)["targets"]}


def test_splitting_is_compared_with_each_rival_on_both_axes() -> None:
    rivals = {"random": 0.92, "uniform": 0.91, "uniform-long": 0.925, "bn": 0.90}
    jobs = [job("splitting", 0.93), *(job(name, at) for name, at in rivals.items())]
    found = targets(jobs)
    assert set(found) == {(a, "splitting", r) for a in kc.AXES for r in rivals}
    assert set(found.values()) == {"met"}
    worse = [j if j["job"]["method"] != "bn" else job("bn", 0.9301) for j in jobs]
    missed = [key for key, verdict in targets(worse).items() if verdict == "missed"]
    assert missed == [(axis, "splitting", "bn") for axis in kc.AXES]


def test_accuracies_between_nets_are_linear_in_the_logarithm_of_the_size() -> None:
    (row,) = (t for t in kc.claims([job("splitting", 0.93), job("random", 0.92)])["targets"]
              if t["axis"] == "params")  # fmt: skip
    assert [cell["size"] for cell in row["sizes"]] == list(kc.GRID["params"])
    assert all(cell["mean"] == pytest.approx(0.01) for cell in row["sizes"])
    assert row["target"] == "splitting above random, up to 200K parameters"


def test_selection_by_macs_is_judged_by_operations() -> None:
    jobs = [job("splitting-macs", 0.93), job("random", 0.92)]
    assert targets(jobs) == {("operations", "splitting-macs", "random"): "met"}


def test_long_training_is_compared_from_its_first_net_on() -> None:
    found = [t for t in kc.claims([job("splitting", 0.93), job("uniform-long", 0.9)])["targets"]
             if t["axis"] == "params"]  # fmt: skip
    assert found[0]["sizes"][0]["size"] == 10e3
    assert (found[0]["verdict"], found[0]["sizes without data"]) == ("met", [])
    assert "from 7K up to 200K parameters" in found[0]["target"]


def test_sizes_without_a_net_leave_a_target_open() -> None:
    short = job("random", 0, points=[point(3_000, 0.5), point(60_000, 0.6)])
    assert targets([job("splitting", 0.93), short])["params", "splitting", "random"] == "open"


def test_nothing_is_an_error_where_jobs_are_missing() -> None:
    assert kc.tables(kc.claims([])) == []
    assert kc.claims([job("splitting", 0.9, points=[])])["reached"] == []
    with pytest.raises(sg.InputError, match=r"jobs\[0\]: expected .* 'kws', got one of 'rbf'"):
        kc.claims([{"experiment": "rbf"}])


# --- tables ----------------------------------------------------------------------------------


def everything() -> list[dict[str, Any]]:
    split = {"predicted": -1e-3, "measured": -2e-3, "step": 0.1, "neurons": 3}
    jobs = [job(method, 0.91 + 0.002 * i + 0.001 * seed, seed)
            for i, method in enumerate(reversed(kc.METHODS)) for seed in range(5)]  # fmt: skip
    for grown in jobs:
        grown["points"][0]["split"] = split
    zoo = [job("full", 0, seed, [point(413_736, 0.9 + 0.01 * i)], arch=arch)
           for i, arch in enumerate(HELLO_EDGE) for seed in range(2)]  # fmt: skip
    return [*jobs, *zoo]


def test_there_is_a_table_for_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = kc.claims(everything())
    json.dumps(found, allow_nan=False)
    tables = kc.tables(found)
    assert [str(t.title).partition(",")[0] for t in tables][:2] == [
        "Target: 95.36% on the test clips", "Targets",
    ]  # fmt: skip
    assert all(table.row_count for table in tables)
    Console(width=200).print(tables[0])
    assert "at most 282.6K parameters and 39.2M operations" in capsys.readouterr().out


def test_table_1_has_the_published_rows_and_ours_beside_them() -> None:
    jobs = everything()
    rows = kt.table1(jobs, kc.claims(jobs))
    assert [r["net"] for r in rows[:7]] == list(HELLO_EDGE)
    assert all(r["ours"]["rounds"] == 2 for r in rows[:7])
    assert (rows[7]["net"], rows[7]["ours"]["rounds"]) == ("DS-CNN, before pruning", 5)
    assert rows[7]["ours"]["params"] == 413_736
    (paper,) = (r for r in rows[7:] if r["published"])
    assert paper["published"] == {"accuracy": 0.9536, "params": 282_600, "operations": 39_200_000}
    assert paper["ours"]["params"] == 250_000
    text = kt.to_markdown(rows)
    assert "| DNN | 86.94 | 495.7 | 1.0 | 90.00 ± 0.00 | 413.7 | 57.9 | 2 |" in text
    assert "| Splitting, at most 282.6K parameters and 39.2M operations | 95.36 |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_published_rows_stand_alone_where_nothing_was_run() -> None:
    rows = kt.table1([], kc.claims([]))
    assert [r["net"] for r in rows] == [*HELLO_EDGE, "Splitting"]
    assert not any(r["ours"] for r in rows)
    assert "| Splitting | 95.36 | 282.6 | 39.2 |  |  |  |  |" in kt.to_markdown(rows)


# --- figures ---------------------------------------------------------------------------------

NAMES = ("kws-figure4", "kws-figure4-small")


def test_both_views_are_drawn(tmp_path: Path) -> None:
    paths = kf.draw(everything(), tmp_path)
    assert [p.name for p in paths] == [f"{n}.{kind}" for n in NAMES for kind in ("png", "svg")]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    assert kf.draw([], tmp_path) == []
    large = [job("random", 0, points=[point(200_000, 0.9)], after="retrain")]
    assert [p.name for p in kf.draw(large, tmp_path)] == [
        "kws-figure4-retrain.png", "kws-figure4-retrain.svg",
    ]  # fmt: skip


def test_the_small_view_leaves_larger_nets_out() -> None:
    ((_, members),) = kc.groups_of([job("splitting", 0.9), job("bn", 0.9)]).items()
    seen = kf._within(members, 100_000)
    assert {m: [p["params"] for p in seeds[0]["points"]] for m, seeds in seen.items()} == {
        "splitting": list(SIZES[:-1]), "bn": [20_000, 3_000],
    }  # fmt: skip


def test_every_mark_has_its_name() -> None:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    ours = [job("full", 0, points=[point(480_000, 0.94)], arch="GRU")]
    figure = Figure()
    ax: Axes = figure.subplots()
    ax.set_ylim(84, 96)
    kf._references(ax, ours, "params", kf.VIEWS[0])
    words = [text.get_text() for text in ax.texts]
    assert "GRU 94.72, 94.00" in words  # published and here
    assert "LSTM 94.11" in words
    assert sum(word.startswith(tuple(HELLO_EDGE)) for word in words) == len(HELLO_EDGE)
    heights = sorted(text.get_position()[1] for text in ax.texts if text.get_position()[0] == 1.01)
    least = min(b - a for a, b in pairwise(heights))
    assert least >= 0.99 * kf.APART * 12  # none hides another


def test_there_are_two_ticks_or_more() -> None:
    assert kf._ticks(1.7, 120) == [2, 5, 10, 20, 50, 100]
    assert kf._ticks(3.11, 3.35) == pytest.approx([3.2, 3.3])
    for high in (3.5, 4.5, 5.5, 40.0, 3000.0):
        assert 2 <= len(kf._ticks(2.9, high)) <= kf.MOST


# --- the command -----------------------------------------------------------------------------


def test_files_become_claims_tables_and_figures(tmp_path: Path) -> None:
    place = tmp_path / "kws" / "jobs"
    place.mkdir(parents=True)
    for i, found in enumerate(everything()):
        (place / f"{i}.json").write_text(json.dumps(found))
    outcome = CliRunner().invoke(app, ["kws", "--redraw", "--folder", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    made = {path.name for path in (tmp_path / "kws").iterdir() if path.is_file()}
    assert made == {"summary.json", "claims.json", "table1.json", "table1.md",
                    *(f"{n}.{kind}" for n in NAMES for kind in ("png", "svg"))}  # fmt: skip
    claims = json.loads((tmp_path / "kws" / "claims.json").read_text())
    assert {row["verdict"] for row in claims["reached"]} <= {"met", "missed", "open", None}


@pytest.mark.parametrize(
    "folder", sorted(RESULTS.glob("**/claims.json")), ids=lambda path: path.parent.name
)
def test_committed_claims_are_those_of_the_committed_jobs(folder: Path) -> None:
    committed = json.loads(folder.read_text())
    assert committed == rounded(kc.claims(finished(folder.parent, "kws")))
