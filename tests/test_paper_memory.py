"""Memory that a training process keeps."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from splitgrow.paper import memory

# Page faults of ten blocks of 64 MB, each freed before the next is made and written; before them
# one that is larger than a 32-bit number of bytes says.
FAULTS = """
import resource, torch
from splitgrow.paper.memory import keep_freed_memory
if {kept}:
    assert keep_freed_memory()
def write():
    torch.ones(16 << 20)
torch.empty(5 << 27)
write()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    write()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, kept: bool) -> int:
    command = [sys.executable, "-c", FAULTS.format(kept=kept)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    not (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")),
    reason="glibc gives memory back; others do as they like",
)
def test_freed_blocks_are_used_again() -> None:
    assert faults(kept=True) < 0.1 * faults(kept=False)


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed_memory()


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    assert not memory.keep_freed_memory()
