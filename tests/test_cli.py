"""The command line: a user's file is loaded, run, stopped, resumed; errors are one paragraph."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import splitgrow as sg
from splitgrow.cli import app
from splitgrow.experiment import load_experiment, load_object

FILE = """
import torch
from torch import nn
import splitgrow as sg

torch.manual_seed(0)
x = torch.randn(64, 5)
y = torch.sin(3 * x[:, :1])

def build():
    return nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 1))

def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

def text_model():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

def make(epochs=3):
    return sg.Experiment(
        build, train=sg.Trainer([(x, y)], loss_fn, epochs=epochs), loss_fn=loss_fn,
        batches=[(x, y)], policy=sg.Policy(count=1), until=sg.Budget(phases=3),
        evaluate=lambda m: {"error": float(loss_fn(m, (x, y)))},
    )

experiment = make()
slow = make(epochs=3_000_000)
number = 3

def needs(argument):
    return argument

def broken():
    return 1 / 0

class Net(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)

unbuildable = sg.Experiment(
    needs, train=experiment.train, loss_fn=loss_fn, batches=experiment.batches
)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "splitgrow"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_inspect_shows_the_units(file: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", f"{file}:build", "--input", "1x5"])
    assert result.exit_code == 0, result.output
    assert "1 unit can be split" in result.output
    assert "its neurons are the model's output" in result.output


def test_inspect_takes_integers(file: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", f"{file}:text_model", "--input", "2x7:int64"])
    assert result.exit_code == 0, result.output
    assert "2 units can be split" in result.output


def test_grow_runs_an_experiment_and_report_reads_it(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = CliRunner().invoke(app, ["grow", f"{file}:experiment", "--run-dir", str(folder)])
    assert result.exit_code == 0, result.output
    assert "as many phases as asked for" in result.output
    assert "grew by 1 neuron, " in result.output
    assert (folder / "phase-0002" / "model.safetensors").exists()
    page = tmp_path / "page.html"
    written = CliRunner().invoke(app, ["report", str(folder), "--output", str(page)])
    assert written.exit_code == 0, written.output
    assert page.stat().st_size > 10_000


def test_a_function_may_make_the_experiment(file: Path) -> None:
    assert isinstance(load_experiment(f"{file}:make"), sg.Experiment)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("mine.py", "expected file.py:name"),
        ("nowhere.py:x", "no such file"),
        ("{file}:missing", "has no 'missing'; it defines"),
        ("{file}:number", "expected a splitgrow.Experiment"),
        ("{file}:needs", "a function without arguments"),
        ("{file}:broken", "ZeroDivisionError: division by zero (mine.py, line"),
        ("no.such.module:x", "ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_loaded_is_explained(file: Path, place: str, words: str) -> None:
    with pytest.raises(sg.InputError) as caught:
        load_experiment(place.format(file=file))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_run_is_explained_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "faulty.py"
    path.write_text("a = 1\nb = a + undefined_name\n")
    with pytest.raises(sg.InputError, match=r"NameError: .*line 2: b = a \+ undefined_name"):
        load_object(f"{path}:b")


def test_errors_are_one_paragraph_and_an_exit_code(file: Path, tmp_path: Path) -> None:
    result = call("inspect", f"{file}:build", "--input", "axb")
    assert result.returncode == 1
    assert result.stderr.startswith("splitgrow: --input: expected a shape like 1x3x32x32")
    assert "Traceback" not in result.stderr
    nothing = call("report", tmp_path / "nothing")
    assert nothing.returncode == 1
    assert "Traceback" not in nothing.stderr


def test_a_folder_with_a_run_is_not_overwritten(file: Path, tmp_path: Path) -> None:
    arguments = ["grow", f"{file}:experiment", "--run-dir", str(tmp_path / "run")]
    assert call(*arguments).returncode == 0
    again = call(*arguments)
    assert again.returncode == 1
    assert "--resume" in again.stderr
    assert call(*arguments, "--resume").returncode == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("needs", ": a function without arguments is needed, and this one takes argument. Give it"),
        ("Net", ": a function without arguments is needed, and this one takes inputs, outputs. G"),
        ("broken", " cannot be run: ZeroDivisionError: division by zero (mine.py, line"),
        ("number", ": expected a torch.nn.Module, got int"),
    ],
)
def test_inspect_explains_what_is_no_builder(file: Path, name: str, words: str) -> None:
    result = call("inspect", f"{file}:{name}", "--input", "1x5")
    assert result.returncode == 1
    assert result.stderr.startswith(f"splitgrow: {file}:{name}{words}")
    assert result.stderr.count("\n") == 1


def test_grow_explains_a_builder_that_needs_arguments(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = call("grow", f"{file}:unbuildable", "--run-dir", folder)
    assert result.returncode == 1
    assert result.stderr.startswith("splitgrow: model: a function without arguments is needed")
    assert not folder.exists()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_ends_the_run_and_says_how_to_resume(file: Path, tmp_path: Path) -> None:
    # Tests that a script started in the background ignore the signal, and so would their children.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from splitgrow.cli import main; main()", "grow",
               f"{file}:slow", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert "Traceback" not in errors
