"""The demonstration runs and shows what it promises."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from splitgrow.cli import app


def test_the_demo_splits_a_trained_net_and_shows_the_receipt() -> None:
    result = CliRunner().invoke(app, ["demo", "--epochs", "4"])
    assert result.exit_code == 0, result.output
    for words in ("conv1", "units can be split", "most promising", "measured change of loss",
                  "right after the split", "test accuracy"):  # fmt: skip
        assert words in result.output


def test_the_demo_never_raises_the_loss_at_the_split() -> None:
    from splitgrow import demo

    data = demo.load_digits()
    assert len(data.train[1]) + len(data.test[1]) == 1797
    row = demo.evaluate("small", demo.small_cnn(), data)
    assert row.parameters == 399


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"]])
def test_help_reads_well(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert "Usage" in result.output
    assert "Traceback" not in result.output
