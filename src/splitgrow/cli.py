"""The command line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import splitgrow
from splitgrow.errors import SplitgrowError

app = typer.Typer(
    help="Grow neural networks by splitting neurons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs before and after the split.")] = 40,
) -> None:
    """Score and split a small CNN that was trained on handwritten digits, and show the receipt."""
    from splitgrow.demo import run

    run(seed=seed, epochs=epochs)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(splitgrow.__version__)


def main() -> None:
    """Run the command line; errors of ours are one paragraph, not a traceback."""
    try:
        app()
    except SplitgrowError as error:
        typer.secho(f"splitgrow: {error}", err=True, fg="red")
        sys.exit(1)
