"""Exports: a grown model as a file that computes the same, or no file at all."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import splitgrow as sg
from splitgrow.cli import app
from splitgrow.export import ExportError, check, export_executorch, export_onnx, quantize_onnx
from splitgrow.export import onnx_file as exports
from splitgrow.export.executorch_latency import executorch_latency

NEEDED = ("onnx", "onnxruntime", "onnxscript")
needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in NEEDED), reason="needs splitgrow[export]"
)
needs_executorch = pytest.mark.skipif(
    find_spec("executorch") is None, reason="needs the extra executorch"
)

FILE = """
import torch
from torch import nn
import splitgrow as sg

generator = torch.Generator().manual_seed(0)
x = torch.randn(40, 1, 6, 6, generator=generator)
y = (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long()
batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]

def build():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(),
        nn.Conv2d(3, 3, 3, groups=3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2),
    )

def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def evaluate(model):
    return {"accuracy": float((model(x).argmax(1) == y).float().mean())}

experiment = sg.Experiment(
    build, train=sg.Trainer(batches, loss_fn, epochs=3), loss_fn=loss_fn, batches=batches,
    evaluate=evaluate, policy=sg.Policy(count=2), until=sg.Budget(phases=2),
)
number = 3

def needs(width):
    return nn.Linear(width, width)

unbuildable = sg.Experiment(
    needs, train=experiment.train, loss_fn=loss_fn, batches=experiment.batches
)
"""


class Odd(nn.Module):
    """Odd widths, a residual sum, batch norm, a depthwise layer, two inputs, a dict of outputs.

    Its arguments and keys are named like operations: names inside the file must give way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 7, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(7)
        self.depthwise = nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.head = nn.Linear(7, 5)

    def forward(self, conv2d: Tensor, relu: Tensor, double: bool = False) -> dict[str, Any]:
        h = torch.relu(self.norm(self.stem(conv2d)))
        h = h + self.depthwise(h)
        logits = self.head(h.mean((2, 3))) + relu
        return {"add": logits * (2 if double else 1), "inner": (h, conv2d), "same": logits}


def odd() -> tuple[Odd, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Odd()
    for _ in range(3):  # running statistics that are not 0 and 1
        model(torch.randn(8, 1, 6, 6) * 2 + 1, torch.randn(8, 5))
    return model, [(torch.randn(n, 1, 6, 6), torch.randn(n, 5)) for n in (6, 4)]


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, exports.Exported]:
    model, batches = odd()
    path = tmp_path_factory.mktemp("odd") / "deep" / "odd.onnx"
    return model, batches, export_onnx(model, batches[0], path, batches=batches)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.py, and beside it the run that the command line made from it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text(FILE)
    before = Path.cwd()
    os.chdir(folder)
    try:
        place = str(folder / "mine.py:experiment")
        result = CliRunner().invoke(app, ["grow", place, "--run-dir", "grown"])
    finally:
        os.chdir(before)
    assert result.exit_code == 0, result.output
    return folder


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


# --- ONNX ---------------------------------------------------------------------------------


@needs_onnx
def test_a_file_computes_what_the_model_does_for_any_batch_size(odd_file: Any) -> None:
    import onnxruntime

    model, _, exported = odd_file
    assert model.training
    assert model.norm.training
    assert exported.bytes == exported.path.stat().st_size
    assert exported.difference <= 1e-4
    assert exported.batch_sizes == (1, 3, 4, 6)
    assert exported.seconds > 0 < exported.torch_seconds
    session = onnxruntime.InferenceSession(str(exported.path))
    assert [each.name for each in session.get_inputs()] == ["conv2d", "relu"]
    names = [each.name for each in session.get_outputs()]
    assert names == ["add", "inner.0", "inner.1", "same"]
    assert [each.shape[0] for each in session.get_inputs()] == ["batch"] * 2
    inputs = torch.randn(11, 1, 6, 6), torch.randn(11, 5)
    feeds = {"conv2d": inputs[0].numpy(), "relu": inputs[1].numpy()}
    found = dict(zip(names, session.run(None, feeds), strict=True))
    with torch.no_grad():
        expected = model.eval()(*inputs)
    model.train()
    assert np.allclose(found["add"], expected["add"], atol=1e-5)
    assert np.allclose(found["inner.0"], expected["inner"][0], atol=1e-5)
    assert np.array_equal(found["inner.1"], inputs[0])


