"""Which wav files of a folder of Speech Commands are read, and what for.

It is split by speaker, as its makers do, and gets the shares of unknown words and silence of Zhang
et al. 2017.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitgrow.errors import InputError
from splitgrow.paper.speech_parts import CLASSES, KEYWORDS, UNKNOWN, Part, share_of

NOISE_FOLDER = "_background_noise_"
NAMED = 10  # problems that an error names one by one

_HASHES = 2**27 - 1  # MAX_NUM_WAVS_PER_CLASS of the data set's own rule
_DOWNLOAD = "http://download.tensorflow.org/data/speech_commands_v0.01.tar.gz"
_LISTS = {"validation_list.txt": Part.VAL, "testing_list.txt": Part.TEST}


@dataclass(frozen=True)
class WavFile:
    """A wav file as the folder lists it; a change of its contents shows in its size or time."""

    name: str  # <word>/<file>
    size: int
    changed: int  # nanoseconds

    @property
    def label(self) -> int:
        """Of its word, a place in CLASSES."""
        word = self.name.split("/")[0].lower()
        return CLASSES.index(word) if word in KEYWORDS else UNKNOWN


@dataclass(frozen=True)
class Selection:
    """Which files of a folder are read, and for what."""

    folder: Path
    clips: Mapping[Part, Sequence[WavFile]]
    noise: Sequence[WavFile]

    def silence(self, part: Part) -> int:
        """How many clips of silence belong to a part."""
        return share_of(sum(file.label != UNKNOWN for file in self.clips[part]))


def select(folder: Path) -> Selection:
    """The files of a folder that are read, by the part that they are in.

    Raises:
        InputError: the folder or its lists cannot be used, or a part would lack a class.
    """
    words, noise = _list_folder(folder)
    part_of = _parts(folder, words)
    parts: dict[Part, list[WavFile]] = {part: [] for part in Part}
    for file in words:
        parts[part_of(file.name)].append(file)
    chosen = {part: _choose(files) for part, files in parts.items()}
    _check_enough(folder, chosen, noise)
    return Selection(folder, chosen, noise)


def _choose(files: Sequence[WavFile]) -> list[WavFile]:
    """All keywords, then unknown words for 10% of their number.

    Which ones is decided by a hash of their names: the same on every machine.
    """
    words = [file for file in files if file.label != UNKNOWN]
    others = [file for file in files if file.label == UNKNOWN]
    return words + sorted(others, key=_name_hash)[: share_of(len(words))]


def _name_hash(file: WavFile) -> str:
    return hashlib.sha256(file.name.encode()).hexdigest()


def _list_folder(folder: Path) -> tuple[list[WavFile], list[WavFile]]:
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


def _wavs(folder: Path, word: str) -> list[WavFile]:
    found = []
    with os.scandir(folder / word) as entries:
        for entry in entries:
            if entry.name.endswith(".wav") and not entry.name.startswith("."):
                state = entry.stat()
                found.append(WavFile(f"{word}/{entry.name}", state.st_size, state.st_mtime_ns))
    return sorted(found, key=lambda file: file.name)


def _check_enough(
    folder: Path, clips: Mapping[Part, Sequence[WavFile]], noise: Sequence[WavFile]
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
            f"of other words, or packed features (logmel.npz, or speech_commands/logmel.npz), got "
            f"{'; '.join(problems)}. Name the folder where Speech Commands was unpacked "
            f"({_DOWNLOAD}), or where the packed features are."
        )


# --- which part a clip is in --------------------------------------------------------------


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


def _parts(folder: Path, files: Sequence[WavFile]) -> Callable[[str], Part]:
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


def _check_speakers(folder: Path, files: Sequence[WavFile], listed: Mapping[str, Part]) -> None:
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
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
