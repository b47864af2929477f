"""Speech Commands as 12 classes: from the packed features, or from a user's own wav files.

Both give the same type. The packed file is numbers only (``allow_pickle=False``). A folder of wav
files is split by speaker, as its makers do, and gets the shares of unknown words and silence of
Zhang et al. 2017; its features can be kept in a cache that knows when it is out of date.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import wave
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from splitgrow.errors import InputError
from splitgrow.files import write_file
from splitgrow.paper.speech import (
    BANDS,
    CLIP,
    FRAMES,
    RATE,
    SETTINGS,
    LogMel,
    Recordings,
    encode,
    recordings,
    scaled,
)

SILENCE, UNKNOWN = 0, 1
KEYWORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
CLASSES = ("_silence_", "_unknown_", *KEYWORDS)  # a label is a place in here
NOISE_FOLDER = "_background_noise_"
SHARE = 10  # percent of the number of keyword clips: so many of silence, as many of unknown words

_PACKED_PLACES = ("speech_commands/logmel.npz", "logmel.npz")
_PACKED_ARRAYS = ("x", "y", "split", "x_test", "y_test", "classes")
_HASHES = 2**27 - 1  # MAX_NUM_WAVS_PER_CLASS of the data set's own rule
_CHUNK = 256  # clips that are turned into features at once
_NAMED = 10  # problems that an error names one by one
_SEED = 59185  # of the crops of silence
_DOWNLOAD = "http://download.tensorflow.org/data/speech_commands_v0.01.tar.gz"


class Part(StrEnum):
    """What clips are used for."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


_LISTS = {"validation_list.txt": Part.VAL, "testing_list.txt": Part.TEST}


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


def speech_commands(folder: Path, *, cache: Path | None = None) -> SpeechData:
    """Features of what is in a folder: the packed ones if they are there, else its wav files."""
    return read_packed(folder) if _packed_path(folder) else read_clips(folder, cache=cache)


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
    most = _share(int((part.labels > UNKNOWN).sum()))
    kept = [_spread((part.labels == label).nonzero().flatten(), most) for label in (0, 1)]
    words = (part.labels > UNKNOWN).nonzero().flatten()
    return part.rows(torch.cat([words, *kept]).sort().values)


def _spread(rows: Tensor, most: int) -> Tensor:
    count = min(most, len(rows))
    return rows[torch.arange(count, device=rows.device) * len(rows) // max(count, 1)]


def _share(keywords: int) -> int:
    return -(-keywords * SHARE // 100)  # rounded up


# --- the packed features ------------------------------------------------------------------


def read_packed(folder: Path) -> SpeechData:
    """The packed features, ``logmel.npz``, in the folder or in its ``speech_commands``.

    Raises:
        InputError: the file is missing, damaged, or of another kind.
    """
    path = _packed_path(folder)
    if path is None:
        looked = " or ".join(str(folder / place) for place in _PACKED_PLACES)
        raise InputError(
            f"Speech Commands: expected the packed features {looked}, got none. Unpack them there, "
            "or name a folder of the data set's wav files."
        )
    arrays = _load_arrays(path, _PACKED_ARRAYS)
    classes = tuple(map(str, arrays["classes"].tolist()))
    if classes != CLASSES:
        raise InputError(f"{path}, classes: expected {', '.join(CLASSES)}, got {classes}.")
    split = arrays["split"]
    if split.shape != arrays["y"].shape or not np.isin(split, (0, 1)).all():
        raise InputError(f"{path}, split: expected 0 (train) or 1 (val) for each label of y.")
    both = _checked_part(path, arrays, "x", "y")
    train, val = (both.rows(torch.from_numpy(split == number)) for number in (0, 1))
    data = SpeechData(train, val, _checked_part(path, arrays, "x_test", "y_test"))
    for part in Part:
        _check_all_classes(path, part, getattr(data, part))
    return data


def _packed_path(folder: Path) -> Path | None:
    paths = (folder / place for place in _PACKED_PLACES)
    try:
        return next((path for path in paths if path.is_file()), None)
    except OSError as error:  # a folder that may not be entered
        raise InputError(f"{folder} cannot be read: {error.strerror or error}.") from error


def _load_arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Named arrays of an npz file. Each is read in full, so that damage shows."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            several = isinstance(archive, np.lib.npyio.NpzFile)  # or a single array
            found = {name: archive[name] for name in names if several and name in archive}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path} is not an npz file of numbers, or it is damaged: {error}. Use another copy."
        ) from error
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f"{path}: expected the arrays {', '.join(missing)}, got none of these.")
    return found