@needs_onnx
def test_a_file_is_valid_alone_and_says_nothing_of_the_machine(odd_file: Any) -> None:
    import onnx

    exported = odd_file[2]
    onnx.checker.check_model(onnx.load(exported.path), full_check=True)
    assert list(exported.path.parent.iterdir()) == [exported.path]
    content = exported.path.read_bytes()
    assert b".py" not in content
    assert str(Path.home()).encode() not in content


@needs_onnx
def test_a_file_that_differs_is_refused_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd_file: Any
) -> None:
    model, batches, exported = odd_file
    content = exported.path.read_bytes()
    monkeypatch.setattr(exports, "onnx_bytes", lambda *_: content)
    path = tmp_path / "odd.onnx"
    with torch.no_grad():
        model.head.bias[2] += 2e-4
    try:
        with pytest.raises(ExportError, match=r"differs from the model by 0\.0002"):
            export_onnx(model, batches[0], path, batches=batches)
        assert list(tmp_path.iterdir()) == []
        assert export_onnx(model, batches[0], path, tolerance=1e-3).difference > 1e-4
    finally:
        with torch.no_grad():
            model.head.bias[2] -= 2e-4


class Shares(nn.Module):
    """Shares of a sum, which a small number keeps from 0 / 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * (1 + 5e-6) - 1e-9) / (x.abs().sum(1, keepdim=True) + 1e-8)


@needs_onnx
def test_small_constants_are_kept(tmp_path: Path) -> None:
    from splitgrow.export.runner import OnnxRunner

    model, x = Shares(), torch.rand(4, 5)
    path = export_onnx(model, x, tmp_path / "shares.onnx").path
    (found,) = OnnxRunner(path).run({"x": np.zeros((2, 5), np.float32)})
    assert np.allclose(found, -0.1)
    import onnx

    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert sorted(kinds) == ["Abs", "Add", "Div", "Mul", "ReduceSum", "Sub"]


@needs_onnx
def test_what_training_alone_needs_is_folded_away(odd_file: Any) -> None:
    import onnx

    kinds = {node.op_type for node in onnx.load(odd_file[2].path).graph.node}
    assert not kinds & {"BatchNormalization", "Constant", "Shape", "Expand", "CastLike", "Pad"}


@needs_onnx
def test_a_file_that_has_no_number_for_zeros_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().sum(1, keepdim=True)

    x, path = torch.rand(4, 5), tmp_path / "shares.onnx"
    assert export_onnx(Bare(), x, path).difference < 1e-6  # the model has none either
    content = path.read_bytes()
    monkeypatch.setattr(exports, "onnx_bytes", lambda *_: content)
    with pytest.raises(ExportError, match="gives nan where all inputs are zero"):
        export_onnx(Shares(), x, tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


QUIET = """
import torch
from torch import nn
from splitgrow.export import export_onnx, quantize_onnx

