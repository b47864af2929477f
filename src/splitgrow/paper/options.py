"""Options that several of the paper's commands have."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import typer

from splitgrow.errors import InputError

Seeds = Annotated[int, typer.Option(min=1, help="How many seeds, from 0 on.")]
Workers = Annotated[int, typer.Option(min=1, help="How many processes.")]
Quick = Annotated[bool, typer.Option("--quick", help="One seed and short phases: a taste.")]
Redraw = Annotated[bool, typer.Option("--redraw", help="Only the claims and figures anew.")]
Folder = Annotated[Path, typer.Option(help="Folder for the results and the figures.")]
Data = Annotated[Path, typer.Option(help="Folder with the data set, as torchvision has it.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch what is missing there.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU if there is one.")]
Phases = Annotated[int | None, typer.Option(min=1, help="At most so many nets in a job.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples in a step of training.")]
Finish = Annotated[
    int | None,
    typer.Option(min=1, help="Train the last net for so many more phases, in one go."),
]
Step = Annotated[
    float | None,
    typer.Option(help="How far offspring part, as a part of their length; by default searched."),
]
Columns = Annotated[
    Literal["halved", "parted"] | None,
    typer.Option(
        help="How two offspring share the weights that read their parent; by default halved.",
    ),
]
Restart = Annotated[
    float | None,
    typer.Option(help="The highest rate after a split or a cut, as a part of the first phase's."),
]
Growing = Annotated[
    Literal["constant", "cosine", "linear", "steps"] | None,
    typer.Option(
        help="The rate in the phases of growth; it falls in the last long training (--finish)."
    ),
]
MaxGrowth = Annotated[
    float | None,
    typer.Option(help="No layer grows by more than this share of itself in a phase; 1: any."),
]
Thin = Annotated[
    float | None,
    typer.Option(help="The seed has this share of the full net's channels in every layer, not 16."),
]
SHARES = {  # fields of a setting that are one, in the words of their options
    "largest": "share of the full net",
    "size": "share of the full net",
    "step": "part of a neuron's length",
    "max_growth": "share of a layer",
    "restart": "part of the highest rate",
    "thin": "share of the full net's channels",
}
FOLDER = Path("runs/paper")
DATA = Path("data")
AnySetting = TypeVar("AnySetting", bound=Any)  # of a study of jobs: has paper(), quick() and epochs


def not_usable(trained: str, judged: str) -> str:
    """What to think of the nets of a quick run."""
    return (
        f"--quick: these nets were trained for {trained} and judged by {judged}. They are not "
        "usable, and do not compare. For the study leave out --quick, and name another --folder."
    )


def device_named(wanted: str | None) -> str:
    """The device that was asked for, or the best there is."""
    import torch

    there = torch.cuda.is_available()
    if wanted not in (None, "cpu", "cuda") or (wanted == "cuda" and not there):
        raise InputError(f"--device: expected cpu{' or cuda' if there else ''}, got {wanted}.")
    return wanted or ("cuda" if there else "cpu")


def scheduled(
    setting: AnySetting, *, paper_schedule: bool, quick: bool, **given: float | str | None
) -> AnySetting:
    """A study's setting with the schedule that was asked for; ``given`` are fields of it."""
    if paper_schedule and (quick or given.get("epochs")):
        raise InputError("--paper-schedule: it sets the epochs; leave out --quick and --epochs.")
    asked = {name: value for name, value in given.items() if value is not None}
    for name, words in SHARES.items():
        if not 0 < cast("float", asked.get(name, 1)) <= 1:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: expected a {words}, in (0, 1], got {asked[name]}.")
    made = setting.paper() if paper_schedule else setting
    return replace(made.quick() if quick else made, **asked)
