"""MNIST and CIFAR-10 from files: every layout, every kind of damage, and a download from here.

The data are small and made here; their md5s stand in the place of the published ones.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import socket
import struct
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torch import Tensor

from splitgrow import files
from splitgrow.errors import InputError
from splitgrow.paper import data

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
Files = dict[str, bytes]


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def numbers(seed: int, *shape: int, below: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, shape, generator=generator, dtype=torch.uint8)


def idx(values: Tensor) -> bytes:
    header = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    return header + values.numpy().tobytes()


def bin_(images: Tensor, labels: Tensor) -> bytes:
    return torch.cat([labels[:, None], images.flatten(1)], 1).numpy().tobytes()


# Sides of 4 and 6, so that rows and columns cannot be taken for one another.
MNIST = {
    "train": (numbers(0, 5, 4, 6), numbers(1, 5, below=10)),
    "t10k": (numbers(2, 3, 4, 6), numbers(3, 3, below=10)),
}
CIFAR10 = {
    name: (numbers(10 + i, 2 + i, 3, 32, 32), numbers(20 + i, 2 + i, below=10))
    for i, name in enumerate(data.CIFAR10_MD5)
}


@pytest.fixture
def mnist_files(monkeypatch: pytest.MonkeyPatch) -> Files:
    made = {}
    for part, (images, labels) in MNIST.items():
        made[f"{part}-images-idx3-ubyte"] = idx(images)
        made[f"{part}-labels-idx1-ubyte"] = idx(labels)
    packed = {name: md5(zipped(content)) for name, content in made.items()}
    monkeypatch.setattr(data, "MNIST_MD5", {name: md5(made[name]) for name in data.MNIST_MD5})
    monkeypatch.setattr(data, "MNIST_GZ_MD5", packed)
    return made


@pytest.fixture
def cifar_files(monkeypatch: pytest.MonkeyPatch) -> Files:
    made = {name: bin_(*pair) for name, pair in CIFAR10.items()}
    monkeypatch.setattr(data, "CIFAR10_MD5", {name: md5(made[name]) for name in made})
    return made


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def fill(folder: Path, contents: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def tree(folder: Path) -> Files:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def assert_mnist(found: data.DataSet) -> None:
    for part, name in ((found.train, "train"), (found.test, "t10k")):
        images, labels = MNIST[name]
        assert part.images.dtype == torch.uint8
        assert part.labels.dtype == torch.int64
        assert torch.equal(part.images, images[:, None])
        assert torch.equal(part.labels, labels.long())


def assert_cifar10(found: data.DataSet) -> None:
    *train, test = CIFAR10.values()
    for part, pairs in ((found.train, train), (found.test, [test])):
        assert part.images.dtype == torch.uint8
        assert part.images.is_contiguous()
        assert part.labels.dtype == torch.int64
        assert torch.equal(part.images, torch.cat([images for images, _ in pairs]))
        assert torch.equal(part.labels, torch.cat([labels for _, labels in pairs]).long())


# --- layouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["MNIST/raw", "raw", "."])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_from_each_layout(
    tmp_path: Path, mnist_files: Files, place: str, packed: bool
) -> None:
    if packed:
        mnist_files = {f"{name}.gz": zipped(content) for name, content in mnist_files.items()}
    fill(tmp_path / place, mnist_files)
    assert_mnist(data.mnist(tmp_path))


def test_files_of_one_set_may_be_spread_over_the_layouts(
    tmp_path: Path, mnist_files: Files
) -> None:
    fill(tmp_path / "raw", {IMAGES: mnist_files.pop(IMAGES)})
    fill(tmp_path, {f"{LABELS}.gz": zipped(mnist_files.pop(LABELS))})
    fill(tmp_path / "MNIST" / "raw", mnist_files)
    assert_mnist(data.mnist(tmp_path))


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", "."])
def test_cifar10_is_read_from_each_layout(tmp_path: Path, cifar_files: Files, place: str) -> None:
    fill(tmp_path / place, cifar_files)
    assert_cifar10(data.cifar10(tmp_path))


def test_changing_a_tensor_changes_no_file(tmp_path: Path, mnist_files: Files) -> None:
    fill(tmp_path, mnist_files)
    data.mnist(tmp_path).train.images.zero_()
    assert_mnist(data.mnist(tmp_path))


# --- missing files ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_nothing_found_names_the_folder_the_files_and_both_ways_out(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "no" / "such"
    with pytest.raises(InputError) as caught:
        getattr(data, name)(folder)
    names = data.MNIST_MD5 if name == "mnist" else data.CIFAR10_MD5
    for part in (str(folder), *names, "Unpack them in", "--download"):
        assert part in str(caught.value)
    assert not folder.exists()


def test_only_the_missing_files_are_named(tmp_path: Path, mnist_files: Files) -> None:
    del mnist_files[LABELS]
    fill(tmp_path, mnist_files)
    with pytest.raises(InputError, match=f"expected the files {LABELS} .*plain or .gz") as caught:
        data.mnist(tmp_path)
    assert IMAGES not in str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
def test_the_pickled_cifar10_is_refused(tmp_path: Path, inside: bool) -> None:
    pickled = fill(tmp_path / "cifar-10-batches-py", {"data_batch_1": b"\x80\x02."})
    with pytest.raises(InputError, match="pickle runs code: get the binary") as caught:
        data.cifar10(pickled if inside else tmp_path)
    assert str(pickled) in str(caught.value)
    assert data.CIFAR10_ADDRESSES[0] in str(caught.value)


def test_the_pickled_cifar10_is_not_mentioned_where_it_is_not(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        data.cifar10(tmp_path)
    assert "runs code" not in str(caught.value)


def test_a_folder_that_cannot_be_looked_into_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        data.mnist(tmp_path / ("x" * 300))


# --- damaged files ------------------------------------------------------------------------


def refuses_mnist(folder: Path, contents: Files, message: str) -> None:
    fill(folder, contents)
    with pytest.raises(InputError, match=message) as caught:
        data.mnist(folder)
    assert "Delete what is damaged" in str(caught.value)
    assert "--download" in str(caught.value)
    assert tree(folder) == contents


def test_a_file_cut_off_is_refused_with_both_sizes(tmp_path: Path, mnist_files: Files) -> None:
    mnist_files[IMAGES] = mnist_files[IMAGES][:-1]
    message = f"{IMAGES} is .*expected 136 bytes for 5 x 4 x 6 values, got 135: it was cut off"
    refuses_mnist(tmp_path, mnist_files, message)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path, mnist_files: Files) -> None:
    mnist_files[LABELS] += b"\0"
    refuses_mnist(tmp_path, mnist_files, "expected 13 bytes for 5 values, got 14: it was changed")


@pytest.mark.parametrize("length", [4, 15])
def test_a_header_cut_off_is_refused(tmp_path: Path, mnist_files: Files, length: int) -> None:
    mnist_files[IMAGES] = mnist_files[IMAGES][:length]
    refuses_mnist(tmp_path, mnist_files, f"expected a header of 16 bytes, got {length}")


@pytest.mark.parametrize(
    ("start", "got"), [(b"", "an empty file"), (b"\0", "00"), (b"<!DOCTYPE html>", "3c21444f")]
)
def test_a_file_that_is_not_idx_is_refused(
    tmp_path: Path, mnist_files: Files, start: bytes, got: str
) -> None:
    mnist_files[LABELS] = start
    message = f"IDX file of 1 dimension, which begins with 00000801, got {got}[.]"
    refuses_mnist(tmp_path, mnist_files, message)


def test_swapped_files_are_all_reported(tmp_path: Path, mnist_files: Files) -> None:
    mnist_files[IMAGES], mnist_files[LABELS] = mnist_files[LABELS], mnist_files[IMAGES]
    both = f"(?s){IMAGES} is .*00000803, got 00000801.*{LABELS} is .*00000801, got 00000803"
    refuses_mnist(tmp_path, mnist_files, both)


def test_one_changed_byte_is_refused_by_its_md5(tmp_path: Path, mnist_files: Files) -> None:
    whole = mnist_files[IMAGES]
    mnist_files[IMAGES] = whole[:-1] + bytes([whole[-1] ^ 1])
    message = f"{IMAGES} is .*expected md5 {md5(whole)}, got {md5(mnist_files[IMAGES])}"
    refuses_mnist(tmp_path, mnist_files, message)


@pytest.mark.parametrize("damage", ["cut off", "not gzip", "no such block", "changed"])
def test_a_damaged_gz_is_refused(tmp_path: Path, mnist_files: Files, damage: str) -> None:
    packed = zipped(mnist_files.pop(IMAGES))
    bad = {
        "cut off": packed[:-20],
        "not gzip": b"<html>",
        "no such block": packed[:10] + b"\x07" + packed[11:],
        "changed": packed[:20] + bytes(40) + packed[60:],
    }[damage]
    message = f"{IMAGES}.gz (cannot be read: .+|is not the original file)"
    refuses_mnist(tmp_path, {**mnist_files, f"{IMAGES}.gz": bad}, message)


@pytest.mark.parametrize("length", [0, 3072, 2 * 3073 - 1])
def test_cifar10_cut_off_is_refused(tmp_path: Path, cifar_files: Files, length: int) -> None:
    cifar_files["data_batch_1.bin"] = cifar_files["data_batch_1.bin"][:length]
    fill(tmp_path, cifar_files)
    with pytest.raises(InputError, match=f"data_batch_1.bin .*records of 3073 .*got {length} byte"):
        data.cifar10(tmp_path)


def test_cifar10_with_whole_records_missing_or_exchanged_is_refused(
    tmp_path: Path, cifar_files: Files
) -> None:
    cifar_files["data_batch_4.bin"], cifar_files["test_batch.bin"] = (
        cifar_files["data_batch_4.bin"][:3073],
        cifar_files["data_batch_1.bin"],
    )
    fill(tmp_path, cifar_files)
    both = "(?s)data_batch_4.bin .*expected md5 .*test_batch.bin .*expected md5"
    with pytest.raises(InputError, match=both):
        data.cifar10(tmp_path)


# --- downloads ----------------------------------------------------------------------------


@dataclass
class Server:
    """Serves what the test puts in ``contents``, and notes what was asked for."""

    address: str
    contents: Files = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    cut: int | None = None  # bytes after which an answer ends, though more were announced
    garbled: bool = False  # answers, but not in HTTP


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            content = served.contents.get(self.path)
            if served.garbled:
                self.wfile.write(b"220 mail at your service\r\n")
                return
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: served.cut])

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    for name in ("no_proxy", "NO_PROXY"):  # a proxy of the machine does not know this server
        monkeypatch.setenv(name, "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        served = Server(f"http://127.0.0.1:{listening.server_address[1]}")
        mirrors = (f"{served.address}/first/", f"{served.address}/second/")
        monkeypatch.setattr(data, "MNIST_ADDRESSES", mirrors)
        monkeypatch.setattr(data, "CIFAR10_ADDRESSES", (f"{served.address}/cifar.tar.gz",))
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield served
        listening.shutdown()
        thread.join()


def mirrored(contents: Files, mirror: str) -> Files:
    return {f"/{mirror}/{name}.gz": zipped(content) for name, content in contents.items()}


def archive(*members: tuple[str, bytes | None]) -> bytes:
    """A .tar.gz; a member without contents is a link to another one."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content or b"")
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "data_batch_1.bin"
            tar.addfile(member, io.BytesIO(content or b""))
    return packed.getvalue()


