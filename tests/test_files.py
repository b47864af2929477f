"""Files and folders are there whole or not at all, also when the process is killed."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from splitgrow import files
from splitgrow.errors import CheckpointError, InputError
from splitgrow.files import atomic_directory, clean, read_sealed, write_file, write_sealed

FORMAT = {"format": "test-1"}


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


# --- one file -----------------------------------------------------------------------------


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    write_file(tmp_path / "file", b"old ", memoryview(b"contents"))
    assert (tmp_path / "file").read_bytes() == b"old contents"
    write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    write_file(tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == b""
    assert listed(tmp_path) == ["empty", "file"]


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace"), (Path, "open")])
def test_a_failure_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    write_file(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert listed(tmp_path) == ["file"]


def test_bytes_reach_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file itself, then its new name, then the folder that holds the name."""
    order = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(handle: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def noted_replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_file(tmp_path / "file", b"x")
    assert order == ["file", "rename", "folder"]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "missing" / "file", b"x")
    assert listed(tmp_path) == []


# --- a folder -----------------------------------------------------------------------------


def test_a_folder_appears_when_it_is_full(tmp_path: Path) -> None:
    target = tmp_path / "phase-0000"
    with atomic_directory(target) as folder:
        assert folder.parent == tmp_path
        assert folder.is_dir()
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"a")
        (folder / "b").write_bytes(b"b")
        assert not target.exists()
        assert not folder.match("phase-*")
    assert not folder.exists()
    assert listed(tmp_path) == ["phase-0000"]
    assert listed(target) == ["b", "inner"]
    assert (target / "inner" / "a").read_bytes() == b"a"


def test_modes_are_as_of_any_other_folder(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "ours") as folder:
        write_file(folder / "file", b"x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for name in (".", "file"):
        modes = {(tmp_path / place / name).stat().st_mode for place in ("ours", "other")}
        assert len(modes) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_folder_vanishes_on_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "target") as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "a").write_bytes(b"a")
            raise error

    with pytest.raises(error):
        fill()
    assert listed(tmp_path) == []


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "rename"), (Path, "mkdir")])
def test_a_folder_vanishes_when_it_cannot_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    def fill() -> None:
        with atomic_directory(tmp_path / "target") as folder:
            (folder / "a").write_bytes(b"a")

    with monkeypatch.context() as patch:
        patch.setattr(*place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            fill()
    assert listed(tmp_path) == []


def test_every_file_of_a_folder_reaches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_ino)
        fsync(handle)

    def noted_rename(self: Path, target: Path) -> Path:
        synced.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    with atomic_directory(tmp_path / "target") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"a")
        (folder / "b").write_bytes(b"b")
    before = synced[: synced.index("rename")]
    target = tmp_path / "target"
    places = (target, target / "inner", target / "inner" / "a", target / "b")
    assert set(before) == {place.stat().st_ino for place in places}
    assert synced[-1] == tmp_path.stat().st_ino


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_is_not_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_bytes(b"mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists already"), atomic_directory(target):
        pytest.fail("the folder should not have been given")
    assert listed(tmp_path) == ["target"]


# --- leftovers ----------------------------------------------------------------------------


def a_number_of_no_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_clean_removes_what_killed_processes_left(tmp_path: Path) -> None:
    dead = a_number_of_no_process()
    stale = [tmp_path / f".splitgrow-tmp-{dead}-{'ab' * 4}-{i:08x}" for i in range(2)]
    stale[0].mkdir()
    (stale[0] / "file").write_bytes(b"x")
    stale[1].write_bytes(b"x")
    # A process of the same number as ours, started before: numbers are given anew.
    stale.append(tmp_path / f".splitgrow-tmp-{os.getpid()}-{'0' * 8}-{'1' * 8}")
    stale[2].mkdir()
    running = tmp_path / f".splitgrow-tmp-{os.getppid()}-{'ab' * 4}-{'2' * 8}"
    running.mkdir()
    others = ["phase-0000", ".splitgrow-tmp", ".hidden", f"splitgrow-tmp-{dead}-{'ab' * 4}"]
    for name in others:
        (tmp_path / name).mkdir()
    assert sorted(clean(tmp_path)) == sorted(stale)
    assert listed(tmp_path) == sorted([*others, running.name])
    assert clean(tmp_path) == []


def test_clean_keeps_what_is_being_written(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "target") as folder:
        assert clean(tmp_path) == []
        assert folder.is_dir()
    assert listed(tmp_path) == ["target"]


def test_clean_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    link = tmp_path / f".splitgrow-tmp-{a_number_of_no_process()}-{'ab' * 4}-{'0' * 8}"
    link.symlink_to(tmp_path / "mine")
    assert clean(tmp_path) == [link]
    assert listed(tmp_path) == ["mine"]
    assert listed(tmp_path / "mine") == ["file"]


def test_clean_of_nothing(tmp_path: Path) -> None:
    assert clean(tmp_path / "missing") == []


