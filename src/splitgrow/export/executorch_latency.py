"""How long an ExecuTorch program takes on one thread, measured in a process of its own.

Programs that are loaded crash when the pool of their threads is replaced, so the process that
exports, which has loaded some, cannot be the one that measures.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from splitgrow.errors import ExportError
from splitgrow.export.check import Feeds, latency


def executorch_latency(content: bytes, feeds: Feeds) -> float:
    """Median seconds of a program for one sample, on one thread.

    Args:
        content: the program.
        feeds: what it takes, in its order.
    """
    with tempfile.TemporaryDirectory() as folder:
        program, inputs = Path(folder) / "program.pte", Path(folder) / "inputs.npz"
        program.write_bytes(content)
        np.savez(inputs, *feeds.values())  # one after the other
        command = [sys.executable, "-m", __name__, str(program), str(inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    try:
        return float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise ExportError(
            f"the latency of the ExecuTorch program cannot be measured: its process ended with "
            f"{done.returncode} ({last})."
        ) from None


def _main(program: Path, inputs: Path) -> None:
    from executorch.extension.pybindings import portable_lib

    from splitgrow.export.executorch_file import ExecutorchRunner

    portable_lib._unsafe_reset_threadpool(1)
    if (count := portable_lib._threadpool_get_thread_count()) != 1:
        raise SystemExit(f"ExecuTorch runs on {count} threads, though one was asked for")
    with np.load(inputs) as kept:
        feeds = dict(kept)
    runner = ExecutorchRunner(program.read_bytes(), list(feeds))
    sys.stdout.write(f"{latency(lambda: runner.run(feeds))}\n")


if __name__ == "__main__":
    _main(*map(Path, sys.argv[1:]))
