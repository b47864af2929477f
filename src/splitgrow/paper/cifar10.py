"""MobileNet and VGG19 on CIFAR-10: growth against pruning and against plain nets (Figure 3).

The study is a set of independent jobs, one method on one net with one seed each. They run side by
side, and an interrupted one goes on from its last net. Accuracies are reported, and never used to
choose.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

import splitgrow
from splitgrow.errors import InputError
from splitgrow.files import write_file
from splitgrow.paper.cifar10_bench import Bench, Setting, full_precision
from splitgrow.paper.cifar10_jobs import Job, Study, jobs
from splitgrow.paper.cifar10_nets import build
from splitgrow.paper.data import DataSet, cifar10
from splitgrow.paper.results import hardware, rounded

__all__ = ["Job", "Setting", "build", "jobs", "run_job", "run_jobs"]

Result = dict[str, Any]  # one job, as JSON has it
ReadData = Callable[[Path], DataSet]


def run_job(
    job: Job,
    setting: Setting,
    *,
    data: Path,
    folder: Path,
    device: str,
    read: ReadData = cifar10,
) -> Result:
    """The nets of a job, from its file if that is there, and else computed.

    Args:
        job: what to do.
        setting: how; a file made with another one is replaced.
        data: the folder of CIFAR-10.
        folder: gets ``jobs/<name>.json`` when all is done, and meanwhile ``runs/``, which an
            interrupted job goes on from.
        device: ``"cuda"`` or ``"cpu"``.
        read: gives the images that are in ``data``.
    """
    found = _stored(job, setting, folder)
    if found is not None:
        return found
    with full_precision():
        bench = Bench(setting, read(data), torch.device(device))
        study = Study(job, bench, folder / "runs" / key_of(setting) / job.name)
        points = study.points()
    return _store(
        {
            "experiment": "cifar10",
            "job": asdict(job),
            "settings": asdict(setting),
            "hardware": hardware(device),
            "versions": {"splitgrow": splitgrow.__version__, "torch": torch.__version__,
                         "numpy": np.__version__},
            "full": asdict(study.full),
            "points": rounded(points),
        },
        _file_of(job, folder),
    )  # fmt: skip


def key_of(setting: Setting) -> str:
    """Names the folder of what is computed with a setting."""
    return sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:8]


def _file_of(job: Job, folder: Path) -> Path:
    return folder / "jobs" / f"{job.name}.json"


def _stored(job: Job, setting: Setting, folder: Path) -> Result | None:
    """What a job gave with these settings, if it is done."""
    try:
        found = json.loads(_file_of(job, folder).read_text())
        same = found["settings"] == asdict(setting) and found["job"] == asdict(job)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if same else None


def _store(result: Result, path: Path) -> Result:
    """Write it with a line for each net, whole or not at all; what a reader will find."""
    head = json.dumps({k: v for k, v in result.items() if k != "points"}, indent=1)
    lines = ",\n".join(json.dumps(point, allow_nan=False) for point in result["points"])
    text = f'{head[:-2]},\n "points": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode())
    return cast("Result", json.loads(text))


# --- many jobs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """What every job of a run shares."""

    setting: Setting
    data: Path
    folder: Path
    device: str
    read: ReadData


@dataclass(frozen=True)
class _Running:
    """A job in its process."""

    job: Job
    process: BaseProcess
    start: float

    def report(self, console: Console) -> None:
        """Say how a process ended; the error itself it has written on its own."""
        seconds, code = time.perf_counter() - self.start, self.process.exitcode
        ended = "done" if code == 0 else f"failed with exit code {code}"
        way_out = (
            "" if code == 0 else ": its error is above. Run it again to go on from its last net"
        )
        console.print(
            f"{self.job.name}: {ended} after {seconds:.0f} s{way_out}.",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


def run_jobs(
    jobs: Sequence[Job],
    setting: Setting,
    *,
    data: Path,
    folder: Path,
    device: str,
    workers: int,
    read: ReadData = cifar10,
    console: Console | None = None,
) -> list[Result]:
    """The results of all jobs that can be done, in their order.

    A job that fails is reported with its name, and its result is missing. Each job has a process
    of its own with one thread, so that not even one that is killed takes others with it.

    Args:
        jobs: what to do; those that are done already only give their results.
        setting: the same for all.
        data: as for :func:`run_job`, like ``folder`` and ``device``.
        folder: one for all.
        device: one for all.
        workers: processes at a time.
        read: a function of a module, which processes can import.
        console: told of every job that ends; by default on the error stream.
    """
    _check(jobs, workers)
    order = _Order(setting, data, folder, device, read)
    _run_all(
        deque(job for job in jobs if _stored(job, setting, folder) is None),
        order, workers, console or Console(stderr=True),
    )  # fmt: skip
    found = (_stored(job, setting, folder) for job in jobs)
    return [result for result in found if result is not None]


def _check(jobs: Sequence[Job], workers: int) -> None:
    if workers < 1:
        raise InputError(f"workers: expected at least 1, got {workers}.")
    names = [job.name for job in jobs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"jobs: {', '.join(twice)} would be run twice. List each job once.")


def _run_all(waiting: deque[Job], order: _Order, workers: int, console: Console) -> None:
    running: dict[Any, _Running] = {}  # by what tells that a process has ended
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _start(waiting.popleft(), order)
                running[started.process.sentinel] = started
            for sentinel in wait(list(running)):
                ended = running.pop(sentinel)
                ended.process.join()
                ended.report(console)
    finally:  # Ctrl-C: what is on the disk is whole, and jobs go on from there
        for left in running.values():
            left.process.terminate()
            left.process.join()


def _start(job: Job, order: _Order) -> _Running:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    process = context.Process(target=_run_alone, args=(job, order), name=job.name)
    process.start()
    return _Running(job, process, time.perf_counter())


def _run_alone(job: Job, order: _Order) -> None:
    torch.set_num_threads(1)
    run_job(
        job, order.setting, data=order.data, folder=order.folder, device=order.device,
        read=order.read,
    )  # fmt: skip
