"""The command around the CIFAR-10 jobs: which jobs it runs, and what it makes of their files."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitgrow.errors import InputError
from splitgrow.paper import cifar10, cifar10_cli, data
from splitgrow.paper.cifar10_bench import Setting
from splitgrow.paper.cifar10_jobs import Job, study, study_of_ends
from splitgrow.paper.cli import app
from splitgrow.paper.jobs import GROWN


def result(method: str, seed: int, gain: float, settings: dict[str, Any]) -> dict[str, Any]:
    sizes = [10_000, 20_000, 40_000, 80_000]
    points = [
        {"params": size, "macs": 100 * size, "accuracy": 0.5 + 0.1 * i + gain, "validation": 0.5,
         "loss": 1.0, "epochs": 10 * (i + 1), "widths": {"a": 16 + i, "b": 16},
         "seconds": {"train": 10.0, "score": 0.1, "split": 0.1},
         "split": None if i == 3 else {"predicted": -0.02, "measured": -0.01 * (i + 1),
                                       "step": 0.1, "neurons": 4}}
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    return {
        "experiment": "cifar10",
        "job": {"arch": "vgg19", "method": method, "after": "finetune", "activation": "relu",
                "seed": seed},
        "settings": settings, "hardware": "x", "versions": {},
        "full": {"params": 1_000_000, "macs": 100_000_000},
        "points": points,
    }  # fmt: skip


def write(folder: Path, found: list[dict[str, Any]]) -> None:
    place = folder / "cifar10" / "jobs"
    place.mkdir(parents=True)
    for i, job in enumerate(found):
        (place / f"{i}.json").write_text(json.dumps(job))


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["cifar10", *words])


def test_files_become_claims_tables_and_figures(tmp_path: Path) -> None:
    write(tmp_path, [result(m, s, g, {"epochs": 1}) for m, g in (("splitting", 0.05), ("l1", 0.0))
                     for s in (0, 1)])  # fmt: skip
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    claims = json.loads((tmp_path / "cifar10" / "claims.json").read_text())
    answers = [target for target in claims["targets"] if target["axis"] == "params"]
    assert [(a["theirs"], a["verdict"]) for a in answers] == [("l1", "open")]  # larger nets missing
    assert {"cifar10-figure3.png", "cifar10-figure3.svg"} <= {
        path.name for path in (tmp_path / "cifar10").iterdir()
    }


def ending(method: str, seed: int, gain: float, size: float) -> dict[str, Any]:
    """A job whose last net has 40,000 or 80,000 parameters and was trained on for 60 epochs."""
    found = result(method, seed, gain, {"epochs": 10, "size": size})
    del found["points"][round(size * 50) :]
    last = found["points"][-1]
    end = {"accuracy": last["accuracy"] + 0.01, "epochs": last["epochs"] + 60, "finished": True}
    found["points"].append({**last, **end, "split": None})
    return found


def write_sizes(folder: Path) -> None:
    for size in (0.08, 0.06):
        place = folder / "cifar10" / "sizes" / f"{size:g}" / "jobs"
        place.mkdir(parents=True)
        for method, gain in (("splitting", 0.05), ("l1", 0.0)):
            for seed in (0, 1):
                found = ending(method, seed, gain + 0.01 * seed, size)
                (place / f"{method}-{seed}.json").write_text(json.dumps(found))


def test_nets_of_several_sizes_are_compared(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    place = tmp_path / "cifar10" / "sizes"
    claims = json.loads((place / "claims.json").read_text())
    assert [row["size"] for row in claims["ends"]] == [0.06, 0.08]
    splitting, l1 = claims["ends"][1]["nets"]
    assert (splitting["method"], splitting["params"], splitting["epochs"]) == (
        "splitting", 80_000, 100,
    )  # fmt: skip
    assert splitting["mean"] == pytest.approx(0.8 + 0.05 + 0.005 + 0.01)
    assert splitting["effort"] == pytest.approx(10 * (0.01 + 0.02 + 0.04 + 0.08) + 60 * 0.08)
    assert l1["splitting above"]["mean"] == pytest.approx(0.05)
    assert l1["splitting above"]["pairs"] == 2
    assert splitting["splitting above"] is None
    # Between the sizes, a row of nets like any other.
    row = claims["groups"]["vgg19, finetune, relu"]["accuracy"]["params"]["splitting"]
    assert [cell is not None for cell in row] == [0.04 <= at <= 0.08 for at in claims["grid"]]
    assert row[claims["grid"].index(0.05)]["mean"] == pytest.approx(
        0.775 + 0.1 * log(0.05 / 0.04) / log(2) - 0.01
    )
    (time,) = [row for row in claims["time"] if row["method"] == "l1"]
    assert time["train"] == 2 * (4 + 5) * 10.0
    assert (place / "cifar10-effort.png").exists()
    assert not (tmp_path / "cifar10" / "claims.json").exists()
    assert "8% of the full net's parameters" in outcome.output


def test_sizes_with_other_settings_are_not_compared(tmp_path: Path) -> None:
    write_sizes(tmp_path)
    for path in (tmp_path / "cifar10" / "sizes" / "0.06").rglob("*.json"):
        path.write_text(path.read_text().replace('"epochs": 10, "size"', '"epochs": 20, "size"'))
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert "run with other settings, too" in str(outcome.exception)


def test_jobs_of_different_settings_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path, [result("splitting", s, 0.0, {"epochs": s}) for s in (0, 1)])
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert isinstance(outcome.exception, InputError)
    assert "--folder of its own" in str(outcome.exception)


def test_without_a_job_there_is_nothing_to_show(tmp_path: Path) -> None:
    outcome = invoke("--redraw", "--folder", str(tmp_path))
    assert "no job is done yet. Run: splitgrow paper cifar10" in str(outcome.exception)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would run."""
    found: list[Any] = []
    monkeypatch.setattr(data, "cifar10", lambda folder, download: None)
    monkeypatch.setattr(cifar10_cli, "show", lambda *_: None)

    def run_studies(todo: list[Job], settings: dict[Path, Setting], **_: Any) -> list[Any]:
        found.extend([todo, *settings.values()])
        return []

    monkeypatch.setattr(cifar10, "run_studies", run_studies)
    return found


