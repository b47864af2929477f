"""MNIST and CIFAR-10 for the paper's experiments: read, checked, and fetched if asked to.

Only the original files are read, byte for byte: each has its published md5, or is refused. Both
are plain numbers; CIFAR-10's pickled version is not read, since loading a pickle runs code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from splitgrow.errors import InputError
from splitgrow.files import write_file

# In each table, the file's name and the md5 of its contents.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MNIST_GZ_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_TAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

# Where the files are fetched from, tried in turn. MNIST's are folders, CIFAR-10's is the file.
MNIST_ADDRESSES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
CIFAR10_ADDRESSES = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)

# Folders below the user's that are looked in; a download goes to the first.
_MNIST_PLACES = ("MNIST/raw", "raw", ".")
_CIFAR10_PLACES = ("cifar-10-batches-bin", ".")
_CIFAR10_PICKLED = "cifar-10-batches-py"

_RECORD = 1 + 3 * 32 * 32  # bytes of an image of CIFAR-10: its label, then red, green, blue
_TIMEOUT = 30.0  # seconds without an answer
_LONGEST = 1 << 28  # bytes that are taken from an address; CIFAR-10 has 170 MB
_DOWNLOAD = "pass --download on the command line (in Python: download=True)"


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images and what they show."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64


@dataclass(frozen=True, eq=False)
class DataSet:
    """The images to learn from and those to test on, in the order of the files."""

    train: ImageData
    test: ImageData


def mnist(folder: Path, *, download: bool = False) -> DataSet:
    """MNIST: 60,000 + 10,000 images of 1 x 28 x 28.

    Args:
        folder: Where its four files are, plain or as .gz: in ``MNIST/raw`` (as torchvision has
            them), in ``raw``, or in the folder itself.
        download: Fetch the files that are missing into ``MNIST/raw``. No file is replaced.

    Raises:
        InputError: a file is missing or is not the original one, or a download failed.
    """
    found = _find(folder, _MNIST_PLACES, MNIST_MD5, ("", ".gz"))
    missing = [name for name in MNIST_MD5 if name not in found]
    if missing and not download:
        raise InputError(_missing("MNIST", folder, _MNIST_PLACES, missing, "(plain or .gz) "))
    for name in missing:
        found[name] = _fetch_mnist(name, folder / _MNIST_PLACES[0])
    data = _read_all(found, MNIST_MD5, _check_idx)
    return DataSet(_mnist_part(data, "train"), _mnist_part(data, "t10k"))


def cifar10(folder: Path, *, download: bool = False) -> DataSet:
    """CIFAR-10, the binary version: 50,000 + 10,000 images of 3 x 32 x 32 (red, green, blue).

    Args:
        folder: Where its six .bin files are: in ``cifar-10-batches-bin`` (as its archive has
            them), or in the folder itself.
        download: Fetch the files that are missing into ``cifar-10-batches-bin``. No file is
            replaced.

    Raises:
        InputError: a file is missing or is not the original one, or a download failed.
    """
    found = _find(folder, _CIFAR10_PLACES, CIFAR10_MD5, ("",))
    missing = [name for name in CIFAR10_MD5 if name not in found]
    if missing and not download:
        message = _missing("CIFAR-10", folder, _CIFAR10_PLACES, missing)
        raise InputError(_of_pickled(folder) + message)
    if missing:
        found |= _fetch_cifar10(missing, folder)
    data = _read_all(found, CIFAR10_MD5, _check_records)
    *train, test = (data[name] for name in CIFAR10_MD5)
    return DataSet(_cifar10_part(train), _cifar10_part([test]))


# --- files that are there -----------------------------------------------------------------


def _find(
    folder: Path, places: Sequence[str], names: Iterable[str], endings: Sequence[str]
) -> dict[str, Path]:
    """The first file of each name; a name without one is left out."""
    found = {}
    for name in names:
        paths = (folder / place / f"{name}{ending}" for place in places for ending in endings)
        try:
            path = next((path for path in paths if path.is_file()), None)
        except OSError as error:  # a folder that may not be entered
            raise InputError(f"{folder} cannot be read: {error.strerror or error}.") from error
        if path is not None:
            found[name] = path
    return found


def _missing(
    title: str, folder: Path, places: Sequence[str], names: Collection[str], kinds: str = ""
) -> str:
    looked = " or ".join(str(folder / place) for place in places)
    return (
        f"{title}: expected the files {', '.join(names)} {kinds}in {looked}, got none of these. "
        f"Unpack them in {folder / places[0]}, or {_DOWNLOAD}."
    )


def _of_pickled(folder: Path) -> str:
    """What to say about CIFAR-10's other version, if it is there."""
    places = (folder / _CIFAR10_PICKLED, folder)
    there = next((place for place in places if (place / "data_batch_1").is_file()), None)
    if there is None:
        return ""
    return (
        f"{there} holds the pickled python version of CIFAR-10. It is not read, since loading a "
        f"pickle runs code: get the binary version, {CIFAR10_ADDRESSES[0]}. "
    )


