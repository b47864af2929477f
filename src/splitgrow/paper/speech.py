"""From one second of speech to what a keyword network reads, and random changes on the way.

The front end of Zhang et al. 2017 ("Hello Edge") in two modules, whole batches at a time:
``LogMel`` turns waveforms into 49 x 40 decibels, ``Mfcc`` these into 49 x 10 normalised numbers.
Both can be exported, apart or in a row. Decibels are kept as bytes ("codes"), 0.5 dB a step.

Every change of a batch comes twice: for decibels, where nothing else is there, and for waveforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, pi

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from splitgrow.errors import InputError

RATE = 16_000  # samples a second
CLIP = 16_000  # samples of a clip; longer ones are cut, shorter ones filled up with zeros
WINDOW, HOP = 640, 320  # samples: 40 ms, every 20 ms
FRAMES = (CLIP - WINDOW) // HOP + 1  # 49: no frame reaches over an end
FFT = 1024
BANDS, LOWEST, HIGHEST = 40, 20.0, 7_600.0  # Hz
FLOOR = 1e-8  # the power below which nothing is heard: -80 dB
COEFFICIENTS = 10
STEP, BOTTOM = 0.5, -80.0  # dB: of a code, and at code 0

# What the codes of a waveform depend on. A change of the arithmetic raises the version.
SETTINGS = {
    "version": 1,
    "rate": RATE,
    "clip": CLIP,
    "window": ["hann, periodic", WINDOW, HOP],
    "fft": FFT,
    "bands": ["htk, triangles in Hz", BANDS, LOWEST, HIGHEST],
    "codes": [FLOOR, STEP, BOTTOM],
}

_CHUNK = 4_096  # clips whose coefficients are in memory at once


# --- the front end ------------------------------------------------------------------------


class LogMel(nn.Module):
    """Waveforms (B, samples) within [-1, 1] to decibels (B, 49, 40).

    dB = 10 log10( sum_k M[k, band] |rfft_1024(w * frame)[k]|^2 + 1e-8 ), with w = the periodic Hann
    window and M of ``mel_bands``.

    A Fourier transform, not a product with its matrix: that would be slower, and in TF32 (which a
    user may ask of all products) drown quiet bands beside loud ones. Autocast has no effect here.
    """

    window: Tensor  # (640,)
    bands: Tensor  # (513, 40)
    floor: Tensor  # (1,), no plain number: exporters take a small one that is added for zero

    def __init__(self) -> None:
        super().__init__()
        window = torch.hann_window(WINDOW, periodic=True, dtype=torch.float64)
        self.register_buffer("window", window.float(), persistent=False)
        self.register_buffer("bands", mel_bands().float(), persistent=False)
        self.register_buffer("floor", torch.tensor([FLOOR]), persistent=False)

    def forward(self, waves: Tensor) -> Tensor:
        """(B, samples) to (B, 49, 40)."""
        if waves.dim() != 2 or not waves.is_floating_point():
            raise InputError(
                f"LogMel: expected floating-point waveforms (clips, samples) within [-1, 1], got "
                f"{waves.dtype} of shape {tuple(waves.shape)}. Use scaled(samples) on 16-bit ones."
            )
        return _without_autocast(self._decibels, waves)

    def _decibels(self, waves: Tensor) -> Tensor:
        whole = F.pad(waves, (0, CLIP))[:, :CLIP]
        # Two hops are a window: each frame is a hop and the next one.
        hops = whole.reshape(-1, CLIP // HOP, HOP)  # (B, 50, 320)
        frames = torch.cat([hops[:, :-1], hops[:, 1:]], 2) * self.window  # (B, 49, 640)
        spectrum = torch.view_as_real(torch.fft.rfft(frames, FFT))  # (B, 49, 513, 2)
        power = spectrum.square().sum(-1) @ self.bands  # (B, 49, 40)
        return 10 * torch.log10(power + self.floor)


class Mfcc(nn.Module):
    """Decibels (B, 49, 40) to the network's input (B, 1, 49, 10).

    (c - mean) / std of each of the 10 coefficients c of ``cosines``. Make one with ``fit_mfcc``;
    without mean and deviation, the coefficients come as they are.
    """

    cosines: Tensor  # (40, 10)
    mean: Tensor  # (10,)
    std: Tensor  # (10,)

    def __init__(self, mean: Tensor | None = None, std: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("cosines", cosines().float(), persistent=False)
        self.register_buffer("mean", torch.zeros(COEFFICIENTS) if mean is None else mean.float())
        self.register_buffer("std", torch.ones(COEFFICIENTS) if std is None else std.float())

    def forward(self, features: Tensor) -> Tensor:
        """(B, 49, 40) to (B, 1, 49, 10)."""
        return _without_autocast(self._coefficients, features).unsqueeze(1)

    def _coefficients(self, features: Tensor) -> Tensor:
        return (features @ self.cosines - self.mean) / self.std


def _without_autocast(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Half precision has too little range for powers, and too few digits for decibels."""
    device = values.device.type
    if not torch.is_autocast_enabled(device):  # so that an exported graph has no trace of this
        return function(values)
    with torch.autocast(device, enabled=False):
        return function(values)


