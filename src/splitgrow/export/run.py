"""``splitgrow export``: a net of a run's folder as a file, and a table about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, Literal

import torch
from rich.table import Table
from torch import nn

from splitgrow.capture import Call, _Structure
from splitgrow.checkpoint import load
from splitgrow.cost import Cost, CostModel
from splitgrow.errors import InputError
from splitgrow.experiment import Experiment, _call, _guarded, build, load_object
from splitgrow.export import Exported, Quantized, export_executorch, export_onnx, quantize_onnx
from splitgrow.export.check import (
    FileModule,
    OneByOne,
    Runner,
    in_main_memory,
    input_names,
    metrics_of,
)
from splitgrow.export.executorch_file import ExecutorchRunner, require_executorch
from splitgrow.export.runner import OnnxRunner, require_onnx
from splitgrow.runs import RunFolder, Saved
from splitgrow.show import render
from splitgrow.state import eval_mode, seeded
from splitgrow.units import find_units
from splitgrow.view import ModelView, passes

Format = Literal["onnx", "executorch"]
BATCHES = 8  # of the experiment's, to compare and to calibrate on


@dataclass(frozen=True)
class RunExported:
    """A net of a run as one file or two.

    Attributes:
        checkpoint: the folder of the net.
        file: the file in float.
        int8: the quantised one, if it was asked for.
        cost: parameters and MACs of the net.
        metrics: what the experiment's ``evaluate`` says of PyTorch, of the file and of the
            quantised file; without those on which it cannot run.
    """

    checkpoint: Path
    file: Exported
    int8: Quantized | None
    cost: Cost
    metrics: Mapping[str, Mapping[str, float]]

    def __str__(self) -> str:
        return _table(self)


def export_run(
    run_dir: Path,
    format_: Format,
    *,
    phase: int | None = None,
    out: Path | None = None,
    model: str | None = None,
    example: tuple[Any, ...] = (),
    int8: bool = False,
    tolerance: float = 1e-4,
) -> RunExported:
    """Build a net of a run, the last one or that of a phase, write it, and say how it compares."""
    if int8 and format_ != "onnx":
        raise InputError("--int8: it quantises an ONNX file. Leave it out, or use --format onnx.")
    require_onnx() if format_ == "onnx" else require_executorch()
    saved, settings = _checkpoint(run_dir, phase), RunFolder(run_dir).settings()
    place = model or settings.get("origin")
    source = _source(run_dir, place, settings.get("seed", 0), given=model is not None)
    seed_model = build(_model_of(source), settings.get("seed", 0), f"{place}, model")
    grown = load(seed_model, saved.model)
    inputs, calls = _inputs(grown, source, example, str(place))
    net = in_main_memory(grown)  # only now: loss_fn may move its batches to the model's device
    if int8 and not calls:
        raise InputError(
            f"--int8: {place} is a model alone, and ranges are calibrated on an experiment's "
            "batches. Name a splitgrow.Experiment with --model."
        )
    target = out or _target(run_dir, format_, phase)
    cost = CostModel(find_units(net, inputs)).total()
    batches = calls or None
    if format_ == "onnx":
        metadata = source.metadata if isinstance(source, Experiment) else None
        file = export_onnx(
            net, inputs, target, batches=batches, tolerance=tolerance, metadata=metadata
        )
    else:
        file = export_executorch(net, inputs, target, batches=batches, tolerance=tolerance)
    small = quantize_onnx(file.path, batches=calls) if int8 else None
    if format_ == "onnx":
        metrics = _metrics(net, inputs, source, [file, small], OnnxRunner)
    else:
        metrics = _metrics(net, inputs, source, [file], partial(_program, inputs=inputs))
    return RunExported(saved.path, file, small, cost, metrics)


# --- what the run was made of -------------------------------------------------------------


def _checkpoint(run_dir: Path, phase: int | None) -> Saved:
    """The net that a phase trained; without one, the last whole checkpoint."""
    saved = RunFolder(run_dir).saved()
    if not saved:
        _refuse_checkpoint(run_dir)
        raise InputError(
            f"{run_dir} holds no checkpoint of a run. Name the folder that was given to splitgrow "
            "grow as --run-dir, or to grow() as run_dir=."
        )
    found = saved[-1] if phase is None else _of_phase(run_dir, saved, phase)
    found.check()
    return found


def _of_phase(run_dir: Path, saved: Sequence[Saved], phase: int) -> Saved:
    trained = {each.phase: each for each in saved if not each.grown}
    if phase not in trained:
        there = ", ".join(map(str, trained)) or "none"
        raise InputError(
            f"--phase: {run_dir} has no net that phase {phase} trained. The phases there: {there}."
        )
    return trained[phase]


def _refuse_checkpoint(path: Path) -> None:
    """Where one checkpoint is named in the place of its run, say how to export it."""
    saved = next((each for each in RunFolder(path.parent).saved() if each.path == path), None)
    if saved is not None:
        raise InputError(
            f"{path} is a checkpoint, not a run. For the net that phase {saved.phase} trained: "
            f"splitgrow export {quote(str(path.parent))} --phase {saved.phase}"
        )


def _target(run_dir: Path, format_: Format, phase: int | None) -> Path:
    """A file beside that of the run's last net, where it is another one."""
    stem = "model" if phase is None else f"phase-{phase:04}"
    return run_dir / f"{stem}.{'onnx' if format_ == 'onnx' else 'pte'}"


