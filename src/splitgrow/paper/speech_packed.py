"""Features of Speech Commands in an npz file: the packed data set, or a cache of one's own.

Both are numbers only (``allow_pickle=False``). A cache knows when it is out of date by its key.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from splitgrow.errors import InputError
from splitgrow.files import write_file
from splitgrow.paper.speech import BANDS, FRAMES
from splitgrow.paper.speech_parts import CLASSES, Part, SpeechData, SpeechPart

_PLACES = ("speech_commands/logmel.npz", "logmel.npz")
_ARRAYS = ("x", "y", "split", "x_test", "y_test", "classes")


def read_packed(folder: Path) -> SpeechData:
    """The packed features, ``logmel.npz``, in the folder or in its ``speech_commands``.

    Raises:
        InputError: the file is missing, damaged, or of another kind.
    """
    path = packed_path(folder)
    if path is None:
        looked = " or ".join(str(folder / place) for place in _PLACES)
        raise InputError(
            f"Speech Commands: expected the packed features {looked}, got none. Unpack them there, "
            "or name a folder of the data set's wav files."
        )
    arrays = _load_arrays(path, _ARRAYS)
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


def packed_path(folder: Path) -> Path | None:
    """Where the packed features are; None if they are not there."""
    paths = (folder / place for place in _PLACES)
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


# --- the cache ----------------------------------------------------------------------------


def read_cache(path: Path, key: str) -> SpeechData | None:
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


def write_cache(path: Path, key: str, data: SpeechData) -> None:
    """Keep features, whole or not at all, for who comes with the same key."""
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


def make_folder(folder: Path) -> None:
    """Make the folder of a cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"{path} cannot be written: {error.strerror or error}. Choose another folder for the cache."
    )
