"""Memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # glibc's malloc.h
_NEVER = -1
_MARGIN = 64 << 20  # bytes


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next tensors; says whether that is possible.

    By default, glibc gives large blocks back to the system at once, which clears them again when
    the next step asks for the same: MobileNet of 16 channels spends half of a training step so.
    For processes that do nothing but train: whatever they once needed, they keep to their end.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another library than glibc
        return False
    options = {_MMAP_MAX: 0, _TRIM_THRESHOLD: _NEVER, _TOP_PAD: _MARGIN}
    return all(mallopt(option, value) == 1 for option, value in options.items())
