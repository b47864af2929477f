"""The answers to the paper's claims, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from splitgrow.paper.results import DIGITS
from splitgrow.show import count

MEASURES = {"picture": "its picture", "images": "its images"}
WHEN = {"at_once": "right after the split", "trained": "after training"}


def tables(name: str, claims: Mapping[str, Any]) -> list[Table]:
    """One table for each claim of an experiment."""
    lowest = _lowest(claims["splitting has the lowest final loss"])
    if name == "mmd":
        return [lowest, _agreement(claims)]
    if name == "prototypes":
        return [lowest, _quality(claims), _ambiguous(claims), _fifth(claims), _stable(claims)]
    return [_correlation(claims), _angle(claims), lowest, _out_of_sight(claims)]


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", overflow="fold")
    return table


def _lowest(found: Mapping[str, Any]) -> Table:
    seeds = count(found["seeds"], "seed")
    title = (
        "Claim: splitting has the lowest final loss\n"
        f"lowest of all methods on {found['lowest of all']} of {seeds}"
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
    seeds = count(found["seeds"], "seed")
    short = [
        f"{method} grew to the end on {row['grew to the end']} of {seeds} only"
        for method, row in found["methods"].items()
        if row["grew to the end"] < found["seeds"]
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


def _quality(claims: Mapping[str, Any]) -> Table:
    found = claims["splitting has the lowest final loss"]["methods"]
    table = _table("At the end, on the test images (median)", "method", "accuracy", "squared error")
    for method, row in found.items():
        table.add_row(method, f"{row['accuracy'][1]:.2%}", f"{row['reconstruction'][1]:.2f}")
    return table


def _ambiguous(claims: Mapping[str, Any]) -> Table:
    name = "the least interpretable prototypes are split first"
    table = _table(f"Claim: {name}", "ambiguity of", "method", "splits", "standing", "p")
    table.caption = "standing of the one that is split: 1 the most ambiguous, 0 the least"
    for measure, methods in claims[name].items():
        for method, row in methods.items():
            found = (f"{row['standing']:.2f}", f"{row['p']:.2g}") if row["splits"] else ("", "")
            table.add_row(MEASURES[measure], method, str(row["splits"]), *found)
    return table


def _fifth(claims: Mapping[str, Any]) -> Table:
    name = "eigenvalue and loss decrease correlate"
    table = _table(f"Claim: {name}", "matrix of", "median r", "quartiles", "r > 0",
                   "lowest index is the best split")  # fmt: skip
    for matrix, row in claims[name].items():
        low, middle, high = row["r"] or (float("nan"),) * 3
        best = row["the lowest index is the best split"]
        table.add_row(matrix, f"{middle:.2f}", f"{low:.2f} to {high:.2f}",
                      f"{row['positive']} of {row['seeds']}",
                      f"{best} of {row['seeds']}")  # fmt: skip
    return table


def _stable(claims: Mapping[str, Any]) -> Table:
    name = "prototypes that are stable by the classification matrix"
    table = _table("Nets that the classification matrix alone would not split", "prototypes",
                   "nets")  # fmt: skip
    for prototypes, row in claims[name].items():
        table.add_row(prototypes, f"{row['stable']} of {row['nets']}")
    return table
