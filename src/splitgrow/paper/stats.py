"""Statistics of paired results: which of two methods is lower, on the same seeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import mean, quantiles

from splitgrow.errors import InputError


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; one value is all three."""
    if not values:
        raise InputError("quartiles: expected at least one value, got none.")
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The correlation r of pairs; None for fewer than three, or where one side is constant."""
    if len(x) != len(y):
        raise InputError(f"pearson: expected as many x as y, got {len(x)} and {len(y)}.")
    if len(x) < 3:
        return None
    dx, dy = [a - mean(x) for a in x], [b - mean(y) for b in y]
    length = sqrt(sum(a * a for a in dx)) * sqrt(sum(b * b for b in dy))
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / length if length > 0 else None


def sign_test(wins: int, losses: int) -> float:
    """P(at least this many wins) if either side were as likely to win; ties do not count."""
    pairs = wins + losses
    return sum(comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs


def wilcoxon(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Exact one-sided p of the signed-rank test that ``mine`` is lower than ``theirs``.

    Pairs without a difference are dropped, tied differences share their mean rank. The
    distribution is counted, not approximated: 2 * rank is whole, ties or not.
    """
    if len(mine) != len(theirs):
        raise InputError(f"wilcoxon: expected pairs, got {len(mine)} and {len(theirs)} values.")
    differences = [b - a for a, b in zip(mine, theirs, strict=True) if a != b]
    ranks = _doubled_ranks([abs(d) for d in differences])
    reached = sum(rank for rank, d in zip(ranks, differences, strict=True) if d > 0)
    ways = [1] + [0] * sum(ranks)  # ways[s]: sets of pairs whose ranks sum to s / 2
    for rank in ranks:
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    return sum(ways[reached:]) / 2 ** len(ranks)


def _doubled_ranks(sizes: Sequence[float]) -> list[int]:
    """Twice the rank of each, the mean rank for equal ones."""
    return [sum(s < size for s in sizes) + sum(s <= size for s in sizes) + 1 for size in sizes]


def compare(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Wins, losses and both tests of "mine is lower", over the same seeds."""
    pairs = list(zip(mine, theirs, strict=True))
    wins, losses = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return {
        "wins": wins,
        "losses": losses,
        "sign_p": sign_test(wins, losses),
        "wilcoxon_p": wilcoxon(mine, theirs),
    }
