"""``splitgrow paper``: the paper's toy experiments from the command line."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="The paper's toy experiments, with all their baselines and figures.",
    no_args_is_help=True,
)

Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")]
Workers = Annotated[int, typer.Option(min=1, help="How many processes.")]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and short phases: seconds.")]
Redraw = Annotated[bool, typer.Option("--redraw", help="Only the figures, from results there.")]
Folder = Annotated[Path, typer.Option(help="Folder for the results and the figures.")]
FOLDER = Path("runs/paper")


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


def _perform(
    experiment: ModuleType, name: str, seeds: int, workers: int, folder: Path, *,
    quick: bool, redraw: bool,
) -> None:  # fmt: skip
    from rich.console import Console

    from splitgrow.paper import figures, results, tables

    figures.check_matplotlib()  # now, not after minutes of work
    console = Console()
    path = folder / f"{name}.json"
    if redraw:
        found = results.read(path, name)
    else:
        found = _run(experiment, name, 1 if quick else seeds, workers, console, quick=quick)
        results.save(found, path)
    for table in tables.tables(name, experiment.claims(found)):
        console.print(table)
    draw = figures.draw_rbf if name == "rbf" else figures.draw_mmd
    for file in (path, *draw(found, folder)):
        console.print(f"wrote {file}", soft_wrap=True, highlight=False)


def _run(
    experiment: ModuleType, name: str, seeds: int, workers: int, console: Console, *, quick: bool
) -> dict[str, Any]:
    from splitgrow.paper import results

    setting = experiment.Setting()
    setting = setting.quick() if quick else setting
    start = time.perf_counter()
    found = results.collect(name, experiment.run_seed, setting, range(seeds), workers, console)
    console.print(f"{seeds} seeds in {time.perf_counter() - start:.0f} s", highlight=False)
    return found | {"claims": results.rounded(experiment.claims(found))}
