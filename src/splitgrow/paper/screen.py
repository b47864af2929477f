"""Where the tables of the studies are printed."""

from __future__ import annotations

from rich.console import Console

WIDE = 240  # characters: more than any table has


def screen() -> Console:
    """The terminal; a pipe or a file has no width that tables would have to fit into."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    return console
