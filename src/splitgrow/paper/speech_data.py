"""Read Speech Commands: its packed features, or those of a user's own wav files.

Both give the same type. The features of wav files can be kept in a cache.
"""

from __future__ import annotations

import hashlib
import json
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from splitgrow.errors import InputError
from splitgrow.paper.speech import (
    CLIP,
    RATE,
    SETTINGS,
    LogMel,
    Recordings,
    encode,
    recordings,
    scaled,
)
from splitgrow.paper.speech_folder import NAMED, Selection, WavFile, select
from splitgrow.paper.speech_packed import (
    make_folder,
    packed_path,
    read_cache,
    read_packed,
    write_cache,
)
from splitgrow.paper.speech_parts import CLASSES, SHARE, SILENCE, Part, SpeechData, SpeechPart

_CHUNK = 256  # clips that are turned into features at once
_SEED = 59185  # of the crops of silence


def speech_commands(folder: Path, *, cache: Path | None = None) -> SpeechData:
    """The packed features of a folder if they are there, else its wav files."""
    return read_packed(folder) if packed_path(folder) else read_waves(folder, cache=cache)


def read_clips(folder: Path, *, cache: Path | None = None) -> SpeechData:
    """Features of the wav files of Speech Commands, v0.01 or v0.02.

    Args:
        folder: Has ``<word>/<speaker>_nohash_<n>.wav`` and ``_background_noise_/*.wav``: 16-bit
            mono of 16 kHz. ``validation_list.txt`` and ``testing_list.txt`` say which clip is for
            what; without these the official rule does, by the speaker's name.
        cache: A folder for the features of all clips, in ``<folder's name>-logmel.npz``. What
            belongs to other files or an other front end is made anew.

    Raises:
        InputError: what is in the folder is not enough, or a file is not as it should be; the
            cache cannot be written.
    """
    selection = select(folder)
    if cache is None:
        return _features(selection)
    path, key = cache / f"{folder.resolve().name}-logmel.npz", _key(selection)
    found = read_cache(path, key)
    if found is None:
        make_folder(cache)  # before the work, so that a wrong one is known early
        found = _features(selection)
        write_cache(path, key, found)
    return found


def _key(selection: Selection) -> str:
    """What the features depend on, as a sha256: the files, their parts, and the front end."""
    clips = {
        part: [(file.name, file.size, file.changed) for file in files]
        for part, files in selection.clips.items()
    }
    noise = [(file.name, file.size, file.changed) for file in selection.noise]
    contents = [SETTINGS, CLASSES, SHARE, _SEED, clips, noise]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def read_waves(folder: Path, *, cache: Path | None = None) -> SpeechData:
    """The same clips as ``read_clips``, with their waveforms: 32 kB each, in memory."""
    features = read_clips(folder, cache=cache)
    waves, noise = _read(select(folder), _joined)
    return _data(lambda part: replace(getattr(features, part), waves=waves[part]), noise)


# --- the clips themselves -----------------------------------------------------------------

_OfChunks = Callable[[Iterator[Tensor]], Tensor]


def _read(selection: Selection, make: _OfChunks) -> tuple[dict[Part, Tensor], Recordings]:
    """What is made of the clips of each part, and the noise.

    Every file that cannot be used is named, not just the first.
    """
    problems: list[str] = []
    pieces = [_samples(selection.folder, file, problems) for file in selection.noise]
    _check_lengths(selection, pieces, problems)
    _refuse(problems)
    noise = recordings(pieces)
    made = {part: make(_chunks(selection, part, noise, problems)) for part in Part}
    _refuse(problems)
    return made, noise


def _data(made: Callable[[Part], SpeechPart], noise: Recordings | None = None) -> SpeechData:
    return SpeechData(made(Part.TRAIN), made(Part.VAL), made(Part.TEST), noise)


def _features(selection: Selection) -> SpeechData:
    codes, _ = _read(selection, _encoded)
    return _data(lambda part: SpeechPart(codes[part], _labels(selection, part)))


def _labels(selection: Selection, part: Part) -> Tensor:
    words = [file.label for file in selection.clips[part]]
    return torch.tensor(words + [SILENCE] * selection.silence(part))


@torch.no_grad()
def _encoded(chunks: Iterator[Tensor]) -> Tensor:
    return torch.cat([encode(LogMel()(scaled(chunk))) for chunk in chunks])


def _joined(chunks: Iterator[Tensor]) -> Tensor:
    return torch.cat(list(chunks))


def _chunks(
    selection: Selection, part: Part, noise: Recordings, problems: list[str]
) -> Iterator[Tensor]:
    """(up to 256, 16000) int16: the clips of a part, then its silence."""
    files = selection.clips[part]
    for first in range(0, len(files), _CHUNK):
        some = files[first : first + _CHUNK]
        yield torch.stack([_clip(_samples(selection.folder, file, problems)) for file in some])
    yield from _silence(noise, part, selection.silence(part)).split(_CHUNK)


def _silence(noise: Recordings, part: Part, count: int) -> Tensor:
    """(count, 16000) int16: crops of noise, each times a number that is uniform in [0, 1].

    The same ones each time, so that a test stays the same test.
    """
    generator = Generator().manual_seed(_SEED + list(Part).index(part))
    crops = noise.crops(count, generator=generator)
    return (crops * torch.rand(count, 1, generator=generator)).round().to(torch.int16)


def _clip(samples: Tensor) -> Tensor:
    """The first 16,000 samples, filled up with zeros."""
    return torch.nn.functional.pad(samples[:CLIP], (0, CLIP - min(len(samples), CLIP)))


def _samples(folder: Path, file: WavFile, problems: list[str]) -> Tensor:
    """(samples,) int16 of a wav file; one that cannot be used is noted, and silent."""
    path = folder / file.name
    try:
        return read_wav(path)
    except InputError as error:
        problems.append(str(error))
        return torch.zeros(CLIP, dtype=torch.int16)


def read_wav(path: Path) -> Tensor:
    """(samples,) int16 of a wav file: 16-bit PCM, mono, 16 kHz.

    Raises:
        InputError: it is another kind of file, or it was cut off.
    """
    try:
        with path.open("rb") as file, wave.open(file) as reader:
            kind = (8 * reader.getsampwidth(), reader.getnchannels(), reader.getframerate())
            count = reader.getnframes()
            data = reader.readframes(count) if kind == (16, 1, RATE) else b""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (wave.Error, EOFError) as error:
        cause = str(error) or "one that was cut off"
        raise InputError(f"{path}: expected a wav file of 16-bit PCM, got {cause}.") from error
    if kind != (16, 1, RATE):
        raise InputError(
            f"{path}: expected 16 bits, 1 channel, {RATE} Hz, got {kind[0]} bits, {kind[1]} "
            f"channel{'s' * (kind[1] > 1)}, {kind[2]} Hz."
        )
    if not count or len(data) != 2 * count:
        raise InputError(
            f"{path}: expected {count or 'some'} samples, got {len(data) // 2}: it was cut off."
        )
    return torch.from_numpy(np.frombuffer(data, "<i2").astype(np.int16))


def _check_lengths(selection: Selection, pieces: Sequence[Tensor], problems: list[str]) -> None:
    for file, piece in zip(selection.noise, pieces, strict=True):
        if len(piece) < CLIP:
            path = selection.folder / file.name
            problems.append(
                f"{path}: expected noise of a second or more, got {len(piece)} samples."
            )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        shown = [*problems[:NAMED]]
        if len(problems) > NAMED:
            shown.append(f"... and {len(problems) - NAMED} more files.")
        raise InputError("\n".join([*shown, "Put good copies there, or remove these files."]))
