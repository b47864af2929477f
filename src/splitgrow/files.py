"""Files and folders that are there whole or not at all, and that show when they were changed.

Everything is first written under a temporary name beside its target, brought to the disk, and then
renamed, which the operating system does in one step. A process that is killed leaves the old
target, or none, and at most a temporary that ``clean`` knows by its name.

A sealed file is a safetensors file with a checksum of all its bytes in its metadata. Reading one
runs no code: it is numbers and JSON.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from splitgrow.errors import CheckpointError, InputError

# A process's number may be given to another one later (in a container often to the next one), so
# that a name also tells which start of a process it belongs to.
_PROCESS = secrets.token_hex(4)
_TEMPORARY = re.compile(r"\.splitgrow-tmp-(\d+)-([0-9a-f]{8})-[0-9a-f]{8}")

_SEAL = "sha256"
_OPEN_SEAL = "0" * 64  # stands for the checksum while it is computed
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors itself


# --- whole or not at all ------------------------------------------------------------------


def write_file(target: Path, *pieces: bytes | memoryview) -> None:
    """Replace a file in one step: a reader finds the old one or the new one, never a part."""
    temporary = _temporary_beside(target)
    try:
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` in one step, or vanishes on any error.

    Raises:
        InputError: there is something at ``target`` already; a folder is not replaced.
    """
    if os.path.lexists(target):
        raise InputError(f"{target} exists already. Choose another name, or remove it first.")
    temporary = _temporary_beside(target)
    try:
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(target.parent)


def clean(parent: Path) -> list[Path]:
    """Remove the temporaries that killed processes left in a folder, and say which they were.

    Temporaries of this process and of others that still run stay. Only processes of this machine
    are known: do not call it on a folder that another machine is writing to.
    """
    found = [path for path in parent.iterdir() if _is_stale(path.name)] if parent.is_dir() else []
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def _temporary_beside(target: Path) -> Path:
    name = f".splitgrow-tmp-{os.getpid()}-{_PROCESS}-{secrets.token_hex(4)}"
    return target.parent / name


def _is_stale(name: str) -> bool:
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    number, process = int(match[1]), match[2]
    return process != _PROCESS if number == os.getpid() else not _is_running(number)


def _is_running(process: int) -> bool:
    if os.name == "nt":  # there os.kill ends a process, and open files cannot be removed anyway
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(place, name))
        _sync(Path(place))


def _sync(path: Path) -> None:
    """Bring a file's bytes, or the names in a folder, to the disk."""
    if os.name == "nt" or path.is_symlink():  # Windows has no way to do so for a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot
            raise
    finally:
        os.close(handle)


# --- sealed files -------------------------------------------------------------------------


def write_sealed(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors and metadata as one sealed file; the same contents give the same bytes.

    Raises:
        CheckpointError: the file cannot be written, with the operating system's reason.
    """
    plain = safetensors.save({name: portable(tensor) for name, tensor in tensors.items()})
    start = 8 + int.from_bytes(plain[:8], "little")
    entries, body = json.loads(plain[8:start]), memoryview(plain)[start:]
    digest = hashlib.sha256(_header(entries, metadata, _OPEN_SEAL))
    digest.update(body)
    try:
        write_file(Path(path), _header(entries, metadata, digest.hexdigest()), body)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_sealed(
    path: str | os.PathLike[str], format_: str
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a sealed file.

    Raises:
        CheckpointError: there is no such file, it is of another format or version, or it is not
            what was written.
    """
    try:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= _LONGEST_HEADER else b""
            metadata = _metadata(path, header)
            _check_format(path, metadata.get("format"), format_)
            body = file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    start = length.to_bytes(8, "little") + header
    _check_seal(path, start, body, metadata.pop(_SEAL, ""))
    return metadata, _tensors(path, start + body)


def portable(tensor: Tensor) -> Tensor:
    """A contiguous copy of the values in main memory, which shares nothing with the tensor."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@functools.cache
def is_storable(dtype: torch.dtype) -> bool:
    """Can safetensors hold numbers of this type?"""
    try:
        safetensors.save({"x": torch.zeros(0, dtype=dtype)})
    except (KeyError, ValueError, RuntimeError, SafetensorError):
        return False
    return True


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str], seal: str) -> bytes:
    """How a safetensors file begins: a length, then JSON filled up to a multiple of 8 bytes."""
    described = {"__metadata__": {**metadata, _SEAL: seal}, **entries}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _metadata(path: str | os.PathLike[str], header: bytes) -> dict[str, str]:
    try:
        found = json.loads(header)["__metadata__"]
        if all(isinstance(value, str) for value in found.values()):
            return dict(found)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(
        f"{path} is not a file that splitgrow wrote, or it is damaged at its beginning."
    )


def _check_format(path: str | os.PathLike[str], found: str | None, expected: str) -> None:
    if found == expected:
        return
    raise CheckpointError(
        f"{path} has the format {found!r}, expected {expected!r}: it is a file of another kind, or "
        "of another version of splitgrow."
    )


def _check_seal(path: str | os.PathLike[str], start: bytes, body: bytes, seal: str) -> None:
    mark = f'"{_SEAL}":"{seal}"'.encode()
    digest = hashlib.sha256(start.replace(mark, f'"{_SEAL}":"{_OPEN_SEAL}"'.encode()))
    digest.update(body)
    if start.count(mark) != 1 or digest.hexdigest() != seal:
        raise CheckpointError(
            f"{path} is not as it was written: it was cut off or changed since. Use another copy."
        )


def _tensors(path: str | os.PathLike[str], data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a valid safetensors file: {error}") from error