def serve_cifar10(server: Server, monkeypatch: pytest.MonkeyPatch, packed: bytes) -> None:
    server.contents["/cifar.tar.gz"] = packed
    monkeypatch.setattr(data, "CIFAR10_TAR_MD5", md5(packed))


def test_mnist_is_downloaded_once(tmp_path: Path, mnist_files: Files, server: Server) -> None:
    server.contents = mirrored(mnist_files, "first")
    folder = tmp_path / "new" / "folder"
    assert_mnist(data.mnist(folder, download=True))
    assert tree(folder) == {f"MNIST/raw/{name}": content for name, content in mnist_files.items()}
    assert sorted(server.asked) == sorted(server.contents)

    assert_mnist(data.mnist(folder, download=True))
    assert_mnist(data.mnist(folder))
    assert len(server.asked) == len(mnist_files)


def test_only_what_is_missing_is_downloaded(
    tmp_path: Path, mnist_files: Files, server: Server
) -> None:
    server.contents = mirrored(mnist_files, "first")
    fill(tmp_path, {name: content for name, content in mnist_files.items() if name != LABELS})
    assert_mnist(data.mnist(tmp_path, download=True))
    assert server.asked == [f"/first/{LABELS}.gz"]


@pytest.mark.parametrize("fault", ["not there", "another file", "cut off"])
def test_the_second_mirror_is_asked_where_the_first_fails(
    tmp_path: Path, mnist_files: Files, server: Server, fault: str
) -> None:
    server.contents = mirrored(mnist_files, "second")
    if fault != "not there":
        whole = zipped(mnist_files[IMAGES])
        server.contents[f"/first/{IMAGES}.gz"] = b"x" if fault == "another file" else whole[:-9]
    assert_mnist(data.mnist(tmp_path, download=True))
    assert server.asked[:2] == [f"/first/{IMAGES}.gz", f"/second/{IMAGES}.gz"]