def _read_all(
    paths: Mapping[str, Path], md5s: Mapping[str, str], check: Callable[[str, bytes], str | None]
) -> dict[str, bytes]:
    """The contents of all files, or an error that names each file that is not as it should be."""
    data, problems = {}, []
    for name, path in paths.items():
        try:
            data[name] = _read(path)
        except (OSError, EOFError, zlib.error) as error:
            problems.append(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")
            continue
        # A digest says that a file is wrong, and its structure often how: so that goes first.
        problem = check(name, data[name]) or _check_md5(data[name], md5s[name])
        if problem is not None:
            problems.append(f"{path} is not the original file: {problem}.")
    if problems:
        way_out = f"Delete what is damaged, then put a good copy there, or {_DOWNLOAD}."
        raise InputError("\n".join([*problems, way_out]))
    return data


def _read(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    with gzip.open(path) as file:
        return file.read()


def _check_md5(data: bytes, expected: str) -> str | None:
    got = hashlib.md5(data, usedforsecurity=False).hexdigest()
    return None if got == expected else f"expected md5 {expected}, got {got} ({len(data)} bytes)"


# --- their contents -----------------------------------------------------------------------


def _check_idx(name: str, data: bytes) -> str | None:
    """IDX: 0, 0, 8 (unsigned bytes), the number of dimensions, each as 4 bytes, the values."""
    dims = 3 if "idx3" in name else 1
    magic = bytes((0, 0, 8, dims))
    if data[:4] != magic:
        return (
            f"expected an IDX file of {dims} dimension{'s' * (dims > 1)}, which begins with "
            f"{magic.hex()}, got {data[:4].hex() or 'an empty file'}"
        )
    start = 4 + 4 * dims
    if len(data) < start:
        return f"expected a header of {start} bytes, got {len(data)}: it was cut off"
    shape = _idx_shape(data)
    size = start + math.prod(shape)
    if len(data) == size:
        return None
    cause = "cut off" if len(data) < size else "changed"
    sides = " x ".join(map(str, shape))
    return f"expected {size} bytes for {sides} values, got {len(data)}: it was {cause}"


def _idx_shape(data: bytes) -> tuple[int, ...]:
    return struct.unpack_from(f">{data[3]}I", data, 4)


def _idx_values(data: bytes) -> Tensor:
    shape = _idx_shape(data)
    values = memoryview(data)[4 + 4 * len(shape) :]
    return torch.frombuffer(bytearray(values), dtype=torch.uint8).view(shape)


def _mnist_part(data: Mapping[str, bytes], part: str) -> ImageData:
    images = _idx_values(data[f"{part}-images-idx3-ubyte"])  # (N, H, W)
    labels = _idx_values(data[f"{part}-labels-idx1-ubyte"])  # (N,)
    return ImageData(images.unsqueeze(1), labels.long())


def _check_records(_: str, data: bytes) -> str | None:
    if data and len(data) % _RECORD == 0:
        return None
    return (
        f"expected records of {_RECORD} bytes (a label and 3 x 32 x 32 values), got {len(data)} "
        "bytes, which is no multiple: it was cut off, or is another file"
    )


def _cifar10_part(files: Iterable[bytes]) -> ImageData:
    values = torch.frombuffer(bytearray().join(files), dtype=torch.uint8)
    records = values.view(-1, _RECORD)  # (N, 1 + 3072)
    images = records[:, 1:].contiguous()  # without the labels between them
    return ImageData(images.view(-1, 3, 32, 32), records[:, 0].long())


# --- files from elsewhere -----------------------------------------------------------------


def _fetch_mnist(name: str, target: Path) -> Path:
    addresses = [f"{address}{name}.gz" for address in MNIST_ADDRESSES]
    packed = _fetch(addresses, MNIST_GZ_MD5[name], f"put it in {target}")
    return _place(target, name, gzip.decompress(packed), MNIST_MD5[name])


def _fetch_cifar10(names: Collection[str], folder: Path) -> dict[str, Path]:
    packed = _fetch(CIFAR10_ADDRESSES, CIFAR10_TAR_MD5, f"unpack it in {folder}")
    target = folder / _CIFAR10_PLACES[0]
    return {
        name: _place(target, name, data, CIFAR10_MD5[name])
        for name, data in _unpack(packed, names).items()
    }


def _unpack(packed: bytes, names: Collection[str]) -> dict[str, bytes]:
    """The named files of CIFAR-10's archive; links and files elsewhere in it are passed over."""
    wanted = {PurePosixPath(_CIFAR10_PLACES[0], name): name for name in names}
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for member in archive:
            name = wanted.get(PurePosixPath(member.name))
            file = archive.extractfile(member) if name and member.isreg() else None
            if name and file:
                found[name] = file.read()
    missing = [str(path) for path, name in wanted.items() if name not in found]
    if missing:
        raise InputError(f"CIFAR-10: expected {', '.join(missing)} in the archive, got none.")
    return found


def _place(target: Path, name: str, data: bytes, md5: str) -> Path:
    """Put a file there, whole, if it is the right one."""
    path = target / name
    problem = _check_md5(data, md5)
    if problem is not None:
        raise InputError(f"{path} was not written, since its download is another file: {problem}.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    return path


def _fetch(addresses: Iterable[str], md5: str, by_hand: str) -> bytes:
    """What the first address gives that works; an error tells what happened at each."""
    problems = []
    for address in addresses:
        try:
            data = _get(address)
            problem = _check_md5(data, md5)
        except (OSError, HTTPException) as error:  # also: no such host, no answer in time
            problem = str(error).strip() or type(error).__name__
        else:
            if problem is None:
                return data
        problems.append(f"  {address}: {problem}")
    raise InputError(
        "\n".join(["The download failed:", *problems, f"Get one of these by hand and {by_hand}."])
    )


def _get(address: str) -> bytes:
    # The addresses are the constants above, all https; what comes is used only if its md5 is right.
    request = urllib.request.Request(address, headers={"User-Agent": "splitgrow"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310
        return bytes(answer.read(_LONGEST))