def _checked_part(
    path: Path, arrays: Mapping[str, np.ndarray], x_name: str, y_name: str
) -> SpeechPart:
    x, y = arrays[x_name], arrays[y_name]
    if x.dtype != np.uint8 or x.ndim != 3 or x.shape[1:] != (FRAMES, BANDS):
        raise InputError(
            f"{path}, {x_name}: expected bytes of shape (clips, {FRAMES}, {BANDS}), got {x.dtype} "
            f"of shape {x.shape}."
        )
    right = y.shape == x.shape[:1] and y.dtype.kind in "iu"
    if not right or (y.size and not 0 <= int(y.min()) <= int(y.max()) < len(CLASSES)):
        raise InputError(
            f"{path}, {y_name}: expected {len(x)} labels from 0 to {len(CLASSES) - 1}, got "
            f"{y.dtype} of shape {y.shape}."
        )
    return SpeechPart(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def _check_all_classes(path: Path, name: str, part: SpeechPart) -> None:
    counts = torch.bincount(part.labels, minlength=len(CLASSES)).tolist()
    missing = [word for word, count in zip(CLASSES, counts, strict=True) if not count]
    if missing:
        raise InputError(f"{path}: expected clips of each class, got none of {missing} in {name}.")


# --- a folder of wav files ----------------------------------------------------------------


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
    selection = _select(folder)
    if cache is None:
        return _read(selection, _features)
    path, key = cache / f"{folder.resolve().name}-logmel.npz", _key(selection)
    found = _read_cache(path, key)
    if found is None:
        _make_folder(cache)  # before the work, so that a wrong one is known early
        found = _read(selection, _features)
        _write_cache(path, key, found)
    return found


def read_waves(folder: Path) -> SpeechData:
    """The same clips as ``read_clips``, with their waveforms: 32 kB each, in memory."""
    return _read(_select(folder), _features_and_waves)


def official_part(name: str) -> Part:
    """The part that a wav file belongs to, by the data set's own rule.

    100 (SHA-1(s) mod 2^27) / (2^27 - 1) with the speaker s, the name up to ``_nohash_``: below 10
    it is val, below 20 test, else train. Files that are added later move no other.
    """
    digest = hashlib.sha1(_speaker(name).encode(), usedforsecurity=False).hexdigest()
    percent = (int(digest, 16) % (_HASHES + 1)) * (100.0 / _HASHES)
    if percent < 10:
        return Part.VAL
    return Part.TEST if percent < 20 else Part.TRAIN


def _speaker(name: str) -> str:
    return re.sub(r"_nohash_.*$", "", name)


@dataclass(frozen=True)
class _File:
    """A wav file as the folder lists it; a change of its contents shows in its size or time."""

    name: str  # <word>/<file>
    size: int
    changed: int  # nanoseconds

    @property
    def label(self) -> int:
        word = self.name.split("/")[0].lower()
        return CLASSES.index(word) if word in KEYWORDS else UNKNOWN


@dataclass(frozen=True)
class _Selection:
    """Which files of a folder are read, and for what."""

    folder: Path
    clips: Mapping[Part, Sequence[_File]]
    noise: Sequence[_File]

    def silence(self, part: Part) -> int:
        """How many clips of silence belong to a part."""
        return _share(sum(file.label != UNKNOWN for file in self.clips[part]))


def _select(folder: Path) -> _Selection:
    words, noise = _list_folder(folder)
    part_of = _parts(folder, words)
    parts: dict[Part, list[_File]] = {part: [] for part in Part}
    for file in words:
        parts[part_of(file.name)].append(file)
    chosen = {part: _choose(files) for part, files in parts.items()}
    _check_enough(folder, chosen, noise)
    return _Selection(folder, chosen, noise)


def _choose(files: Sequence[_File]) -> list[_File]:
    """All keywords, then unknown words for 10% of their number.

    Which ones is decided by a hash of their names: the same on every machine.
    """
    words = [file for file in files if file.label != UNKNOWN]
    others = [file for file in files if file.label == UNKNOWN]
    return words + sorted(others, key=_name_hash)[: _share(len(words))]


def _name_hash(file: _File) -> str:
    return hashlib.sha256(file.name.encode()).hexdigest()


def _list_folder(folder: Path) -> tuple[list[_File], list[_File]]:
    """The wav files of all words, and those of noise, by name."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        words = [file for name in names if name[0] not in "_." for file in _wavs(folder, name)]
        return words, _wavs(folder, NOISE_FOLDER) if NOISE_FOLDER in names else []
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read: {error.strerror or error}. Name the folder where Speech "
            f"Commands was unpacked ({_DOWNLOAD})."
        ) from error


def _wavs(folder: Path, word: str) -> list[_File]:
    found = []
    with os.scandir(folder / word) as entries:
        for entry in entries:
            if entry.name.endswith(".wav") and not entry.name.startswith("."):
                state = entry.stat()
                found.append(_File(f"{word}/{entry.name}", state.st_size, state.st_mtime_ns))
    return sorted(found, key=lambda file: file.name)


def _check_enough(
    folder: Path, clips: Mapping[Part, Sequence[_File]], noise: Sequence[_File]
) -> None:
    """Is there something of each class in each part? Whatever is not there is said at once."""
    problems = [] if noise else [f"no wav file in {NOISE_FOLDER}, which silence is cut from"]
    for part, files in clips.items():
        there = {file.label for file in files}
        missing = [word for label, word in enumerate(CLASSES) if label and label not in there]
        if missing:
            problems.append(f"nothing for {part} of {', '.join(missing)}")
    if problems:
        raise InputError(
            f"{folder}: expected wav files <word>/<speaker>_nohash_<n>.wav of the ten keywords and "
            f"of other words, got {'; '.join(problems)}. Name the folder where Speech Commands was "
            f"unpacked ({_DOWNLOAD})."
        )


# --- which part a clip is in --------------------------------------------------------------


def _parts(folder: Path, files: Sequence[_File]) -> Callable[[str], Part]:
    """The part of each <word>/<file>: by the folder's lists, or by the official rule."""
    listed = _read_lists(folder)
    if listed is None:
        return lambda name: official_part(name.split("/")[1])
    _check_speakers(folder, files, listed)
    return lambda name: listed.get(name, Part.TRAIN)


def _read_lists(folder: Path) -> dict[str, Part] | None:
    there = [name for name in _LISTS if (folder / name).is_file()]
    if not there:
        return None
    if len(there) < len(_LISTS):
        missing = next(name for name in _LISTS if name not in there)
        raise InputError(
            f"{folder} has {there[0]}, but no {missing}. Put both there, or remove the one: then "
            "the official rule splits by the speaker's name."
        )
    listed: dict[str, Part] = {}
    for name, part in _LISTS.items():
        lines = set(_lines(folder / name))
        twice = sorted(lines & listed.keys())
        if twice:
            raise InputError(f"{folder}: {' and '.join(_LISTS)} both have {_few(twice)}.")
        listed |= dict.fromkeys(lines, part)
    return listed


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    wrong = [line for line in lines if line and not re.fullmatch(r"[^/]+/[^/]+\.wav", line)]
    if wrong:
        raise InputError(f"{path}: expected lines <word>/<file>.wav, got {_few(wrong)}.")
    return [line for line in lines if line]


def _check_speakers(folder: Path, files: Sequence[_File], listed: Mapping[str, Part]) -> None:
    """A speaker who is learnt from makes the test too easy."""
    seen: dict[str, Part] = {}
    split = set()
    for file in files:
        speaker = _speaker(file.name.split("/")[1])
        part = listed.get(file.name, Part.TRAIN)
        if seen.setdefault(speaker, part) != part:
            split.add(speaker)
    if split:
        raise InputError(
            f"{folder}: {' and '.join(_LISTS)} put clips of the same speaker into different parts: "
            f"{_few(sorted(split))}. Use the data set's own lists, or remove both: then the "
            "official rule splits by the speaker's name."
        )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


# --- the clips themselves -----------------------------------------------------------------

_MakePart = Callable[[Iterator[Tensor], Tensor], SpeechPart]


def _read(selection: _Selection, make: _MakePart) -> SpeechData:
    """All parts of a folder. Every file that cannot be used is named, not just the first."""
    problems: list[str] = []
    pieces = [_samples(selection.folder, file, problems) for file in selection.noise]
    _check_lengths(selection, pieces, problems)
    _refuse(problems)
    noise = recordings(pieces)
    made = {}
    for part in Part:
        labels = [file.label for file in selection.clips[part]]
        labels += [SILENCE] * selection.silence(part)
        chunks = _chunks(selection, part, noise, problems)
        made[part] = make(chunks, torch.tensor(labels))
    _refuse(problems)
    waves = made[Part.TRAIN].waves
    return SpeechData(
        made[Part.TRAIN], made[Part.VAL], made[Part.TEST], None if waves is None else noise
    )


def _features(chunks: Iterator[Tensor], labels: Tensor) -> SpeechPart:
    return SpeechPart(torch.cat([_encode(chunk) for chunk in chunks]), labels)


def _features_and_waves(chunks: Iterator[Tensor], labels: Tensor) -> SpeechPart:
    waves = torch.empty(len(labels), CLIP, dtype=torch.int16)
    codes, first = [], 0
    for chunk in chunks:
        waves[first : first + len(chunk)] = chunk
        codes.append(_encode(chunk))
        first += len(chunk)
    return SpeechPart(torch.cat(codes), labels, waves)


def _encode(samples: Tensor) -> Tensor:
    with torch.no_grad():
        return encode(LogMel()(scaled(samples)))


def _chunks(
    selection: _Selection, part: Part, noise: Recordings, problems: list[str]
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


def _samples(folder: Path, file: _File, problems: list[str]) -> Tensor:
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


def _check_lengths(selection: _Selection, pieces: Sequence[Tensor], problems: list[str]) -> None:
    for file, piece in zip(selection.noise, pieces, strict=True):
        if len(piece) < CLIP:
            path = selection.folder / file.name
            problems.append(
                f"{path}: expected noise of a second or more, got {len(piece)} samples."
            )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        shown = [*problems[:_NAMED]]
        if len(problems) > _NAMED:
            shown.append(f"... and {len(problems) - _NAMED} more files.")
        raise InputError("\n".join([*shown, "Put good copies there, or remove these files."]))


# --- the cache ----------------------------------------------------------------------------


def _key(selection: _Selection) -> str:
    """What the features depend on, as a sha256: the files, their parts, and the front end."""
    clips = {
        part: [(file.name, file.size, file.changed) for file in files]
        for part, files in selection.clips.items()
    }
    noise = [(file.name, file.size, file.changed) for file in selection.noise]
    contents = [SETTINGS, CLASSES, SHARE, _SEED, clips, noise]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()


def _read_cache(path: Path, key: str) -> SpeechData | None:
    """What is in the cache; None if it is not there, damaged, or made from something else."""
    names = [f"{kind}_{part}" for part in Part for kind in "xy"]
    try:
        if _load_arrays(path, ["key"])["key"].tolist() != key:
            return None
        arrays = _load_arrays(path, names)
        train, val, test = (_checked_part(path, arrays, f"x_{part}", f"y_{part}") for part in Part)
    except InputError:
        return None
    return SpeechData(train, val, test)


def _write_cache(path: Path, key: str, data: SpeechData) -> None:
    arrays: dict[str, Any] = {"key": np.array(key)}
    for part in Part:
        values: SpeechPart = getattr(data, part)
        arrays |= {f"x_{part}": values.codes.numpy(), f"y_{part}": values.labels.numpy()}
    file = io.BytesIO()
    np.savez(file, **arrays)
    try:
        write_file(path, file.getbuffer())
    except OSError as error:
        raise _unwritable(path, error) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path} cannot be written: {error.strerror or error}. Choose another folder for the cache."
    )
