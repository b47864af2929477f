"""Keep: what one pass over the batches says about as many units as the memory holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import torch

from splitgrow.tap import Evidence, Source
from splitgrow.team import Team
from splitgrow.units import Unit

# Activations of several batches may be kept up to this many bytes, however small one batch is; on
# a GPU, where another pass over the batches costs more than room does, this share of what is free.
KEEP_AT_LEAST = 256 * 2**20
GPU_SHARE = 1 / 16


@dataclass(frozen=True)
class Kept:
    """The evidence of the first units that were waiting, the mean loss, the number of samples."""

    evidence: dict[str, list[Evidence]]
    loss: float
    samples: int


def keep(
    source: Source,
    waiting: Sequence[Unit],
    memory: int | None,
    team: Team,
    *,
    too_many: Callable[[float], bool],
) -> Kept | None:
    """One pass over the batches; all ranks keep the same units.

    Args:
        source: what to pass over.
        waiting: the units to keep, as many of the first ones as there is room for.
        memory: bytes of activations; None: as much as one batch needs, or what is little anyway.
        team: the ranks that share the data.
        too_many: asked with the number of such passes that all waiting units take for the samples
            so far. Where it says so on any rank, nothing is kept, and None returned.
    """
    shelf = _Shelf(waiting, memory)
    total, samples, crowded = 0.0, 0, False
    with closing(source.collect(shelf.active)) as passing:
        for loss, count, evidence in passing:
            total, samples = total + loss * count, samples + count
            shelf.put(evidence, count)
            del evidence
            crowded = too_many(shelf.share * samples)
            if crowded:
                break
            shelf.clear()
    if team.any(crowded, "room for the batches"):
        return None
    shelf.clear(to=team.least(len(shelf.active), "units in a pass"))
    samples = team.sum(samples, "the number of samples")
    return Kept(shelf.kept, team.sum(total, "the loss") / samples, samples)


class _Shelf:
    """The evidence of units, whose last ones are dropped where there is no room.

    Attributes:
        active: the units that are still kept; never none.
        share: of the room, which one sample takes of all units together.
    """

    def __init__(self, waiting: Sequence[Unit], memory: int | None) -> None:
        self.active = list(waiting)
        self.kept: dict[str, list[Evidence]] = {unit.name: [] for unit in waiting}
        self.share = 0.0
        self._limit = memory
        # Neighbours share the activations between them: each is counted with the first of them.
        self._bytes = dict.fromkeys(self.kept, 0)

    def put(self, evidence: Mapping[str, list[Evidence]], samples: int) -> None:
        """One batch more."""
        seen: set[int] = set()
        for unit in self.active:
            self.kept[unit.name] += evidence[unit.name]
            for tensor in chain.from_iterable(e.tensors() for e in evidence[unit.name]):
                if tensor.data_ptr() not in seen:
                    seen.add(tensor.data_ptr())
                    self._bytes[unit.name] += tensor.numel() * tensor.element_size()
        if self._limit is None:
            self._limit = max(self._held, _spare(self.kept))
        self.share = self.share or self._held / samples / max(self._limit, 1)

    def clear(self, to: int | None = None) -> None:
        """Drop the last units until what is left fits, or down to so many."""
        assert self._limit is not None
        while len(self.active) > 1 and self._held > self._limit:
            self._drop()
        while to is not None and len(self.active) > to:
            self._drop()

    @property
    def _held(self) -> int:
        return sum(self._bytes.values())

    def _drop(self) -> None:
        name = self.active.pop().name
        del self.kept[name], self._bytes[name]


def _spare(kept: Mapping[str, list[Evidence]]) -> int:
    """Bytes that activations may take in any case, where they are."""
    places = {t.device for e in chain(*kept.values()) for t in e.tensors()}
    share = [
        int(GPU_SHARE * torch.cuda.mem_get_info(place)[0])
        for place in places
        if place.type == "cuda"
    ]
    return max([KEEP_AT_LEAST, *share])