def test_a_failed_download_names_each_address_and_cause(
    tmp_path: Path, mnist_files: Files, server: Server
) -> None:
    server.contents[f"/second/{IMAGES}.gz"] = b"<html>"
    folder = tmp_path / "new"
    with pytest.raises(InputError) as caught:
        data.mnist(folder, download=True)
    first, second = (re.escape(f"{address}{IMAGES}.gz") for address in data.MNIST_ADDRESSES)
    assert re.search(f"{first}: HTTP Error 404", str(caught.value))
    good, bad = md5(zipped(mnist_files[IMAGES])), md5(b"<html>")
    assert re.search(f"{second}: expected md5 {good}, got {bad}", str(caught.value))
    assert f"by hand and put it in {folder / 'MNIST' / 'raw'}" in str(caught.value)
    assert not folder.exists()


def test_an_answer_that_breaks_off_is_a_failed_download(
    tmp_path: Path, mnist_files: Files, server: Server
) -> None:
    server.contents, server.cut = mirrored(mnist_files, "first"), 30
    with pytest.raises(InputError, match="The download failed"):
        data.mnist(tmp_path, download=True)
    assert tree(tmp_path) == {}


def test_an_answer_that_is_not_http_is_a_failed_download(
    tmp_path: Path, mnist_files: Files, server: Server
) -> None:
    server.garbled = True
    with pytest.raises(InputError, match=r"first/.*: 220 mail .*\n.*second/.*: 220 mail"):
        data.mnist(tmp_path, download=True)


