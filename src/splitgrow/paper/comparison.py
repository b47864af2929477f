"""A study's methods compared at equal size: on a grid of sizes, and by targets to be met there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitgrow.paper.curves import (
    Cell,
    Curve,
    Group,
    Members,
    cell,
    difference,
    name_of,
    seeds_at,
)


@dataclass(frozen=True)
class Target:
    """``mine`` is to be above ``theirs`` by ``margin`` at every size of a grid up to ``limit``.

    A margin of 0 means above, or where ``ties`` is set, not below. Sizes below ``start`` are not
    asked for: there ``theirs`` has no nets on purpose.
    """

    axis: str
    mine: str
    theirs: str
    margin: float = 0.0
    limit: float = 0.3
    ties: bool = False
    start: float = 0.0

    def is_met(self, difference: float) -> bool:
        """At one size."""
        if self.margin > 0 or self.ties:
            return difference >= self.margin
        return difference > 0

    def words(self, sizes: str) -> str:
        """What is to be shown, at sizes in words."""
        by = f" by {100 * self.margin:g} % points" if self.margin else ""
        above = "not below" if self.ties else "above"
        return f"{self.mine} {above} {self.theirs}{by}, {sizes}"


@dataclass(frozen=True)
class Comparison:
    """How a study compares its methods.

    Args:
        grid: by axis, the sizes at which it does.
        curve: of a job on an axis, the sizes being in the units of the grid.
    """

    grid: Mapping[str, Sequence[float]]
    curve: Callable[[Mapping[str, Any], str], Curve]

    def curves(self, members: Members, axis: str) -> dict[str, dict[int, Curve]]:
        """By method and seed."""
        return {
            method: {seed: self.curve(job, axis) for seed, job in seeds.items()}
            for method, seeds in members.items()
        }

    def seeds(self, members: Members, axis: str) -> dict[str, list[dict[int, float]]]:
        """By method, for each size of the grid: the accuracies of the seeds that reach it."""
        return {
            method: [seeds_at(of_seed, size) for size in self.grid[axis]]
            for method, of_seed in self.curves(members, axis).items()
        }

    def accuracies(self, members: Members) -> dict[str, dict[str, list[Cell | None]]]:
        """By axis, every method at every size."""
        at = {axis: self.seeds(members, axis) for axis in self.grid}
        return {
            axis: {method: list(map(cell, row)) for method, row in rows.items()}
            for axis, rows in at.items()
        }

    def answers(
        self, targets: Iterable[Target], groups: Mapping[Group, Members]
    ) -> list[dict[str, Any]]:
        """Group by group, the targets whose two methods are both there."""
        return [
            {"group": name_of(key), "target": str(target), **self._answer(target, members)}
            for key, members in groups.items()
            for target in targets
            if target.mine in members and target.theirs in members
        ]

    def _answer(self, target: Target, members: Members) -> dict[str, Any]:
        found = self.curves(members, target.axis)
        grid = self.grid[target.axis]
        return answered(target, grid, found[target.mine], found[target.theirs])


def answered(
    target: Target, grid: Iterable[float], mine: Mapping[int, Curve], theirs: Mapping[int, Curve]
) -> dict[str, Any]:
    """Met, missed, or open: nothing failed, but some sizes from the seed on lack a net."""
    first = max(target.start, min(sizes[0] for sizes, _ in mine.values()))
    judged, missing = [], []
    for size in (size for size in grid if first <= size <= target.limit):
        found = difference(seeds_at(mine, size), seeds_at(theirs, size))
        if found is None:
            missing.append(size)
        else:
            judged.append({"size": size, **found, "met": target.is_met(found["mean"])})
    return {
        "axis": target.axis, "mine": target.mine, "theirs": target.theirs,
        "margin": target.margin, "verdict": _verdict(judged, missing),
        "least": min(judged, key=lambda each: each["mean"], default=None), "sizes": judged,
        "sizes without data": missing,
    }  # fmt: skip


def _verdict(judged: Sequence[Cell], missing: Sequence[float]) -> str:
    if not all(each["met"] for each in judged):
        return "missed"
    return "met" if judged and not missing else "open"
