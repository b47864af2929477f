"""The demonstration runs and shows what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import splitgrow as sg
from splitgrow import digits
from splitgrow.cli import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_demo_grows_compares_and_reports(tmp_path: Path) -> None:
    arguments = ["demo", "--epochs", "2", "--params", "300", "--run-dir", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for words in ("conv1", "can be split", "grew by", "fits the budget of parameters",
                  "random splitting", "from scratch", "test acc.", "report.html"):  # fmt: skip
        assert words in result.output
    said = "One seed (0), on which random splitting may be ahead: README.md has the means of ten.\n"
    assert said in result.output
    assert "| net, 10 seeds |" in README.read_text()
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000
    again = CliRunner().invoke(app, arguments)  # into the same folder
    assert again.exit_code == 0, again.output


def test_make_tells_what_the_demo_shows() -> None:
    (target,) = re.findall(r"^demo: .*## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in ("handwritten digits", "random splitting", "from scratch"):
        assert words in target


def test_a_grown_net_keeps_the_budget_and_repeats_by_its_seed() -> None:
    torch.set_num_threads(1)
    setting = digits.Setting(params=300, epochs=2, total=8)
    study = digits.Study(digits.load_digits(), setting, seed=3)
    first, history = study.grown("a", "splitting")
    second, _ = study.grown("a", "splitting")
    assert first.params <= 300
    assert (first.widths, first.loss, first.accuracy) == (
        second.widths, second.loss, second.accuracy
    )  # fmt: skip
    measured = [p.split.measured for p in history.phases if p.split is not None]
    assert measured
    assert all(m is not None and m < 0 for m in measured)
    assert study.from_scratch("b", first.widths).params == first.params


def test_the_data_are_all_there_and_kept_apart() -> None:
    data = digits.load_digits()
    assert len(data.train[1]) + len(data.test[1]) == 1797
    assert sum(len(labels) for _, labels in data.batches) == len(data.train[1])
    assert isinstance(sg.find_units(digits.cnn(), data.test[0][:1])["conv2"], sg.Unit)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], *([c, "--help"] for c in ("demo", "inspect", "grow", "report", "version"))],
)
def test_help_reads_well(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert "Usage" in result.output
    assert "Traceback" not in result.output
