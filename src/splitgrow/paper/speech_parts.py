"""Speech Commands as 12 classes: clips in three parts, and the shares of silence and unknown."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from splitgrow.paper.speech import Recordings

SILENCE, UNKNOWN = 0, 1
KEYWORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
CLASSES = ("_silence_", "_unknown_", *KEYWORDS)  # a label is a place in here
SHARE = 10  # percent of the number of keyword clips: so many of silence, as many of unknown words


class Part(StrEnum):
    """What clips are used for."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


@dataclass(frozen=True, eq=False)
class SpeechPart:
    """Clips of one second and what is said in them."""

    codes: Tensor  # (N, 49, 40) uint8: decibels(codes)
    labels: Tensor  # (N,) int64, places in CLASSES
    waves: Tensor | None = None  # (N, 16000) int16, where they were read: scaled(waves)

    def rows(self, chosen: Tensor) -> SpeechPart:
        """Some of the clips."""
        waves = None if self.waves is None else self.waves[chosen]
        return SpeechPart(self.codes[chosen], self.labels[chosen], waves)


@dataclass(frozen=True, eq=False)
class SpeechData:
    """The clips to learn from, to choose by, and to test on; no speaker is in two of these."""

    train: SpeechPart
    val: SpeechPart
    test: SpeechPart
    noise: Recordings | None = None  # for waveforms, where they were read

    @property
    def silence(self) -> Tensor:
        """(M, 49, 40) codes: the silence to learn from, which is the noise to mix with features."""
        return self.train.codes[self.train.labels == SILENCE]


def digest(data: SpeechData) -> str:
    """Eight letters that tell data sets apart: by their clips, and whether there are waveforms."""
    found = hashlib.sha256(b"features" if data.noise is None else b"waveforms")
    for part in (data.train, data.val, data.test):
        for values in (part.codes, part.labels):
            found.update(values.contiguous().numpy().data)
    return found.hexdigest()[:8]


def row_weights(labels: Tensor, share: float = 0.08) -> Tensor:
    """(N,) the chance of each clip to be drawn, with ``share`` for silence and for unknown each.

    Draw with ``torch.multinomial(weights, count, replacement=True)``.
    """
    kind = labels.clamp_max(2)  # silence, unknown, any keyword
    sizes = torch.bincount(kind, minlength=3)
    shares = torch.tensor([share, share, 1 - 2 * share], device=labels.device)
    return (shares / sizes.clamp_min(1))[kind]


def official_shares(part: SpeechPart) -> SpeechPart:
    """All keywords, and silence and unknown words for at most 10% of their number each.

    The packed part to choose by has four times as many unknown words as the one to test on, so
    that their accuracies say different things. The clips that stay are spread evenly.
    """
    most = share_of(int((part.labels > UNKNOWN).sum()))
    kept = [_spread((part.labels == label).nonzero().flatten(), most) for label in (0, 1)]
    words = (part.labels > UNKNOWN).nonzero().flatten()
    return part.rows(torch.cat([words, *kept]).sort().values)


def _spread(rows: Tensor, most: int) -> Tensor:
    count = min(most, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]


def share_of(keywords: int) -> int:
    """How many clips of silence, and of unknown words, go with so many of keywords."""
    return -(-keywords * SHARE // 100)  # rounded up