KILLED_WRITER = r"""
import json, os, random, re, signal, sys, time
from pathlib import Path
from splitgrow.files import atomic_directory, clean, write_file

kind, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
random.seed(0)
SIZE = 500_000

def contents(i):
    return bytes([i % 251]) * SIZE

def write_files():
    i = 0
    while True:
        write_file(folder / "file", contents(i))
        i += 1

def write_folders():
    while True:
        i = len(list(folder.glob("phase-*")))
        with atomic_directory(folder / f"phase-{i:04d}") as place:
            for name in ("a", "b"):
                (place / name).write_bytes(contents(i))

def check_file():
    found = (folder / "file").read_bytes() if (folder / "file").exists() else contents(0)
    assert found == found[:1] * SIZE, "a part of a file"
    return found[0]

def check_folders():
    places = sorted(folder.glob("phase-*"))
    for i, place in enumerate(places):
        assert place.name == f"phase-{i:04d}"
        for name in ("a", "b"):
            assert (place / name).read_bytes() == contents(i), "a part of a folder"
    return len(places)

work, check = (write_files, check_file) if kind == "file" else (write_folders, check_folders)
seen, stale = set(), 0
for _ in range(kills):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    time.sleep(random.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    seen.add(check())
    stale += len(clean(folder))
    assert not [p for p in folder.iterdir() if not re.fullmatch(r"file|phase-\d{4}", p.name)]
print(json.dumps({"seen": len(seen), "stale": stale}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_at_any_moment_all_is_old_or_new(tmp_path: Path, kind: str) -> None:
    """SIGKILL at random moments: what is there is whole, and the rest is recognised."""
    command = [sys.executable, "-c", KILLED_WRITER, kind, str(tmp_path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seen"] > 3  # the writers got somewhere,
    assert found["stale"] > 3  # and were caught in the act


# --- sealed files -------------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randn(3, 4),
        "half": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "naïve \"quoted\" name": torch.ones(1, dtype=torch.float64),
    }  # fmt: skip


def test_sealed_files_come_back_as_they_were(tmp_path: Path) -> None:
    kept = tensors()
    notes = FORMAT | {"note": 'é "sha256":"' + "0" * 64 + '" \\', "": ""}
    write_sealed(tmp_path / "file", kept, notes)
    metadata, found = read_sealed(str(tmp_path / "file"), "test-1")
    assert metadata == notes
    assert found.keys() == kept.keys()
    for name, tensor in kept.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert found[name].shape == tensor.shape
        found[name].zero_()  # may be written to


def test_sealed_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    kept = tensors()
    write_sealed(tmp_path / "file", kept, FORMAT)
    assert load_file(tmp_path / "file").keys() == kept.keys()
    with safe_open(tmp_path / "file", framework="np") as file:
        assert file.metadata().keys() == {"format", "sha256"}
    write_sealed(tmp_path / "nothing", {}, FORMAT)
    assert read_sealed(tmp_path / "nothing", "test-1") == (FORMAT, {})


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    kept = tensors()
    notes = FORMAT | {f"note {i}": str(i) for i in range(10)}
    for name in ("a", "b"):
        write_sealed(tmp_path / name, kept, notes)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_non_contiguous_and_shared_tensors_are_stored_by_value(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    kept = {"t": base.t(), "slice": base[1:3, ::2], "again": base, "wide": base[:1].expand(3, 6)}
    write_sealed(tmp_path / "file", kept, FORMAT)
    _, found = read_sealed(tmp_path / "file", "test-1")
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sealed(path, {"w": torch.randn(3), "n": torch.tensor(1)}, FORMAT | {"note": "text"})
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        path.write_bytes(bytes(changed))
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            read_sealed(path, "test-1")
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_sealed(path, "test-1")
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="cut off or changed"):
        read_sealed(path, "test-1")
    path.write_bytes(data)
    read_sealed(path, "test-1")


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"3", b"{}", b'{"__metadata__": 3}', b'{"__metadata__": {"format": 3}}',
     b'{"__metadata__": {}', b"\xff\xfe", b"[" * 100_000, b'{"__metadata__": ["format"]}'],
)  # fmt: skip
def test_headers_that_are_none(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="not a file that splitgrow wrote"):
        read_sealed(path, "test-1")


def test_other_formats(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sealed(path, {}, {"format": "test-2"})
    with pytest.raises(CheckpointError, match="'test-2', expected 'test-1'"):
        read_sealed(path, "test-1")
    save_file({"w": torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match="'pt', expected 'test-1'"):
        read_sealed(path, "test-1")
    save_file({"w": torch.ones(2)}, path, {"format": "test-1"})  # without a seal
    with pytest.raises(CheckpointError, match="cut off or changed"):
        read_sealed(path, "test-1")
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="not a file that splitgrow wrote"):
        read_sealed(path, "test-1")


def test_a_forged_seal_on_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    """Whoever computes the checksum anew can say anything, and it is still only data."""
    entries = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 800]}}
    path = tmp_path / "file"
    open_ = files._header(entries, FORMAT, files._OPEN_SEAL)
    seal = files.hashlib.sha256(open_ + b"\0" * 8).hexdigest()
    path.write_bytes(files._header(entries, FORMAT, seal) + b"\0" * 8)
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        read_sealed(path, "test-1")


def test_places_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing cannot be read: No such file"):
        read_sealed(tmp_path / "missing", "test-1")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_sealed(tmp_path, "test-1")
    with pytest.raises(CheckpointError, match=r"missing/file cannot be written: No such file"):
        write_sealed(tmp_path / "missing" / "file", {}, FORMAT)
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder cannot be written"):
        write_sealed(tmp_path / "folder", {}, FORMAT)
    assert listed(tmp_path) == ["folder"]


def test_which_dtypes_can_be_stored() -> None:
    storable = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
                torch.int8, torch.uint8, torch.bool)  # fmt: skip
    assert all(files.is_storable(dtype) for dtype in storable)
    assert not files.is_storable(torch.complex128)
