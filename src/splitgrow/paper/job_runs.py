"""Run the jobs of a study: one after another or side by side, each with a file of its own.

Jobs that are done are read, and an interrupted one goes on from its last net.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import numpy as np
import torch
from rich.console import Console

import splitgrow
from splitgrow.errors import InputError
from splitgrow.files import write_file
from splitgrow.paper.bench import LATER, ONLY, Bench
from splitgrow.paper.job_study import Study
from splitgrow.paper.jobs import Job
from splitgrow.paper.memory import keep_freed_memory
from splitgrow.paper.results import hardware, rounded
from splitgrow.paper.training import full_precision
from splitgrow.runs import RunFolder

Result = dict[str, Any]  # one job, as JSON has it
AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True)
class Order:
    """What every job of a run shares.

    Args:
        experiment: the name of the study, also that of its command.
        setting: a frozen dataclass; a file made with another one is replaced.
        data: the folder of the data set.
        folder: gets ``jobs/<name>.json`` of what is done, and meanwhile ``runs/``, which an
            interrupted job goes on from.
        device: ``"cuda"`` or ``"cpu"``.
        read: gives what is in ``data``; like ``bench`` of a module, so that processes can import
            it.
        bench: makes the bench from the setting, what was read, and the device.
        origin: a function ``package.module:name`` that makes an experiment of a run's folder, so
            that ``splitgrow export`` can build grown nets again.
    """

    experiment: str
    setting: Any
    data: Path
    folder: Path
    device: str
    read: Callable[[Path], Any]
    bench: Callable[[Any, Any, torch.device], Bench[Any]]
    origin: str | None = None


Ordered = tuple[Job, Order]


def run_job(job: Job, order: Order) -> Result:
    """The nets of a job, from its file if that is there, and else computed."""
    setting, folder, device = order.setting, order.folder, order.device
    found = _stored(job, setting, folder)
    if found is not None:
        return found
    with full_precision():
        bench = order.bench(setting, order.read(order.data), torch.device(device))
        study = Study(job, bench, runs_of(setting, folder) / job.name)
        points = study.points()
    if order.origin is not None:
        RunFolder(study.folder).name_origin(order.origin)
    return _store(
        {
            "experiment": order.experiment,
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


def runs_of(setting: Any, folder: Path) -> Path:
    """The folder of what is computed with a setting: a folder in it for each job."""
    return folder / "runs" / key_of(setting)


def key_of(setting: Any) -> str:
    """Names the folder of what is computed with a setting."""
    return key_of_fields(asdict(setting))


def key_of_fields(settings: Mapping[str, Any]) -> str:
    """The same, from a result's settings: an older version may have had fewer."""
    return sha256(json.dumps(_told(settings), sort_keys=True).encode()).hexdigest()[:8]


def _told(settings: Mapping[str, Any], *methods: str) -> dict[str, Any]:
    """What tells settings apart, whatever fields were known when they were written.

    Those that only other methods than ``methods`` look at do not.
    """
    kept = {k: v for k, v in settings.items() if k not in LATER or v != LATER[k]}
    return {k: v for k, v in kept.items() if all(m in ONLY.get(k, methods) for m in methods)}


def _compare(one: Result, other: Result) -> bool:
    """Were two jobs run alike, as far as both depend on the settings?"""
    methods = one["job"]["method"], other["job"]["method"]
    return _told(one["settings"], *methods) == _told(other["settings"], *methods)


def _file_of(job: Job, folder: Path) -> Path:
    return folder / "jobs" / f"{job.name}.json"


def _stored(job: Job, setting: Any, folder: Path) -> Result | None:
    """What a job gave with these settings, if it is done."""
    try:
        found = json.loads(_file_of(job, folder).read_text())
        wanted = {"job": asdict(job), "settings": asdict(setting)}
        same = found["job"] == wanted["job"] and _compare(found, wanted)
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
    jobs: Sequence[Job], order: Order, workers: int, console: Console | None = None
) -> list[Result]:
    """The results of all jobs that can be done, in their order: see ``run_orders``."""
    return run_orders([(job, order) for job in jobs], workers, console)


def run_orders(
    todo: Sequence[Ordered], workers: int, console: Console | None = None
) -> list[Result]:
    """The results of all jobs that can be done, in their order.

    A job that fails is reported with its name, and its result is missing. Each job has a process
    of its own with one thread, so that not even one that is killed takes others with it.

    Args:
        todo: what to do; jobs that are done already only give their results.
        workers: processes at a time.
        console: told of every job that ends; by default on the error stream.
    """
    _check(todo, workers)
    waiting = deque(
        (job, order) for job, order in todo if _stored(job, order.setting, order.folder) is None
    )
    _run_all(waiting, workers, console or Console(stderr=True))
    found = (_stored(job, order.setting, order.folder) for job, order in todo)
    return [result for result in found if result is not None]


def _check(todo: Sequence[Ordered], workers: int) -> None:
    if workers < 1:
        raise InputError(f"workers: expected at least 1, got {workers}.")
    files = [_file_of(job, order.folder) for job, order in todo]
    if twice := sorted({file.stem for file in files if files.count(file) > 1}):
        raise InputError(f"jobs: {', '.join(twice)} would be run twice. List each job once.")


def _run_all(waiting: deque[Ordered], workers: int, console: Console) -> None:
    running: dict[Any, _Running] = {}  # by what tells that a process has ended
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _start(*waiting.popleft())
                running[started.process.sentinel] = started
            for sentinel in wait(list(running)):
                ended = running.pop(sentinel)
                ended.process.join()
                ended.report(console)
    finally:  # Ctrl-C: what is on the disk is whole, and jobs go on from there
        for left in running.values():
            left.process.terminate()
            left.process.join()


def _start(job: Job, order: Order) -> _Running:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    process = context.Process(target=_run_alone, args=(job, order), name=job.name)
    process.start()
    return _Running(job, process, time.perf_counter())


def _run_alone(job: Job, order: Order) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if order.device == "cpu":
        keep_freed_memory()
    run_job(job, order)


def _end_with_parent() -> None:
    """Where the study is killed, its jobs do not go on unseen; what is on the disk is whole."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def finished(folder: Path, experiment: str) -> list[Result]:
    """The results of every job that is done, in the order of their names; all of one setting."""
    place = folder / "jobs"
    found = [json.loads(path.read_text()) for path in sorted(place.glob("*.json"))]
    if not found:
        raise InputError(
            f"{place}: no job is done yet. Run: splitgrow paper {experiment} --data DIR"
        )
    if not all(_compare(one, other) for one, other in combinations(found, 2)):
        raise InputError(
            f"{place}: these jobs were run with different settings, and do not compare. "
            "Run each setting with a --folder of its own."
        )
    return found


def chosen(
    todo: Sequence[AnyJob], archs: Sequence[str] | None, methods: Sequence[str] | None
) -> list[AnyJob]:
    """The jobs of some nets and methods; of all where none is named."""
    for option, named, known in (
        ("--arch", archs, {job.arch for job in todo}),
        ("--method", methods, {job.method for job in todo}),
    ):
        if wrong := sorted(set(named or ()) - known):
            raise InputError(
                f"{option}: expected {', '.join(sorted(known))}, got {', '.join(wrong)}."
            )
    return [job for job in todo if job.arch in (archs or [job.arch])
            and job.method in (methods or [job.method])]  # fmt: skip
