"""Seconds and bytes, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch


def wait(device: str) -> None:
    """For kernels that still run."""
    if device != "cpu":
        torch.cuda.synchronize()


def clock(action: Callable[[], object], device: str) -> float:
    """Seconds that an action takes."""
    wait(device)
    start = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - start


def allocated(action: Callable[[], object]) -> float:
    """Bytes of a GPU that an action needs above what is there, by PyTorch's allocator."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def reset_resident() -> float:
    """Forget the largest resident size of this process; what it is now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def largest_resident() -> float:
    """Bytes, since it was reset."""
    return _status("VmHWM")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