def fit_mfcc(codes: Tensor) -> Mfcc:
    """``Mfcc`` with mean and deviation over all frames of the clips (N, 49, 40) to learn from."""
    if not codes.numel():
        raise InputError("fit_mfcc: expected codes of clips to learn from, got none.")
    plain = Mfcc().to(codes.device)
    total = torch.zeros(2, COEFFICIENTS, dtype=torch.float64)
    for chunk in codes.split(_CHUNK):
        # in float64 on the CPU: a difference of large sums, on devices that may have no float64
        values = plain(decibels(chunk)).flatten(0, 2).cpu().double()  # (frames, 10)
        total += torch.stack([values.sum(0), values.square().sum(0)])
    mean, square = total / (codes.shape[0] * codes.shape[1])
    variance = square - mean.square()
    # A coefficient that never changes says nothing, whatever it is divided by.
    std = torch.where(variance > 1e-6, variance.clamp_min(1e-6).sqrt(), 1.0)
    return Mfcc(mean, std).to(codes.device)


def mel_bands() -> Tensor:  # (513, 40) float64
    """How much of each frequency's power goes to each band: triangles, linear in Hz, of height 1.

    Their 42 corners are evenly spaced in HTK's mel(f) = 2595 log10(1 + f / 700), 20 to 7600 Hz.
    """
    low, high = 2595 * torch.log10(1 + torch.tensor([LOWEST, HIGHEST]).double() / 700)
    mels = low + (high - low) * torch.arange(BANDS + 2, dtype=torch.float64) / (BANDS + 1)
    corners = 700 * (10 ** (mels / 2595) - 1)
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    hertz = torch.arange(FFT // 2 + 1, dtype=torch.float64).unsqueeze(1) * (RATE / FFT)
    up, down = (hertz - left) / (middle - left), (right - hertz) / (right - middle)
    return torch.minimum(up, down).clamp_min(0)


def cosines() -> Tensor:  # (40, 10) float64
    """The first 10 columns of the orthonormal DCT-II.

    C[b, k] = sqrt((1 if k = 0 else 2) / 40) cos( pi k (b + 1/2) / 40 )
    """
    band = torch.arange(BANDS, dtype=torch.float64).unsqueeze(1)
    k = torch.arange(COEFFICIENTS, dtype=torch.float64)
    size = (torch.where(k == 0, 1.0, 2.0) / BANDS).sqrt()
    return size * torch.cos(pi * k * (band + 0.5) / BANDS)


# --- numbers as they are stored -----------------------------------------------------------


def scaled(samples: Tensor) -> Tensor:
    """16-bit samples as numbers within [-1, 1): divided by 32768."""
    if samples.dtype != torch.int16:
        raise InputError(f"scaled: expected 16-bit samples (torch.int16), got {samples.dtype}.")
    return samples.float() / 32768


def encode(features: Tensor) -> Tensor:
    """Decibels as bytes: round((dB + 80) / 0.5), from -80 to 47.5 dB; what is louder is cut."""
    return ((features - BOTTOM) / STEP).round().clamp(0, 255).to(torch.uint8)


def decibels(codes: Tensor) -> Tensor:
    """Bytes as decibels: 0.5 code - 80."""
    if codes.dtype != torch.uint8:
        raise InputError(f"decibels: expected codes (torch.uint8), got {codes.dtype}.")
    return codes.float() * STEP + BOTTOM


# --- random changes of decibels -----------------------------------------------------------


def shift_frames(features: Tensor, most: int = 5, *, generator: Generator | None = None) -> Tensor:
    """Each clip (B, 49, 40) moved by up to ``most`` frames of 20 ms, either way.

    The frames that come in are copies of the clip's quietest one. Codes can be moved as well.
    """
    count, frames, _ = features.shape
    device = features.device
    later = torch.randint(-most, most + 1, (count, 1), device=device, generator=generator)
    source = torch.arange(frames, device=device) - later  # (B, 49)
    quietest = features.sum(2).argmin(1, keepdim=True)  # (B, 1)
    source = torch.where((source >= 0) & (source < frames), source, quietest)
    return features[torch.arange(count, device=device).unsqueeze(1), source]


def mix_features(
    features: Tensor,  # (B, 49, 40) dB
    noise: Tensor,  # (M, 49, 40) dB, of silence
    *,
    chance: float = 0.8,
    volume: float = 0.1,
    generator: Generator | None = None,
) -> Tensor:
    """Each clip with one of the noises, at a random level, or (1 - ``chance``) without.

    dB = 10 log10(P + v^2 Q + 1e-8), with v uniform in [0, ``volume``], P and Q the powers of the
    clip and the noise: 10^(dB/10) - 1e-8. What waveforms would give, but for their cross term,
    which is zero on average.
    """
    count, device = len(features), features.device
    which = torch.randint(len(noise), (count,), device=device, generator=generator)
    v = _levels(count, chance, volume, device, generator).view(-1, 1, 1)
    power = _power(features) + v.square() * _power(noise[which])
    return 10 * torch.log10(power + FLOOR)


def _power(features: Tensor) -> Tensor:
    return (torch.exp(features * (log(10) / 10)) - FLOOR).clamp_min(0)  # 10 ** is far slower


def _levels(
    count: int, chance: float, volume: float, device: torch.device, generator: Generator | None
) -> Tensor:
    """(count,) what noise is multiplied by: with ``chance`` up to ``volume``, else 0."""
    level, mixed = torch.rand(2, count, device=device, generator=generator)
    return level * volume * (mixed < chance)


# --- random changes of waveforms ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recordings:
    """Long recordings of noise, one after another in memory; each has a clip's length or more."""

    samples: Tensor  # (all samples,) int16
    starts: Tensor  # (R,) int64
    lengths: Tensor  # (R,) int64

    def to(self, device: torch.device | str) -> Recordings:
        """The same on a device."""
        return Recordings(self.samples.to(device), self.starts.to(device), self.lengths.to(device))

    def crops(self, count: int, *, generator: Generator | None = None) -> Tensor:
        """(count, 16000) int16: from any of the recordings, from anywhere in it."""
        device = self.samples.device
        which = torch.randint(len(self.starts), (count,), device=device, generator=generator)
        last = self.lengths[which] - CLIP
        place = torch.rand(count, device=device, generator=generator) * (last + 1)
        first = self.starts[which] + place.long().minimum(last)  # rounded up, it may be too much
        return self.samples[first.unsqueeze(1) + torch.arange(CLIP, device=device)]


def recordings(pieces: Sequence[Tensor]) -> Recordings:
    """Recordings of some (samples,) int16, of a second or more each."""
    short = [str(len(piece)) for piece in pieces if len(piece) < CLIP]
    if short or not pieces:
        found = f"some of {', '.join(short)}" if short else "none"
        raise InputError(f"recordings: expected noise of {CLIP} samples or more, got {found}.")
    lengths = torch.tensor([len(piece) for piece in pieces])
    return Recordings(torch.cat(list(pieces)), lengths.cumsum(0) - lengths, lengths)


def shift_waves(waves: Tensor, most: int = 1_600, *, generator: Generator | None = None) -> Tensor:
    """Each clip (B, samples) moved by up to ``most`` samples (100 ms), either way, over zeros."""
    count, length = waves.shape
    device = waves.device
    later = torch.randint(-most, most + 1, (count, 1), device=device, generator=generator)
    source = torch.arange(length, device=device) - later + most  # (B, samples)
    return F.pad(waves, (most, most)).gather(1, source)


def mix_waves(
    waves: Tensor,  # (B, 16000) within [-1, 1]
    noise: Recordings,
    *,
    chance: float = 0.8,
    volume: float = 0.1,
    generator: Generator | None = None,
) -> Tensor:
    """Each clip with noise from anywhere at a random level, or (1 - ``chance``) without.

    waves + v noise within [-1, 1], with v uniform in [0, ``volume``].
    """
    count = len(waves)
    v = _levels(count, chance, volume, waves.device, generator).unsqueeze(1)
    return (waves + v * scaled(noise.crops(count, generator=generator))).clamp(-1, 1)