def test_the_whole_study_is_the_default(ordered: list[Any]) -> None:
    assert invoke().exit_code == 0
    todo, setting = ordered
    assert setting == Setting()
    assert todo == study(range(3))
    for method in ("splitting", "l1", "bn"):
        for arch in ("vgg19", "mobilenet"):
            for after in ("finetune", "retrain"):
                seeds = [j.seed for j in todo if (j.arch, j.method, j.after, j.activation)
                         == (arch, method, after, "relu")]  # fmt: skip
                assert seeds == [0, 1, 2]
    assert len({job.name for job in todo}) == len(todo)


def test_a_quick_run_ends_with_what_its_nets_are_worth(ordered: list[Any]) -> None:
    last = invoke("--quick").output.splitlines()[-1]
    assert last.startswith(
        "--quick: these nets were trained for 1 epoch of 512 images a phase and judged by 256 test "
        "images. They are not usable, "
    )
    assert "not usable" not in invoke().output
    assert "not usable" not in invoke("--quick", "--redraw").output


def test_help_names_all_nets_and_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(cifar10_cli.ARCHS) == sorted({job.arch for job in study()})
    assert sorted(cifar10_cli.METHODS) == sorted({job.method for job in study()})
    assert {*cifar10_cli.METHODS} - {job.method for job in study_of_ends()} == {"uniform"}
    monkeypatch.setenv("COLUMNS", "400")
    text = " ".join(invoke("--help").output.split())
    assert " and ".join(cifar10_cli.ARCHS) in text
    assert ", ".join(cifar10_cli.METHODS) in text


SHARES = [("--size", "size"), ("--step", "step"), ("--max-growth", "max_growth"),
          ("--restart", "restart"), ("--thin", "thin")]  # fmt: skip


def test_every_method_at_several_sizes(ordered: list[Any]) -> None:
    words = ["--size", "0.01", "--size", "0.02", "--finish", "6", "--seeds", "2", "--batch", "64"]
    assert invoke(*words).exit_code == 0
    todo, *settings = ordered
    assert todo == study_of_ends(range(2))
    assert {job.method for job in todo} == {*GROWN, "uniform-long", "l1", "bn"}
    assert [(s.size, s.finish, s.batch) for s in settings] == [(0.01, 6, 64), (0.02, 6, 64)]
    assert settings[0].rate_vgg19 == Setting().in_batches(64).rate_vgg19


def test_nets_methods_and_schedule_can_be_chosen(ordered: list[Any]) -> None:
    words = ["--arch", "vgg19", "--method", "splitting", "--method", "random", "--seeds", "1",
             "--paper-schedule"]  # fmt: skip
    assert invoke(*words).exit_code == 0
    todo, setting = ordered
    assert {job.arch for job in todo} == {"vgg19"}
    assert {job.method for job in todo} == {"splitting", "random"}
    assert (setting.epochs, setting.batch, setting.shape) == (160, 64, "steps")
    assert invoke("--epochs", "3").exit_code == 0
    assert ordered[3].epochs == 3
    assert invoke("--largest", "0.02").exit_code == 0
    assert ordered[5].largest == 0.02
    for at, (option, name) in enumerate(SHARES):
        assert invoke(option, "0.6").exit_code == 0
        assert getattr(ordered[7 + 2 * at], name) == 0.6
    assert invoke("--growing", "constant").exit_code == 0
    assert ordered[-1].growing == "constant"
    assert invoke("--growing", "sideways").exit_code == 2


def test_learning_rates_go_with_the_batch(ordered: list[Any]) -> None:
    assert invoke("--batch", "64").exit_code == 0
    setting, usual = ordered[1], Setting()
    assert setting.batch == 64
    for name in ("rate_vgg19", "rate_mobilenet"):
        assert getattr(setting, name) == getattr(usual, name) * 64 / usual.batch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "resnet"], "--arch: expected mobilenet, vgg19, got resnet"),
        (["--method", "magic"], "--method: expected"),
        (["--largest", "30"], "--largest: expected a share of the full net, in (0, 1], got 30"),
        *(([option, "0"], f"{option}: expected a ") for option, _ in SHARES),
        (["--paper-schedule", "--quick"], "leave out --quick and --epochs"),
        (["--size", "0.01", "--phases", "4"], "--size: all methods end there; leave out"),
    ],
)
def test_wrong_choices_are_refused(ordered: list[Any], words: list[str], message: str) -> None:
    assert message in str(invoke(*words).exception)
    assert not ordered
