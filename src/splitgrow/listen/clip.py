"""The second of a sound that a keyword model hears: mono, 16 kHz."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from splitgrow.errors import InputError
from splitgrow.listen.wav import read_sound
from splitgrow.paper.speech import CLIP, RATE, scaled

STEPS = 50  # places in a second where the loudest one may begin
ALIKE = 0.99  # of the energy of the loudest second: as loud

# The low-pass filter of a change of the rate: flat up to 96% of the lower Nyquist frequency, and
# from 100% on 80 dB below (Kaiser's formula for the length and beta).
CROSSINGS, CUTOFF, BETA = 128, 0.98, 7.86
_CHUNK = 1_000  # samples that are computed at once


@dataclass(frozen=True, eq=False)
class Clip:
    """One second of a file.

    Attributes:
        path: the file.
        wave: (16000,) within [-1, 1].
        seconds: the length of the whole file.
        start: where in it the second begins.
        rate: samples a second in the file, of which ``wave`` has 16,000.
    """

    path: Path
    wave: Tensor
    seconds: float
    start: float
    rate: int = RATE


def read_clips(paths: Iterable[str | Path]) -> list[Clip]:
    """The clips of some files. Every file that cannot be used is named, not just the first."""
    clips, problems = usable_clips(paths)
    if problems:
        raise InputError("\n".join(problems))
    return clips


def usable_clips(paths: Iterable[str | Path]) -> tuple[list[Clip], list[str]]:
    """The clips of those files that can be used, and what is wrong with each of the others."""
    clips, problems = [], []
    for path in paths:
        try:
            clips.append(read_clip(path))
        except InputError as error:
            problems.append(str(error))
    return clips, problems


def read_clip(path: str | Path) -> Clip:
    """One second of a wav file of 16-bit PCM.

    Channels are averaged, other rates changed to 16 kHz. Less than a second is filled up with zeros
    at the end, as in training. Of more, it is the loudest second; where several are as loud, the
    middle one of these, so that a word stands in the middle.

    Raises:
        InputError: the file cannot be used.
    """
    path = Path(path)
    sound = read_sound(path)
    mono = scaled(sound.samples).mean(1)
    start = loudest_second(mono, sound.rate)
    wave = mono[start : start + CLIP] if sound.rate == RATE else resampled(mono, sound.rate, start)
    whole = F.pad(wave, (0, CLIP - len(wave))).clamp(-1, 1)
    return Clip(path, whole, len(mono) / sound.rate, start / sound.rate, sound.rate)


def loudest_second(samples: Tensor, rate: int) -> int:
    """The sample (of (samples,)) where the second of the greatest energy begins."""
    if len(samples) <= rate:
        return 0
    energy = F.pad(samples.double().square().cumsum(0), (1, 0))  # up to each sample
    starts = torch.arange(0, len(samples) - rate + 1, max(rate // STEPS, 1))
    inside = energy[starts + rate] - energy[starts]
    loud = starts[inside >= ALIKE * inside.max()]
    return int(loud[len(loud) // 2])


def resampled(samples: Tensor, rate: int, start: int = 0) -> Tensor:
    """At most a second (16000,) of (samples,) from ``start`` on, at 16 kHz.

    y[m] = sum_k x[k] c sinc(c d) kaiser(d), d = start + m rate / 16000 - k, with c the cutoff
    frequency as a share of half the old rate, and a window of 128 zeros of the sinc to either side.
    """
    c = CUTOFF * min(1.0, RATE / rate)
    reach = ceil(CROSSINGS / c)
    count = min(CLIP, ceil((len(samples) - start) * RATE / rate))
    padded = F.pad(samples.double(), (reach, reach + 1))
    taps = torch.arange(-reach, reach + 1)
    period = RATE // gcd(RATE, rate)  # after so many, the places between old samples repeat
    repeats = period <= _CHUNK
    made: list[Tensor] = []
    weights = torch.empty(0)
    for places in torch.arange(count).split(_CHUNK // period * period if repeats else _CHUNK):
        nearest = start + places * rate // RATE
        if not made or not repeats:
            d = (places * rate % RATE).double().unsqueeze(1) / RATE - taps  # (places, taps)
            weights = c * torch.sinc(c * d) * _kaiser(d / (reach + 1))
        heard = padded[nearest.unsqueeze(1) + taps + reach]
        made.append((heard * weights[: len(places)]).sum(1))
    return torch.cat(made).float()


def _kaiser(place: Tensor) -> Tensor:
    """Kaiser's window within -1 and 1."""
    inside = (1 - place.square()).clamp_min(0).sqrt()
    return torch.special.i0(BETA * inside) / torch.special.i0(torch.tensor(BETA).double())
