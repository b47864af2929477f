"""Many processes: every rank has its part of the data, and all make the same split.

S, losses and numbers of samples are sums over samples, so each rank adds up its own batches and its
``Team`` all-reduces the sums. What is decided from them (how a unit is solved, which step is taken)
is decided from sums that are the same everywhere, so that all ranks take part in the same
collectives; what is left to rounding (eigenvectors) is rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from splitgrow.team import Group, Team, team_in


class Shard(Iterable[Any]):
    """The batches of this rank, where every rank has its own part of the data.

    Given as ``batches`` to ``score``, ``split`` or ``grow``, it makes them a joint matter of all
    ranks: each calls the function with its own shard, and all get the result of one process that
    is given rank 0's batches, then rank 1's, and so on. Shards may differ in length. Without
    ``torch.distributed``, or with one process, it is the batches themselves.

    Args:
        batches: a list or a loader, as for ``score``; with a ``DistributedSampler``, say. (One
            without ``drop_last`` repeats a few samples, and so they count twice.)
        group: the processes that work together; all of them by default.
    """

    def __init__(self, batches: Iterable[Any], *, group: Group | None = None) -> None:
        self.batches = batches
        self.group = group

    @classmethod
    def of(cls, batches: Iterable[Any], *, group: Group | None = None) -> Shard:
        """This rank's part of batches that every rank has: each n-th of them on n ranks."""
        return cls(_Every(batches, group), group=group)

    @property
    def team(self) -> Team:
        """The ranks that work together."""
        return team_in(self.group)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@dataclass(frozen=True)
class _Every(Iterable[Any]):
    """Each n-th of some batches, counted from the rank's own number."""

    batches: Iterable[Any]
    group: Group | None

    def __iter__(self) -> Iterator[Any]:
        team = team_in(self.group)
        return islice(self.batches, team.rank, None, team.size)


@dataclass(frozen=True)
class _First(Iterable[Any]):
    """The first so many of some batches."""

    batches: Iterable[Any]
    count: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batches, self.count)


def first_of(batches: Iterable[Any], count: int) -> Iterable[Any]:
    """The first so many of this rank's batches; of a shard, a shard."""
    if isinstance(batches, Shard):
        return Shard(_First(batches.batches, count), group=batches.group)
    return _First(batches, count)


def length_of(batches: Iterable[Any]) -> int | None:
    """How many batches this rank has; None where only reading them would tell."""
    if isinstance(batches, Shard):
        return length_of(batches.batches)
    if isinstance(batches, _Every):
        whole, team = length_of(batches.batches), team_in(batches.group)
        return None if whole is None else max(-(-(whole - team.rank) // team.size), 0)
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:  # also of a DataLoader whose data set has no length
        return None


def source_of(batches: Iterable[Any]) -> Iterable[Any]:
    """What the user gave: the list or loader inside of a shard or a part."""
    while isinstance(batches, Shard | _Every | _First):
        batches = batches.batches
    return batches


def team_of(batches: Any) -> Team:
    """The ranks that share these batches: this process alone, unless they are a shard."""
    return batches.team if isinstance(batches, Shard) else Team()