def _source(run_dir: Path, place: str | None, seed: int, *, given: bool) -> Experiment | nn.Module:
    """The experiment or the seed model that a run was made from."""
    if place is None:
        raise InputError(
            f"{run_dir} does not say what it was grown from: it was made from Python, or by an "
            "older splitgrow. Pass --model file.py:name, a splitgrow.Experiment or a function that "
            "builds the seed model."
        )
    try:
        found = load_object(place)
    except InputError as error:
        if given:
            raise
        raise InputError(
            f"{run_dir} was grown from {place}, which cannot be loaded from here ({error}) Run the "
            "command in the folder where the run was started, or pass --model file.py:name."
        ) from error
    if not isinstance(found, Experiment | nn.Module) and callable(found):
        with seeded(seed):
            found = _made(place, found, run_dir)
    if not isinstance(found, Experiment | nn.Module):
        raise InputError(
            f"{place}: expected a splitgrow.Experiment, a model or a function that makes one, got "
            f"{type(found).__name__}."
        )
    return found


def _made(place: str, function: Callable[..., Any], run_dir: Path) -> Any:
    """What a function makes, from the run's folder if it asks for ``run_dir``."""
    if "run_dir" in inspect.signature(function).parameters:
        return _guarded(place, lambda: function(run_dir=run_dir))
    return _call(place, function)


def _model_of(source: Experiment | nn.Module) -> Any:
    return source.model if isinstance(source, Experiment) else source


def _inputs(
    net: nn.Module, source: Experiment | nn.Module, example: tuple[Any, ...], place: str
) -> tuple[Call, list[Call]]:
    """An example of the model's inputs, and the inputs of the experiment's first batches."""
    if isinstance(source, Experiment):
        calls = _calls(net, source)
        given = source.example_inputs
        return (calls[0] if given is None else _at_home(Call.from_example(given), net)), calls
    if not example:
        raise InputError(
            f"{place} is a model alone, so its inputs are not known. Pass their shapes with "
            "--input 1x3x32x32, or name a splitgrow.Experiment with --model."
        )
    return _at_home(Call.from_example(example), net), []


def _calls(net: nn.Module, experiment: Experiment) -> list[Call]:
    """What loss_fn gives the model on the first batches."""
    found: list[Call] = []
    with eval_mode(net), torch.no_grad():
        for batch in islice(passes(experiment.batches), BATCHES):
            view = ModelView(net)
            experiment.loss_fn(view, batch)
            assert view.samples  # raises where the model was not called
            found.append(_at_home(view.calls[0], net))
    return found


def _at_home(call: Call, net: nn.Module) -> Call:
    """In main memory, with the arguments by name."""
    return call.to(torch.device("cpu")).bound_to(net)


# --- how it compares ----------------------------------------------------------------------


def _program(path: Path, inputs: Call) -> Runner:
    return OneByOne(ExecutorchRunner(path.read_bytes(), input_names(inputs)))


def _metrics(
    net: nn.Module,
    inputs: Call,
    source: Any,
    files: list[Exported | Quantized | None],
    runner_of: Callable[[Path], Runner],
) -> dict[str, dict[str, float]]:
    evaluate = source.evaluate if isinstance(source, Experiment) else None
    if evaluate is None:
        return {}
    structure = _Structure()
    with eval_mode(net), seeded(), torch.no_grad():
        structure.flatten(net(*inputs.to(None).args, **inputs.to(None).kwargs))
    found = {"PyTorch": metrics_of(evaluate, net)}
    for name, file in zip(("file", "int8"), files, strict=False):
        if file is not None:
            found[name] = metrics_of(evaluate, FileModule(net, runner_of(file.path), structure))
    return {name: metrics for name, metrics in found.items() if metrics}


def _table(run: RunExported) -> str:
    """A column for PyTorch and for each file."""
    columns = [name for name in ("PyTorch", "file", "int8") if name != "int8" or run.int8]
    table = Table(title=f"{run.file.path}, from {run.checkpoint}", title_justify="left")
    table.add_column("")
    for name in columns:
        head = run.file.path.suffix.removeprefix(".") if name == "file" else name
        table.add_column(head or "file", justify="right")
    for label, cells in _rows(run).items():
        table.add_row(label, *(cells.get(name, "") for name in columns))
    also = f"wrote {run.file.path}" + (f" and {run.int8.path}" if run.int8 else "")
    return render(table, also, width=120)


def _rows(run: RunExported) -> dict[str, dict[str, str]]:
    file, small = run.file, run.int8
    sizes = ", ".join(map(str, file.batch_sizes))
    rows = {
        "file size": {"file": _size(file.bytes)},
        "parameters": {"PyTorch": f"{run.cost.params:,}"},
        "MACs": {"PyTorch": f"{run.cost.macs:,}"},
        "largest difference": {"file": f"{file.difference:.1e}"},
        "batch sizes compared": {"file": sizes},
        "latency, 1 thread": {
            "PyTorch": _time(file.torch_seconds), "file": _time(file.seconds),
        },
    }  # fmt: skip
    if small is not None:
        rows["file size"]["int8"] = _size(small.bytes)
        rows["largest difference"]["int8"] = f"{small.difference:.1e}"
        rows["latency, 1 thread"]["int8"] = _time(small.seconds)
        share = "" if small.agreement is None else f"{small.agreement:.2%}"
        rows["same argmax as the float file"] = {"int8": share}
    for name in dict.fromkeys(key for found in run.metrics.values() for key in found):
        rows[name] = {c: f"{found[name]:.4g}" for c, found in run.metrics.items() if name in found}
    return rows


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
