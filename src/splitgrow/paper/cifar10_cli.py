"""``splitgrow paper cifar10`` and ``splitgrow paper depthwise``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitgrow.errors import InputError
from splitgrow.paper.options import (
    DATA,
    FOLDER,
    Batch,
    Columns,
    Data,
    Device,
    Download,
    Finish,
    Folder,
    Growing,
    MaxGrowth,
    Phases,
    Quick,
    Redraw,
    Restart,
    Seeds,
    Step,
    Thin,
    Workers,
    device_named,
    not_usable,
    scheduled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table

    from splitgrow.paper.curves import Jobs

# Of the study's jobs. They are repeated here so that --help need not import the study.
ARCHS = ("mobilenet", "vgg19")
METHODS = (
    "splitting", "splitting-gain", "splitting-params", "splitting-macs", "random", "l1", "bn",
    "uniform", "uniform-long",
)  # fmt: skip
Arch = Annotated[
    list[str] | None,
    typer.Option(help=f"Only this net, may be repeated; by default {' and '.join(ARCHS)}."),
]
Method = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Only this method, may be repeated; by default all of {', '.join(METHODS)} (uniform "
        "not with --size).",
    ),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs of every phase; by default 8.")]
Largest = Annotated[
    float | None,
    typer.Option(help="Growth ends with a net of this share of the full one's parameters: 0.3."),
]
Sizes = Annotated[
    list[float] | None,
    typer.Option(
        "--size",
        help="All methods end with a net of this share of the full one's parameters; may be "
        "repeated.",
    ),
]
PaperSchedule = Annotated[
    bool, typer.Option("--paper-schedule", help="As published: 160 epochs a phase, batches of 64.")
]


def cifar10(
    data: Data = DATA,
    arch: Arch = None,
    method: Method = None,
    seeds: Seeds = 3,
    workers: Workers = 1,
    epochs: Epochs = None,
    batch: Batch = None,
    phases: Phases = None,
    largest: Largest = None,
    sizes: Sizes = None,
    finish: Finish = None,
    max_growth: MaxGrowth = None,
    step: Step = None,
    columns: Columns = None,
    restart: Restart = None,
    growing: Growing = None,
    thin: Thin = None,
    paper_schedule: PaperSchedule = False,  # noqa: FBT002  (typer makes it a flag)
    quick: Quick = False,  # noqa: FBT002
    redraw: Redraw = False,  # noqa: FBT002
    download: Download = False,  # noqa: FBT002
    device: Device = None,
    folder: Folder = FOLDER,
) -> None:
    """Grow MobileNet and VGG19 on CIFAR-10 against pruning: Figure 3.

    The study is many jobs, each with a file of its own. Those that are done are not repeated, an
    interrupted one goes on; figures and tables are made of all the files that are there.
    """
    from splitgrow.paper import figures
    from splitgrow.paper.cifar10 import run_studies
    from splitgrow.paper.cifar10_bench import Setting
    from splitgrow.paper.cifar10_ends import folder_of
    from splitgrow.paper.cifar10_jobs import study, study_of_ends
    from splitgrow.paper.data import cifar10 as read
    from splitgrow.paper.job_runs import chosen
    from splitgrow.paper.screen import screen
    from splitgrow.show import count

    figures.check_matplotlib()  # now, not after minutes of work
    if sizes and (largest is not None or phases is not None or quick):
        raise InputError("--size: all methods end there; leave out --largest, --phases, --quick.")
    console, place = screen(), folder / "cifar10"
    if not redraw:
        setting = scheduled(
            Setting(), paper_schedule=paper_schedule, quick=quick, epochs=epochs, phases=phases,
            largest=largest, finish=finish, max_growth=max_growth, step=step, columns=columns,
            restart=restart, growing=growing, thin=thin,
        )  # fmt: skip
        if batch is not None:
            setting = setting.in_batches(batch)
        every = study_of_ends(range(seeds)) if sizes else study(range(1 if quick else seeds))
        places = {
            folder_of(place, size): scheduled(setting, paper_schedule=False, quick=False, size=size)
            for size in sizes or ()
        }
        todo = chosen(every, arch, method)
        read(data, download=download)  # now, with a good error, and not in every process
        run_studies(
            todo, places or {place: setting}, data=data, device=device_named(device),
            workers=workers, console=console,
        )  # fmt: skip
    show(place, console)
    if quick and not redraw:
        images = f"{count(setting.epochs, 'epoch')} of {setting.images} images a phase"
        said = not_usable(images, f"{setting.tested} test images")
        console.print(said, soft_wrap=True, highlight=False)


def show(place: Path, console: Console) -> None:
    """Claims, tables and figures of all jobs that are done."""
    from splitgrow.paper import cifar10_claims, cifar10_ends
    from splitgrow.paper.job_runs import finished

    by_size = cifar10_ends.read(place)
    if by_size:
        found = cifar10_ends.claims(by_size)
        ends = cifar10_ends.joined(by_size)
        _show(found, cifar10_ends.tables, ends, place / cifar10_ends.PLACE, console)
    if not by_size or (place / "jobs").exists():
        jobs = finished(place, "cifar10")
        _show(cifar10_claims.claims(jobs), cifar10_claims.tables, jobs, place, console)


def _show(
    found: dict[str, Any],
    tables: Callable[[dict[str, Any]], list[Table]],
    jobs: Jobs,
    place: Path,
    console: Console,
) -> None:
    from splitgrow.files import write_file
    from splitgrow.paper import cifar10_figures
    from splitgrow.paper.results import rounded

    claims = rounded(found)
    for table in tables(claims):
        console.print(table)
    path = place / "claims.json"
    write_file(path, (json.dumps(claims, indent=1, allow_nan=False) + "\n").encode())
    for file in (path, *cifar10_figures.draw(jobs, place)):
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)


def depthwise(
    data: Data = DATA,
    quick: Quick = False,  # noqa: FBT002  (typer makes it a flag)
    download: Download = False,  # noqa: FBT002
    folder: Folder = FOLDER,
) -> None:
    """Where MobileNet's neuron ends: the index through the depthwise layer, and cut before it."""
    from rich.console import Console

    from splitgrow.paper import depthwise as experiment
    from splitgrow.paper import figures, results
    from splitgrow.paper.data import cifar10 as read

    figures.check_matplotlib()
    images = read(data, download=download).train
    count = 2000 if quick else 10_000
    pixels, labels = (images.images[:count].float() / 255 - 0.5) * 4, images.labels[:count]
    found = []
    for activation in experiment.ACTIVATIONS:
        setting = experiment.Setting(activation)
        run = experiment.run(setting.quick() if quick else setting, pixels, labels)
        found.append(run | {"claims": results.rounded(experiment.claims(run))})
    path = folder / "depthwise.json"
    results.save({"experiment": "depthwise", "hardware": results.hardware("cpu"), "runs": found},
                 path)  # fmt: skip
    for file in (path, *experiment.draw(found, folder)):
        Console().print(f"wrote {file}", soft_wrap=True, highlight=False)