model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
exported = export_onnx(model, torch.randn(1, 3), "mlp.onnx")
quantize_onnx(exported.path, batches=[torch.randn(8, 3)])
assert exported.batch_sizes == (1,)  # the example is one sample
"""


@needs_onnx
def test_the_terminal_stays_quiet(tmp_path: Path) -> None:
    """In a process of its own: torch and onnxruntime hold on to the stderr that they find."""
    result = subprocess.run(
        [sys.executable, "-c", QUIET], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert {path.name for path in tmp_path.iterdir()} == {"mlp.onnx", "mlp.int8.onnx"}


@needs_onnx
def test_a_fixed_batch_size_is_refused(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.reshape(4, 4))

    with pytest.raises(ExportError, match="takes batches of 4 alone"):
        export_onnx(Fixed(), torch.randn(4, 4), tmp_path / "fixed.onnx")
    assert list(tmp_path.iterdir()) == []


@needs_onnx
def test_batches_that_are_called_otherwise_are_named(tmp_path: Path) -> None:
    model, batches = odd()
    other = {"conv2d": batches[0][0], "relu": batches[0][1], "double": True}
    with pytest.raises(sg.InputError, match=r"batches\[1\] calls the model with"):
        export_onnx(model, batches[0], tmp_path / "odd.onnx", batches=[batches[1], other])


def test_more_than_a_file_can_hold_is_refused_before_anything_is_traced() -> None:
    with torch.device("meta"):
        model = nn.Linear(40_000, 20_000)
    with pytest.raises(ExportError, match=r"3\.2 GB of weights"):
        exports._check_size(model)


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_package_is_named_with_its_extra(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without(missing, monkeypatch)
    with pytest.raises(sg.InputError, match=r'pip install "splitgrow\[export\]"'):
        export_onnx(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "x.onnx")
    with pytest.raises(sg.InputError, match=r"splitgrow\[export\]"):
        quantize_onnx(tmp_path / "x.onnx", batches=[torch.randn(1, 2)])


def _without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


# --- comparing ----------------------------------------------------------------------------


def test_a_difference_sees_shapes_and_numbers_that_are_not_finite() -> None:
    one = np.ones((2, 3), np.float32)
    nan, inf = one * np.nan, one * np.inf
    assert check.difference([one, nan, inf], [one, nan, inf]) == 0
    assert check.difference([one], [one + 0.5]) == 0.5
    assert check.difference([one], [nan]) == np.inf
    assert check.difference([-inf], [inf]) == np.inf
    assert check.difference([one], [one[:1]]) == np.inf
    assert check.difference([one], [one, one]) == np.inf
    assert check.difference([np.array([True])], [np.array([False])]) == 1


def test_agreement_counts_equal_classes_of_all_samples() -> None:
    a = np.array([[1.0, 0], [0, 1], [0, 1]])
    b = np.array([[1.0, 0], [0, 1], [1, 0]])
    assert check.agreement([[a], [a[:1]]], [[b], [b[:1]]]) == 0.75
    assert check.agreement([[a[:, :1]]], [[b[:, :1]]]) is None


# --- int8 ---------------------------------------------------------------------------------


@needs_onnx
def test_a_quantised_file_has_8_bit_weights_and_stays_near(odd_file: Any, tmp_path: Path) -> None:
    import onnx

    _, batches, exported = odd_file
    small = quantize_onnx(exported.path, tmp_path / "small.onnx", batches=batches)
    graph = onnx.load(small.path).graph
    kinds = {node.op_type for node in graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    weights = [each for each in graph.initializer if each.data_type == onnx.TensorProto.INT8
               and len(each.dims) == 4]  # fmt: skip
    assert {tuple(each.dims) for each in weights} == {(7, 1, 3, 3)}
    scales = [tuple(i.dims) for i in graph.initializer if i.data_type == onnx.TensorProto.FLOAT]
    assert (7,) in scales  # one for each channel
    assert 0 < small.difference < 0.3
    assert small.agreement is not None
    assert small.agreement >= 0.8
    assert small.bytes == small.path.stat().st_size
    by_name = [{"relu": b, "conv2d": a} for a, b in batches]
    again = quantize_onnx(exported.path, tmp_path / "again.onnx", batches=by_name)
    assert (again.difference, again.agreement) == (small.difference, small.agreement)


@needs_onnx
def test_what_cannot_be_calibrated_is_explained(odd_file: Any, tmp_path: Path) -> None:
    _, batches, exported = odd_file
    with pytest.raises(sg.InputError, match="there are none"):
        quantize_onnx(exported.path, tmp_path / "a.onnx", batches=[])
    with pytest.raises(sg.InputError, match="without targets"):
        quantize_onnx(exported.path, tmp_path / "a.onnx", batches=[(*batches[0], batches[0][0])])
    with pytest.raises(sg.InputError, match="not there"):
        quantize_onnx(tmp_path / "none.onnx", batches=batches)
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(ExportError, match="cannot load"):
        quantize_onnx(tmp_path / "bad.onnx", batches=batches)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]


# --- the command --------------------------------------------------------------------------


def test_a_run_remembers_its_experiment_and_resumes_without(run: Path) -> None:
    from splitgrow.experiment import load_experiment

    settings = json.loads((run / "grown" / "run.json").read_text())
    assert settings["origin"] == "mine.py:experiment"
    experiment = load_experiment(str(run / "mine.py:experiment"))
    folder = run / "further"
    experiment.run(folder, origin="mine.py:experiment")
    longer = sg.Experiment(**{**vars(experiment), "until": sg.Budget(phases=3)})
    assert len(longer.run(folder, resume=True).history.phases) == 3
    assert json.loads((folder / "run.json").read_text())["origin"] == "mine.py:experiment"
    other = sg.Experiment(**{**vars(experiment), "until": sg.Budget(phases=4)})
    other.run(folder, resume=True, origin="elsewhere.py:x")
    assert json.loads((folder / "run.json").read_text())["origin"] == "elsewhere.py:x"


@needs_onnx
def test_export_writes_the_last_net_and_a_table(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from splitgrow.experiment import load_object

    monkeypatch.chdir(run)
    result = invoke("grown", "--format", "onnx", "--int8")
    assert result.exit_code == 0, result.output
    model = sg.load(load_object("mine.py:build")(), "grown/phase-0001/model.safetensors").eval()
    assert model[0].out_channels == 5  # three, and two more
    x = load_object("mine.py:x")
    session = onnxruntime.InferenceSession("grown/model.onnx")
    (found,) = session.run(None, {"input": x.numpy()})
    with torch.no_grad():
        expected = model(x)
        accuracy = load_object("mine.py:evaluate")(model)["accuracy"]
    assert np.allclose(found, expected, atol=1e-4)
    parameters = sum(p.numel() for p in model.parameters())
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if "│" in line}
    assert f"{parameters:,}" in rows["parameters"]
    assert "1, 3, 8, 16" in rows["batch sizes compared"]
    assert "%" in rows["same argmax as the float file"]
    assert rows["latency, 1 thread"].count(" ms") == 3
    assert rows["accuracy"].count(f"{accuracy:.4g}") >= 2  # PyTorch and the file
    assert Path("grown/model.int8.onnx").exists()


@needs_onnx
def test_export_writes_the_net_of_a_phase(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    monkeypatch.chdir(run)
    result = invoke("grown", "--phase", "0", "--int8")
    assert result.exit_code == 0, result.output
    assert "from grown/phase-0000" in result.output
    shapes = [list(t.dims) for t in onnx.load("grown/phase-0000.onnx").graph.initializer]
    assert [3, 1, 3, 3] in shapes  # as it was before it grew
    assert Path("grown/phase-0000.int8.onnx").exists()
    other = invoke("grown", "--phase", "1", "--out", "other.onnx")
    assert other.exit_code == 0, other.output
    shapes = [list(t.dims) for t in onnx.load("other.onnx").graph.initializer]
    assert [5, 1, 3, 3] in shapes


def test_a_phase_that_is_not_there_is_explained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitgrow.export.run.require_onnx", lambda: None)
    missing = invoke(run / "grown", "--phase", "9")
    assert isinstance(missing.exception, sg.InputError)
    assert str(missing.exception) == (
        f"--phase: {run / 'grown'} has no net that phase 9 trained. The phases there: 0, 1."
    )
    assert invoke(run / "grown", "--phase", "-1").exit_code == 2


@pytest.mark.parametrize("name", ["phase-0000", "phase-0000-grown"])
def test_a_checkpoint_in_the_place_of_its_run_is_explained(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("splitgrow.export.run.require_onnx", lambda: None)
    monkeypatch.chdir(run)
    words = str(invoke(f"grown/{name}").exception)
    assert words.startswith(f"grown/{name} is a checkpoint, not a run. ")
    assert words.endswith("For the net that phase 0 trained: splitgrow export grown --phase 0")


@needs_onnx
def test_a_run_made_from_python_needs_the_model_named(run: Path, tmp_path: Path) -> None:
    from splitgrow.experiment import load_experiment

    folder, out = tmp_path / "plain", tmp_path / "plain.onnx"
    load_experiment(str(run / "mine.py:experiment")).run(folder)
    unknown = invoke(folder, "--out", out)
    assert isinstance(unknown.exception, sg.InputError)
    assert "Pass --model file.py:name" in str(unknown.exception)
    shapeless = invoke(folder, "--out", out, "--model", run / "mine.py:build")
    assert "--input 1x3x32x32" in str(shapeless.exception)
    uncalibrated = invoke(folder, "--out", out, "--model", run / "mine.py:build", "--int8",
                          "--input", "2x1x6x6")  # fmt: skip
    assert "Name a splitgrow.Experiment" in str(uncalibrated.exception)
    number = invoke(folder, "--out", out, "--model", run / "mine.py:number")
    assert "expected a splitgrow.Experiment, a model or a function" in str(number.exception)
    needy = invoke(folder, "--out", out, "--model", run / "mine.py:needs")
    assert "mine.py:needs: a function without arguments is needed" in str(needy.exception)
    inside = invoke(folder, "--out", out, "--model", run / "mine.py:unbuildable")
    assert "mine.py:unbuildable, model: a function without arguments" in str(inside.exception)
    assert not out.exists()
    built = invoke(folder, "--out", out, "--model", run / "mine.py:build", "--input", "4x1x6x6")
    assert built.exit_code == 0, built.output
    assert "1, 3, 4" in built.output
    assert out.exists()


def test_a_run_that_cannot_be_exported_is_explained(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitgrow.export.run.require_onnx", lambda: None)
    assert "holds no checkpoint" in str(invoke(tmp_path).exception)
    assert "use --format onnx" in str(invoke(run, "--format", "executorch", "--int8").exception)
    monkeypatch.chdir(tmp_path)  # where there is no mine.py
    moved = str(invoke(run / "grown").exception)
    assert "was grown from mine.py:experiment" in moved
    assert "--model file.py:name" in moved


# --- ExecuTorch ---------------------------------------------------------------------------


def test_a_missing_executorch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without("executorch", monkeypatch)
    with pytest.raises(sg.InputError, match=r"splitgrow\[executorch\]"):
        export_executorch(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "x.pte")


@needs_executorch
def test_an_executorch_program_computes_what_the_model_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, batches = odd()
    exported = export_executorch(model, batches[0], tmp_path / "odd.pte", batches=batches)
    assert capfd.readouterr() == ("", "")
    from executorch.runtime import Runtime

    assert exported.difference <= 1e-4
    assert exported.batch_sizes == (1,)
    assert 0 < exported.seconds < 1
    content = exported.path.read_bytes()  # kept, as the program is: a method points into both
    program = Runtime.get().load_program(content)
    method = program.load_method("forward")
    inputs = [batches[1][0][3:], batches[1][1][3:]]
    with torch.no_grad():
        expected = model.eval()(*inputs)["add"]
    assert torch.allclose(method.execute(inputs)[0], expected, atol=1e-5)


@needs_executorch
def test_the_command_judges_an_executorch_program(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    result = invoke("grown", "--format", "executorch", "--out", tmp_path / "x.pte")
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.output.splitlines() if "accuracy" in line)
    _, torchs, programs = row.strip("│ ").split("│")
    assert torchs.strip() == programs.strip() != ""


def test_a_file_for_one_sample_answers_batches() -> None:
    class Sums:
        inputs = ["x", "factor"]  # noqa: RUF012  (as a runner has it)

        def run(self, feeds: dict[str, Any]) -> list[Any]:
            assert len(feeds["x"]) == 1
            return [feeds["x"].sum(1) * feeds["factor"]]

    feeds = {"x": np.arange(6.0).reshape(3, 2), "factor": np.array([2.0])}
    assert np.array_equal(check.OneByOne(Sums()).run(feeds)[0], [2, 10, 18])


@needs_executorch
def test_an_executorch_program_that_cannot_be_timed_is_told_with_the_reason() -> None:
    with pytest.raises(ExportError, match=r"latency.*ended with 1 \(.*cannot load the file"):
        executorch_latency(b"no program", {"x": np.zeros((1, 2), np.float32)})
