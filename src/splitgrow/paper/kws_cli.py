"""``splitgrow paper kws``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitgrow.paper.options import (
    DATA,
    FOLDER,
    Batch,
    Columns,
    Device,
    Finish,
    Folder,
    Phases,
    Quick,
    Redraw,
    Seeds,
    Step,
    Workers,
    device_named,
    not_usable,
    scheduled,
)

if TYPE_CHECKING:
    from rich.console import Console

Data = Annotated[
    Path, typer.Option(help="Folder of Speech Commands: its wav files, or packed features.")
]
# Of the study's jobs. They are repeated here so that --help need not import the study.
ARCHS = ("DS-CNN", "DNN", "CNN", "BasicLSTM", "LSTM", "GRU", "CRNN")
METHODS = ("splitting", "splitting-macs", "random", "bn", "uniform", "uniform-long", "full")
Arch = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Only this net, may be repeated; by default all of {', '.join(ARCHS)}.",
    ),
]
Method = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Only this method, may be repeated; by default all of {', '.join(METHODS)}. Of nets "
        "other than DS-CNN there is full alone.",
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Epochs of 500 steps in every phase; by default 4.")
]
Export = Annotated[
    bool, typer.Option("--export", help="Write the grown nets as files for a device, too.")
]
PaperSchedule = Annotated[
    bool,
    typer.Option("--paper-schedule", help="As published: 30,000 steps a phase, batches of 100."),
]


def kws(
    data: Data = DATA,
    arch: Arch = None,
    method: Method = None,
    seeds: Seeds = 5,
    workers: Workers = 1,
    epochs: Epochs = None,
    batch: Batch = None,
    phases: Phases = None,
    finish: Finish = None,
    step: Step = None,
    columns: Columns = None,
    paper_schedule: PaperSchedule = False,  # noqa: FBT002  (typer makes it a flag)
    quick: Quick = False,  # noqa: FBT002
    redraw: Redraw = False,  # noqa: FBT002
    export: Export = False,  # noqa: FBT002
    device: Device = None,
    folder: Folder = FOLDER,
) -> None:
    """Grow DS-CNN on Speech Commands against pruning and six other keyword spotters: Table 1.

    The study is many jobs, each with a file of its own. Those that are done are not repeated, an
    interrupted one goes on; figures and tables are made of all the files that are there.
    """
    from splitgrow.export.runner import require_onnx
    from splitgrow.paper import figures
    from splitgrow.paper.job_runs import chosen, finished, run_jobs
    from splitgrow.paper.kws import EXPERIMENT, order, reader, study
    from splitgrow.paper.kws_bench import Setting
    from splitgrow.paper.kws_files import export_jobs
    from splitgrow.paper.screen import screen
    from splitgrow.paper.speech_parts import digest

    figures.check_matplotlib()  # now, not after minutes of work
    if export:
        require_onnx()
    console, place = screen(), folder / "kws"
    if not redraw:
        setting = scheduled(
            Setting(), paper_schedule=paper_schedule, quick=quick, epochs=epochs, batch=batch,
            phases=phases, finish=finish, step=step, columns=columns,
        )  # fmt: skip
        todo = chosen(study(range(1 if quick else seeds)), arch, method)
        contents = digest(reader(place)(data))  # now, with a good error, not in every process
        shared = order(
            setting, data=data, folder=place, device=device_named(device), contents=contents
        )
        run_jobs(todo, shared, workers, console)
    show(place, console)
    if export:
        export_jobs(finished(place, EXPERIMENT), place)
        show_files(place, console)
        say_where_files_are(place, console)
    if quick and not redraw:
        steps = f"{setting.epochs * setting.steps} steps a phase"
        said = not_usable(steps, f"{setting.tested} test clips")
        console.print(said, soft_wrap=True, highlight=False)


def show(place: Path, console: Console) -> None:
    """Claims, tables and figures of all jobs that are done."""
    from splitgrow.files import write_file
    from splitgrow.paper import kws_claims, kws_figures, kws_table
    from splitgrow.paper.job_runs import finished
    from splitgrow.paper.kws import EXPERIMENT, summary, tables
    from splitgrow.paper.results import rounded

    jobs = finished(place, EXPERIMENT)
    found, claims = rounded(summary(jobs)), rounded(kws_claims.claims(jobs))
    for table in (*tables(found), *kws_claims.tables(claims)):
        console.print(table)
    rows = rounded(kws_table.table1(jobs, claims))
    texts = {
        "summary.json": _json(found),
        "claims.json": _json(claims),
        "table1.json": _json(rows),
        "table1.md": kws_table.to_markdown(rows),
    }

    for name, text in texts.items():
        write_file(place / name, text.encode())
    for file in (*(place / name for name in texts), *kws_figures.draw(jobs, place)):
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)
    show_files(place, console)


def show_files(place: Path, console: Console) -> None:
    """The table of the files that the grown nets were exported to."""
    from splitgrow.files import write_file
    from splitgrow.paper import kws_files
    from splitgrow.paper.job_runs import finished
    from splitgrow.paper.kws import EXPERIMENT

    rows = kws_files.read_files(place, finished(place, EXPERIMENT))
    if rows:
        text, file = kws_files.to_markdown(rows), place / "files.md"
        write_file(file, text.encode())
        console.print(text, f"wrote {file}", sep="\n", soft_wrap=True, highlight=False)


def say_where_files_are(place: Path, console: Console) -> None:
    """The folders of the nets, and what to do with a file."""
    from splitgrow.paper.job_runs import finished
    from splitgrow.paper.kws import EXPERIMENT
    from splitgrow.paper.kws_files import runs_of_jobs

    files = sorted(runs_of_jobs(finished(place, EXPERIMENT), place).glob("*/model.*"))
    for file in files:
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)
    example = next((file for file in files if file.name == "model.onnx"), None)
    if example is not None:
        console.print(f"Try one: splitgrow listen {example} clip.wav", soft_wrap=True,
                      highlight=False)  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"
