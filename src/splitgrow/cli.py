"""The command line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

import splitgrow
from splitgrow.errors import InputError, Interrupted, SplitgrowError
from splitgrow.paper.cli import app as paper

app = typer.Typer(
    help="Grow neural networks by splitting neurons: the smallest net that does the job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(paper, name="paper")


class Format(StrEnum):
    """What a grown model can be exported as."""

    ONNX = "onnx"
    EXECUTORCH = "executorch"


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.")
    ] = False,
) -> None:
    """Grow neural networks by splitting neurons: the smallest net that does the job."""
    if show_version:
        version()
        raise typer.Exit


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs in each phase of growth.")] = 10,
    params: Annotated[int, typer.Option(min=200, help="Parameters at most.")] = 1200,
    run_dir: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Grow a small CNN on handwritten digits.

    Beside it: random splitting, the same net from scratch and a much larger one. Ends with a table
    and a report.
    """
    from splitgrow.demo import run

    with _interruptible():
        run(seed=seed, epochs=epochs, params=params, run_dir=run_dir)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A model or its builder: file.py:build_model.")],
    shapes: Annotated[
        list[str],
        typer.Option("--input", help="Shape of an input, 1x3x32x32; for integers 1x16:int64."),
    ],
) -> None:
    """Show what can be split in a model.

    A table of units with their parameters per neuron, and what cannot be split and why.
    """
    from splitgrow.experiment import build, load_object

    example = tuple(_example(shape) for shape in shapes)
    net = build(load_object(model), place=model)
    typer.echo(str(splitgrow.find_units(net, example)))


@app.command()
def grow(
    experiment: Annotated[
        str, typer.Argument(help="A splitgrow.Experiment, or a function: file.py:experiment.")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints; runs/NAME by default.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in the folder.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    tensorboard: Annotated[
        bool | None, typer.Option(help="Log for TensorBoard; by default where it is installed.")
    ] = None,
) -> None:
    """Grow the model of an experiment.

    Trains, splits the neurons that are stuck, and again, until the experiment's budget is spent.
    Ctrl-C ends after the current batch; --resume goes on from the last whole phase.
    """
    from splitgrow.experiment import load_experiment, relative_place
    from splitgrow.live import Live

    loaded = load_experiment(experiment)
    folder = run_dir or Path("runs") / experiment.rpartition(":")[2]
    with _interruptible(), Live() as live:
        watch: list[splitgrow.Watcher] = [live]
        if find_spec("tensorboard") is not None if tensorboard is None else tensorboard:
            watch.append(splitgrow.TensorBoard(folder / "tensorboard"))
        result = loaded.run(
            folder, resume=resume, seed=seed, watch=watch, origin=relative_place(experiment)
        )
    typer.echo(str(result))
    typer.echo(f"checkpoints: {folder}    report: splitgrow report {folder}")


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page about runs.

    Losses with their splits, widths of layers, family trees of neurons, predicted against measured
    change of the loss, metrics against size. The page needs no network.
    """
    from splitgrow.report import write_report

    typer.echo(f"wrote {write_report(run_dirs, output)}")


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    format_: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.ONNX,
    phase: Annotated[
        int | None,
        typer.Option(min=0, help="The net that this phase trained; by default the run's last one."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; by default RUN_DIR/model.onnx, with --phase 3 "
            "RUN_DIR/phase-0003.onnx."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The experiment or seed model, file.py:name, if the run does not know."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--input", help="Shape of an input, 1x3x32x32, if --model is a model."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Also a quantised file (ONNX).")] = False,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference from PyTorch that is accepted.")
    ] = 1e-4,
) -> None:
    """Write a grown model of a run as ONNX or for ExecuTorch.

    The file is compared with PyTorch on the experiment's batches and written only if it computes
    the same. Ends with a table: size, parameters, MACs, difference, latency.
    """
    from splitgrow.export.run import export_run

    example = tuple(_example(shape) for shape in shapes or ())
    exported = export_run(
        run_dir, format_.value, phase=phase, out=out, model=model, example=example, int8=int8,
        tolerance=tolerance,
    )  # fmt: skip
    typer.echo(str(exported))


@app.command()
def listen(
    model: Annotated[
        Path, typer.Argument(help="A keyword model: an ONNX file of splitgrow export.")
    ],
    clips: Annotated[list[Path], typer.Argument(help="Wav files, 16-bit PCM.")],
    top: Annotated[int, typer.Option(min=1, help="How many words to show for each clip.")] = 3,
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines: all probabilities.")
    ] = False,
) -> None:
    """Say which word is spoken in wav files.

    The model hears one second at 16 kHz: a shorter clip is filled up with silence, of a longer one
    the loudest second is taken, other rates and several channels are converted. Files that cannot
    be used are named after the results of the others.
    """
    from rich.console import Console

    from splitgrow.listen import Spotter, show, usable_clips

    spotter = Spotter(model)
    usable, problems = usable_clips(clips)
    heard = spotter.hear(usable)
    if heard and as_json:
        typer.echo(show.to_json(heard))
    elif heard:
        Console().print(show.table(heard, top))
    if note := show.note(heard):
        typer.secho(f"splitgrow: {note}", err=True, fg="yellow")
    if problems:
        raise InputError("\n".join(problems))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(splitgrow.__version__)


def _example(text: str) -> object:
    """A tensor for a shape like 1x3x32x32 or 1x16:int64."""
    import torch

    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not re.fullmatch(r"\d+(x\d+)*", shape) or not isinstance(dtype, torch.dtype):
        raise InputError(f"--input: expected a shape like 1x3x32x32 or 1x16:int64, got {text!r}.")
    sizes = [int(size) for size in shape.split("x")]
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(sizes, dtype=dtype)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Say what Ctrl-C left behind: typer itself would only say that it aborted."""
    try:
        yield
    except Interrupted as stop:
        typer.secho(f"splitgrow: {stop}", err=True, fg="yellow")
        raise typer.Exit(130) from stop


def main() -> None:
    """Run the command line; errors of ours are one paragraph, not a traceback."""
    try:
        app()
    except SplitgrowError as error:
        typer.secho(f"splitgrow: {error}", err=True, fg="red")
        sys.exit(1)
