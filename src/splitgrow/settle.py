"""Settle: how many samples are enough to say which neurons to split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

from splitgrow.directions import Directions
from splitgrow.distributed import first_of, length_of, team_of
from splitgrow.errors import InputError
from splitgrow.scores import Rank, Scores
from splitgrow.select import Caps, check_selection, is_number, part_of
from splitgrow.view import passes

ScoreOn = Callable[[Iterable[Any], Directions | None], Scores]  # on some batches, from a start
FIRST = 1 / 8  # of the batches, to begin with ...
FEWEST = 8  # ... but no fewer than these: a standard error of fewer groups says little


@dataclass(frozen=True)
class Settle:
    """Score no more of the batches than it takes to know which neurons to split.

    Batches are taken in the order in which they come, which should be random: an eighth of them
    first, then as many more as the standard errors say are needed. Several processes each begin
    with the first of their own.

    Args:
        overlap: of the neurons that are chosen, the share that all the batches would choose too,
            as far as the standard errors tell.
        fraction: of all neurons, how many are chosen.
        count: how many are chosen. Give this or ``fraction``.
        rank: what they are chosen by, as in :func:`splitgrow.select`.
    """

    overlap: float = 0.9
    fraction: float | None = None
    count: int | None = None
    rank: Rank = "lambda"

    def __post_init__(self) -> None:
        if not is_share(self.overlap):
            raise InputError(f"overlap: expected a share in (0, 1), got {self.overlap!r}.")
        if self.fraction is None and self.count is None:
            raise InputError("settle: give fraction= or count=, how many neurons are chosen.")
        check_selection(self.rank, None, self.fraction, self.count, 0.0, Caps())

    def how_many(self, scores: Scores) -> int:
        """Of these neurons."""
        if self.count is not None:
            return self.count
        assert self.fraction is not None
        return part_of(scores.neurons, self.fraction)

    def expected(self, scores: Scores, share: float, more: float = 1.0) -> float:
        """The overlap with the choice of all batches, of which ``share`` have been scored.

        It is that of ``more`` times as many, if more than 1. A sample of a finite set differs from
        it less than from the endless one that standard errors are about: by sqrt(1 - share).
        """
        share = min(share * more, 1.0)
        shrink = ((1 - share) / more) ** 0.5
        return scores.overlap(self.how_many(scores), self.rank, shrink=shrink)


def is_share(value: Any) -> bool:
    """A number between 0 and 1, neither of them?"""
    return is_number(value) and 0 < value < 1


def settled(
    score: ScoreOn, batches: Iterable[Any], to: Settle, start: Directions | None = None
) -> Scores:
    """What ``score`` says of as many of the batches as are needed; the same on all ranks.

    Each portion starts with the vectors of the one before.
    """
    own = length_of(batches)
    if own is None:
        own = sum(1 for _ in passes(batches))
    team = team_of(batches)
    total = max(team.sum(own, "the number of batches"), 1)  # of none at all, score tells
    share = min(max(FIRST, FEWEST / total), 1.0)
    while True:
        taken = ceil(share * own)
        share = team.sum(taken, "the batches to score") / total
        scores = score(first_of(batches, taken), start)
        if share >= 1 or to.expected(scores, share) >= to.overlap:
            return scores
        start = scores.directions
        enough = (m for m in (2.0, 4.0) if to.expected(scores, share, m) >= to.overlap)
        share = min(share * next(enough, 8.0), 1.0)
