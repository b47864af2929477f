"""``splitgrow paper``: the paper's experiments from the command line."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from splitgrow.paper import cifar10_cli, kws_cli
from splitgrow.paper.options import (
    DATA,
    FOLDER,
    Data,
    Device,
    Download,
    Folder,
    Quick,
    Redraw,
    Seeds,
    Workers,
    device_named,
)

if TYPE_CHECKING:
    from rich.console import Console

RunSeed = Callable[[Any, int], dict[str, Any]]

app = typer.Typer(
    help="The paper's experiments, with all their baselines and figures.",
    no_args_is_help=True,
)
app.command()(cifar10_cli.cifar10)
app.command()(cifar10_cli.depthwise)
app.command()(kws_cli.kws)


@app.command()
def rbf(
    seeds: Seeds = 20,
    workers: Workers = 2,
    quick: Quick = False,  # noqa: FBT002  (typer makes it a flag)
    redraw: Redraw = False,  # noqa: FBT002
    folder: Folder = FOLDER,
) -> None:
    """Grow an RBF net from 1 neuron to 8: Figure 1 and the appendix figure."""
    from splitgrow.paper import rbf as experiment

    _perform(experiment, "rbf", seeds, workers, folder, quick=quick, redraw=redraw)


@app.command()
def mmd(
    seeds: Seeds = 20,
    workers: Workers = 2,
    quick: Quick = False,  # noqa: FBT002  (typer makes it a flag)
    redraw: Redraw = False,  # noqa: FBT002
    folder: Folder = FOLDER,
) -> None:
    """Compress a data set into 10 points by minimizing MMD: both figures of the appendix."""
    from splitgrow.paper import mmd as experiment

    _perform(experiment, "mmd", seeds, workers, folder, quick=quick, redraw=redraw)


@app.command()
def prototypes(
    data: Data = DATA,
    seeds: Seeds = 5,
    workers: Workers = 1,
    quick: Quick = False,  # noqa: FBT002  (typer makes it a flag)
    redraw: Redraw = False,  # noqa: FBT002
    download: Download = False,  # noqa: FBT002
    device: Device = None,
    folder: Folder = FOLDER,
) -> None:
    """Grow the prototypes of an interpretable net on MNIST: Figure 2 and the appendix figure.

    In full on a GPU: minutes. On a CPU take --quick, or a night. An interrupted run goes on.
    """
    from splitgrow.paper import prototypes as experiment
    from splitgrow.paper.data import mnist

    run_seed = None
    if not redraw:
        mnist(data, download=download)  # now, with a good error, and not in every process
        place = device_named(device)
        run_seed = partial(
            experiment.run_seed, data=data, folder=folder / "prototypes", device=place
        )
    _perform(
        experiment, "prototypes", seeds, workers, folder,
        quick=quick, redraw=redraw, run_seed=run_seed, device=device,
    )  # fmt: skip


def _perform(
    experiment: ModuleType, name: str, seeds: int, workers: int, folder: Path, *,
    quick: bool, redraw: bool, run_seed: RunSeed | None = None, device: str | None = "cpu",
) -> None:  # fmt: skip
    from splitgrow.paper import figures, results, tables
    from splitgrow.paper.screen import screen

    figures.check_matplotlib()  # now, not after minutes of work
    console = screen()
    path = folder / f"{name}.json"
    if redraw:
        found = results.read(path, name)
        found["claims"] = results.rounded(experiment.claims(found))
    else:
        setting = experiment.Setting()
        found = _run(
            experiment, name, run_seed or experiment.run_seed,
            setting.quick() if quick else setting, range(1 if quick else seeds), workers, console,
        )  # fmt: skip
        found["hardware"] = results.hardware(device_named(device))
    results.save(found, path)
    for table in tables.tables(name, experiment.claims(found)):
        console.print(table)
    for file in (path, *figures.draw(name, found, folder)):
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)


def _run(
    experiment: ModuleType, name: str, run_seed: RunSeed, setting: Any, seeds: range,
    workers: int, console: Console,
) -> dict[str, Any]:  # fmt: skip
    from splitgrow.paper import results
    from splitgrow.show import count

    start = time.perf_counter()
    found = results.collect(name, run_seed, setting, seeds, workers, console)
    seconds = time.perf_counter() - start
    console.print(f"{count(len(seeds), 'seed')} in {seconds:.0f} s", highlight=False)
    return found | {"claims": results.rounded(experiment.claims(found))}