def test_a_server_that_never_answers_is_a_failed_download(
    tmp_path: Path, cifar_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setattr(data, "CIFAR10_ADDRESSES", (address,))
        with pytest.raises(InputError, match=f"{address}: .*timed out"):
            data.cifar10(tmp_path, download=True)


def test_no_server_is_a_failed_download(
    tmp_path: Path, cifar_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = "http://127.0.0.1:1/cifar.tar.gz"
    monkeypatch.setattr(data, "CIFAR10_ADDRESSES", (nobody,))
    message = f"{nobody}: .*refused.*\n.*by hand and unpack it in {re.escape(str(tmp_path))}"
    with pytest.raises(InputError, match=message):
        data.cifar10(tmp_path, download=True)


def test_a_download_replaces_no_file(tmp_path: Path, mnist_files: Files, server: Server) -> None:
    server.contents = mirrored(mnist_files, "first")
    mnist_files[IMAGES] = b"the user's own"
    fill(tmp_path / "MNIST" / "raw", mnist_files)
    with pytest.raises(InputError, match="Delete what is damaged"):
        data.mnist(tmp_path, download=True)
    assert tree(tmp_path / "MNIST" / "raw") == mnist_files
    assert server.asked == []


def test_a_packed_file_that_holds_another_is_not_written(
    tmp_path: Path, mnist_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.contents = mirrored(mnist_files, "first")
    monkeypatch.setitem(data.MNIST_MD5, IMAGES, md5(b"something else"))
    with pytest.raises(InputError, match=f"{IMAGES} was not written"):
        data.mnist(tmp_path, download=True)
    assert tree(tmp_path) == {}


def test_cifar10_is_downloaded_and_nothing_else_of_its_archive(
    tmp_path: Path, cifar_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = [(f"cifar-10-batches-bin/{name}", content) for name, content in cifar_files.items()]
    others = [("cifar-10-batches-bin/readme.html", b"x"), ("../test_batch.bin", b"x"),
              ("/test_batch.bin", b"x"), ("a/../cifar-10-batches-bin/test_batch.bin", b"x"),
              ("cifar-10-batches-bin/../../out.bin", b"x")]  # fmt: skip
    serve_cifar10(server, monkeypatch, archive(*reversed(inside), *others))
    folder = tmp_path / "a" / "b"
    assert_cifar10(data.cifar10(folder, download=True))
    assert tree(tmp_path) == {f"a/b/{name}": content for name, content in inside}
    assert_cifar10(data.cifar10(folder, download=True))
    assert server.asked == ["/cifar.tar.gz"]


def test_cifar10_files_that_are_there_are_kept(
    tmp_path: Path, cifar_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = [(f"./cifar-10-batches-bin/{name}", content) for name, content in cifar_files.items()]
    serve_cifar10(server, monkeypatch, archive(*inside))
    kept = cifar_files.pop("data_batch_2.bin")
    fill(tmp_path, {"data_batch_2.bin": kept})
    assert_cifar10(data.cifar10(tmp_path, download=True))
    assert tree(tmp_path / "cifar-10-batches-bin") == cifar_files


def test_a_link_in_the_archive_is_not_followed(
    tmp_path: Path, cifar_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = {f"cifar-10-batches-bin/{name}": content for name, content in cifar_files.items()}
    linked = {**inside, "cifar-10-batches-bin/test_batch.bin": None}
    serve_cifar10(server, monkeypatch, archive(*linked.items()))
    with pytest.raises(InputError, match=r"expected cifar-10-batches-bin/test_batch\.bin in"):
        data.cifar10(tmp_path, download=True)
    assert tree(tmp_path) == {}


def test_an_archive_that_is_another_file_is_not_opened(
    tmp_path: Path, cifar_files: Files, server: Server
) -> None:
    server.contents["/cifar.tar.gz"] = archive(("cifar-10-batches-bin/test_batch.bin", b"x"))
    with pytest.raises(InputError, match=f"expected md5 {data.CIFAR10_TAR_MD5}"):
        data.cifar10(tmp_path, download=True)
    assert tree(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(
    tmp_path: Path, mnist_files: Files, server: Server
) -> None:
    server.contents = mirrored(mnist_files, "first")
    (tmp_path / "MNIST").write_text("a file where the folder should be")
    with pytest.raises(InputError, match=f"{IMAGES} cannot be written: .*Choose another folder"):
        data.mnist(tmp_path, download=True)


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, mnist_files: Files, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    server.contents = mirrored(mnist_files, "first")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device"):
        data.mnist(tmp_path, download=True)
    assert tree(tmp_path) == {}


def test_the_shipped_addresses_are_https_and_each_file_has_its_md5() -> None:
    assert all(a.startswith("https://") for a in (*data.MNIST_ADDRESSES, *data.CIFAR10_ADDRESSES))
    assert list(data.MNIST_GZ_MD5) == list(data.MNIST_MD5)
    digests = [*data.MNIST_MD5.values(), *data.MNIST_GZ_MD5.values(), *data.CIFAR10_MD5.values(),
               data.CIFAR10_TAR_MD5]  # fmt: skip
    assert all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests)
    assert len(set(digests)) == 4 + 4 + 6 + 1
