"""The answers to the paper's claims, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from splitgrow.paper.results import DIGITS

WHEN = {"at_once": "right after the split", "trained": "after training"}


def tables(name: str, claims: Mapping[str, Any]) -> list[Table]:
    """One table for each claim of an experiment."""
    lowest = _lowest(claims["splitting has the lowest final loss"])
    if name == "mmd":
        return [lowest, _agreement(claims)]
    return [_correlation(claims), _angle(claims), lowest, _out_of_sight(claims)]


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left")
    return table


def _lowest(found: Mapping[str, Any]) -> Table:
    seeds = found["seeds"]
    title = (
        "Claim: splitting has the lowest final loss\n"
        f"lowest of all methods on {found['lowest of all']} of {seeds} seeds"
    )
    table = _table(title, "method", "median", "quartiles", "wins, losses", "sign p", "Wilcoxon p")
    table.caption = _caption(found)
    for method, row in found["methods"].items():
        low, middle, high = row["loss"]
        against = ("", "", "")
        if "wins" in row:
            wins = f"{row['wins']}, {row['losses']}"
            against = (wins, f"{row['sign_p']:.2g}", f"{row['wilcoxon_p']:.2g}")
        table.add_row(method, f"{middle:.2g}", f"{low:.2g} to {high:.2g}", *against)
    return table


def _caption(found: Mapping[str, Any]) -> str:
    """What wins and p mean, and which methods could not grow on every seed."""
    seeds = found["seeds"]
    short = [
        f"{method} grew to the end on {row['grew to the end']} of {seeds} seeds only"
        for method, row in found["methods"].items()
        if row["grew to the end"] < seeds
    ]
    return "; ".join(["wins, losses and one-sided p of splitting against the method", *short])


def _correlation(claims: Mapping[str, Any]) -> Table:
    name = "eigenvalue and loss decrease correlate linearly"
    table = _table(f"Claim: {name}", "loss decrease", "median r", "quartiles", "r > 0.9", "r < 0")
    for when, row in claims[name].items():
        low, middle, high = row["r"] or (float("nan"),) * 3
        table.add_row(WHEN[when], f"{middle:.3f}", f"{low:.3f} to {high:.3f}",
                      f"{row['above 0.9']} of {row['seeds']}",
                      f"{row['negative']} of {row['seeds']}")  # fmt: skip
    return table


def _angle(claims: Mapping[str, Any]) -> Table:
    name = "the eigenvector's angle is the best"
    table = _table(f"Claim: {name}", "loss decrease", "best at 0°", "best within 30°")
    for when, row in claims[name].items():
        table.add_row(WHEN[when], f"{row['at 0']} of {row['seeds']}",
                      f"{row['within 30']} of {row['seeds']}")  # fmt: skip
    return table


def _out_of_sight(claims: Mapping[str, Any]) -> Table:
    title = "Why not: the share of the final error that lies where no neuron responds"
    table = _table(title, "method", "median", "quartiles", "more than half")
    for method, row in claims["why not: error where no neuron responds"].items():
        low, middle, high = row["share"]
        table.add_row(method, f"{middle:.0%}", f"{low:.0%} to {high:.0%}",
                      f"{row['most of it']} of {row['seeds']}")  # fmt: skip
    return table


def _agreement(claims: Mapping[str, Any]) -> Table:
    name = "kernel and random features give the same splitting matrix"
    table = _table(f"Claim: {name}", "features", "largest relative difference", "quartiles")
    for features, found in claims[name].items():
        if isinstance(found, float):
            table.add_row(features, f"{max(found, 10.0 ** (1 - DIGITS)):.0e} at most", "")
        else:
            low, middle, high = found
            table.add_row(features, f"{middle:.2g}", f"{low:.2g} to {high:.2g}")
    return table
