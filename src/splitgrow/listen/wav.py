"""Wav files of 16-bit PCM, at any rate and with any number of channels.

Python's own ``wave`` differs between versions in what it reads, and does not say what it refuses.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from torch import Tensor

from splitgrow.errors import InputError

LARGEST = 2**28  # bytes: 23 minutes in CD quality
LOWEST_RATE, HIGHEST_RATE = 8_000, 192_000  # Hz
_KINDS = {1: "PCM", 3: "float", 6: "A-law", 7: "mu-law"}
_EXTENSIBLE = 0xFFFE  # the kind is told further down
_STREAMED = 0xFFFFFFFF  # the length was not known when the header was written


@dataclass(frozen=True, eq=False)
class Sound:
    """What is in a wav file."""

    samples: Tensor  # (samples, channels) int16
    rate: int  # samples a second


def read_sound(path: Path) -> Sound:
    """The samples of a wav file.

    Raises:
        InputError: it cannot be read, or is another kind of file.
    """
    content = _content(path)
    if not content:
        raise InputError(f"{path} is empty: it has 0 bytes. Record or copy it again.")
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise InputError(
            f"{path} is not a wav file: it does not begin with RIFF and WAVE. {_conversion(path)}"
        )
    chunks = _chunks(path, content)
    missing = [name for name in ("fmt ", "data") if name not in chunks]
    if missing or len(chunks["fmt "]) < 16:
        raise InputError(
            f"{path} is damaged: a wav file has the parts 'fmt ' and 'data', and this one lacks "
            f"{' and '.join(map(repr, missing)) or 'half of the first'}. Record or copy it again."
        )
    channels, rate = _format(path, chunks["fmt "])
    data = chunks["data"][: len(chunks["data"]) // (2 * channels) * 2 * channels]
    if not data:
        raise InputError(f"{path} is empty: it has no samples. Record it again.")
    samples = np.frombuffer(data, "<i2").astype(np.int16).reshape(-1, channels)
    return Sound(torch.from_numpy(samples), rate)


def _content(path: Path) -> bytes:
    if path.is_dir():
        raise InputError(f"{path} is a folder. Name all wav files in it: {quote(str(path))}/*.wav")
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise InputError(
                f"{path} has {size / 1e6:.0f} MB, and one second of it would be listened to. Cut "
                f"out the part that matters (at most {LARGEST / 1e6:.0f} MB)."
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}. Name a wav file that is there."
        ) from error


def _chunks(path: Path, content: bytes) -> dict[str, bytes]:
    """The parts of a file by their names, up to its samples."""
    found: dict[str, bytes] = {}
    place = 12
    while place + 8 <= len(content) and "data" not in found:
        name, size = struct.unpack_from("<4sI", content, place)
        body = content[place + 8 : place + 8 + size]
        if name == b"data" and len(body) < size != _STREAMED:
            raise InputError(
                f"{path} was cut off: it should have {size} bytes of samples, and has {len(body)}. "
                "Record or copy it again."
            )
        found.setdefault(name.decode("latin-1"), body)
        place += 8 + size + size % 2
    return found


def _format(path: Path, chunk: bytes) -> tuple[int, int]:
    """Channels and rate, if the samples are such as we read."""
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if kind == _EXTENSIBLE and len(chunk) >= 26:
        (kind,) = struct.unpack_from("<H", chunk, 24)
    if (kind, bits) != (1, 16):
        words = f"{bits}-bit {_KINDS.get(kind, f'samples of kind {kind}')}"
        raise InputError(f"{path}: expected 16-bit PCM, got {words}. {_conversion(path)}")
    if not channels or not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise InputError(
            f"{path}: expected one channel or more at {LOWEST_RATE} to {HIGHEST_RATE} Hz, got "
            f"{channels} at {rate} Hz. {_conversion(path)}"
        )
    return channels, rate


def _conversion(path: Path) -> str:
    old, new = (quote(str(each)) for each in (path, path.with_name(f"{path.stem}-16k.wav")))
    return f"Convert it: ffmpeg -i {old} -ac 1 -ar 16000 -c:a pcm_s16le {new}"
