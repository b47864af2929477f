"""A small growing run that can be started in a process of its own, to be interrupted or killed.

``python grow_worker.py RUN_DIR KIND`` does one run. ``python grow_worker.py serve`` imports torch
once and then forks a process for each line of JSON it reads, which is much faster than a start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitgrow as sg

Batch = tuple[Tensor, Tensor]
INTERRUPTED = 130  # the exit status after Ctrl-C, as of a shell


def data(samples: int = 48) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(samples, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:]
    return list(zip(x.split(samples // 2), y.split(samples // 2), strict=True))


def net(seed: int = 1) -> nn.Sequential:
    """With buffers, and random in training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 1)
        )


def mse(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def evaluate(model: nn.Module) -> dict[str, float]:
    return {"error": sum(mse(model, batch).item() for batch in data()), "nothing": float("nan")}


def epochs(
    model: nn.Module, phase: sg.Phase, optimizer: torch.optim.Optimizer, count: int = 3
) -> None:
    """Batches in random order, from torch's own generator."""
    batches = data()
    model.train()
    for _ in range(count):
        for i in torch.randperm(len(batches)).tolist():
            optimizer.zero_grad()
            loss = mse(model, batches[i])
            loss.backward()
            optimizer.step()
            phase.log(loss)
            if phase.should_stop:
                return


def carried(model: nn.Module, phase: sg.Phase) -> None:
    """One Adam for all phases."""
    if phase.optimizer is None:
        phase.optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    epochs(model, phase, phase.optimizer)


def renewed(model: nn.Module, phase: sg.Phase) -> None:
    """A new one in each phase, handed over all the same."""
    phase.forget_optimizer()
    phase.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    epochs(model, phase, phase.optimizer)


def private(model: nn.Module, phase: sg.Phase) -> None:
    """An optimizer that grow never sees."""
    epochs(model, phase, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def deaf(model: nn.Module, phase: sg.Phase) -> None:
    """Trains for ever, and never looks at should_stop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        mse(model, data()[0]).backward()
        optimizer.step()
        phase.log(0.0)
        time.sleep(0.01)


def patient(model: nn.Module, phase: sg.Phase) -> None:
    """Trains for ever, unless asked to stop."""
    while not phase.should_stop:
        phase.log(0.0)
        time.sleep(0.01)


def slow(model: nn.Module, phase: sg.Phase) -> None:
    """As ``carried``, but its second phase waits to be stopped, where it is told to."""
    carried(model, phase)
    if phase.number == 1 and os.environ.get("GROW_WORKER_WAITS"):
        patient(model, phase)


TRAINS: dict[str, Callable[[nn.Module, sg.Phase], None]] = {
    "carried": carried, "renewed": renewed, "private": private, "deaf": deaf, "slow": slow,
    "trainer": sg.Trainer(data(), mse, epochs=3, lr=0.02, shuffle=True),
}  # fmt: skip


def grow(run_dir: Path | None, kind: str = "carried", **changes: Any) -> sg.Result:
    """The run that all tests of resuming agree on."""
    settings: dict[str, Any] = {
        "train": TRAINS[kind], "loss_fn": mse, "batches": data(), "evaluate": evaluate,
        "policy": sg.Policy(count=1), "until": sg.Budget(phases=3), "run_dir": run_dir, "seed": 3,
    }  # fmt: skip
    return sg.grow(net(), **(settings | changes))


# --- as a process -------------------------------------------------------------------------


def work(run_dir: str, kind: str = "carried", crash_at: int | None = None) -> int:
    """A run, resumed if it is there; the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
    if crash_at is not None:
        _crash_at_change(Path(run_dir), crash_at)
    print("started", flush=True)
    try:
        grow(Path(run_dir), kind, resume=True)
    except sg.Interrupted as stopped:
        print(f"interrupted: {stopped}", flush=True)
        return INTERRUPTED
    return 0


CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open")


def _crash_at_change(folder: Path, number: int) -> None:
    """Kill this process just before it changes something in a folder for the n-th time."""
    left = number

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in CHANGES and _is_change(event, args, str(folder)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _is_change(event: str, args: tuple[Any, ...], folder: str) -> bool:
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
        return False
    # With dir_fd, as rmtree does it, a path is a bare name.
    path = os.fspath(args[0]) if isinstance(args[0], str | os.PathLike) else ""
    return path.startswith(folder) or (event != "open" and not Path(path).is_absolute())


def serve() -> None:
    """Fork a worker for each request on stdin, perhaps kill it, and tell its exit status."""
    torch.set_num_threads(1)
    torch.export.export(nn.Linear(1, 1), (torch.ones(2, 1),))  # imports what it needs
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        kill_after = request.pop("kill_after")
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = 1
            try:
                code = work(**request)
            finally:
                os._exit(code)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)  # one that has ended is there until it is waited for
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Server:
    """Starts workers, and may kill them after a while."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self._read() == "ready"

    def run(self, run_dir: Path, *, kill_after: float | None = None, **request: Any) -> int:
        """A worker's exit status; -9 if it was killed."""
        assert self._process.stdin is not None
        asked = {"run_dir": str(run_dir), "kill_after": kill_after, **request}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """This script as a process."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=None, env={**os.environ, **environment},
    )  # fmt: skip


@contextmanager
def server() -> Iterator[Server]:
    with start("serve") as process:
        try:
            yield Server(process)
        finally:
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        sys.exit(work(*sys.argv[1:]))
