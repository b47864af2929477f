"""Run the jobs of a study: one after another or side by side, each with a file of its own.

Jobs that are done are read, and an interrupted one goes on from its last net.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
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
from splitgrow.paper.bench import Bench
from splitgrow.paper.job_match import differences, key_of_fields, words_of
from splitgrow.paper.job_study import Study, Tell
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
        setting: a frozen dataclass; ``run_job`` replaces a file made with another one, where
            several jobs are run it is refused.
        data: the folder of the data set.
        folder: gets ``jobs/<name>.json`` of what is done, and meanwhile ``runs/``, which an
            interrupted job goes on from.
        device: ``"cuda"`` or ``"cpu"``.
        read: gives what is in ``data``; like ``bench`` of a module, so that processes can import
            it.
        bench: makes the bench from the setting, what was read, and the device.
        origin: a function ``package.module:name`` that makes an experiment of a run's folder, so
            that ``splitgrow export`` can build grown nets again.
        contents: a digest of what is in ``data``, kept with each job, so that jobs on other data
            are not taken for these; None: not told.
    """

    experiment: str
    setting: Any
    data: Path
    folder: Path
    device: str
    read: Callable[[Path], Any]
    bench: Callable[[Any, Any, torch.device], Bench[Any]]
    origin: str | None = None
    contents: str | None = None

    def told(self, job: Job) -> Result:
        """What a job of this order is known by in its file."""
        data = {} if self.contents is None else {"data": self.contents}
        return {"job": asdict(job), "settings": asdict(self.setting), **data}


Ordered = tuple[Job, Order]


def run_job(job: Job, order: Order, tell: Tell | None = None) -> Result:
    """The nets of a job, from its file if that is there, and else computed.

    ``tell`` is told of each net as it is computed; see :class:`splitgrow.paper.job_study.Study`.
    """
    setting, folder, device = order.setting, order.folder, order.device
    found = _stored(job, order)
    if found is not None:
        return found
    with full_precision():
        bench = order.bench(setting, order.read(order.data), torch.device(device))
        study = Study(job, bench, runs_of(setting, folder) / job.name, tell)
        points = study.points()
    if order.origin is not None:
        RunFolder(study.folder).name_origin(order.origin)
    return _store(
        {
            "experiment": order.experiment,
            **order.told(job),
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


def _file_of(job: Job, folder: Path) -> Path:
    return folder / "jobs" / f"{job.name}.json"


def _stored(job: Job, order: Order) -> Result | None:
    """What a job gave with these settings, if it is done."""
    try:
        found: Result = json.loads(_file_of(job, order.folder).read_text())
        wanted = order.told(job)
        same = found["job"] == wanted["job"] and not differences(found, wanted)
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

    def report(self, console: Console, count: str) -> None:
        """Say how a process ended, and which of how many; the error it has written on its own."""
        seconds, code = time.perf_counter() - self.start, self.process.exitcode
        ended = "done" if code == 0 else f"failed with exit code {code}"
        way_out = (
            "" if code == 0 else ": its error is above. Run it again to go on from its last net"
        )
        console.print(
            f"{self.job.name}: {ended} after {seconds:.0f} s ({count}){way_out}.",
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
    of its own with one thread, so that not even one that is killed takes others with it. Where a
    folder has jobs of other settings or data, nothing is run.

    Args:
        todo: what to do; jobs that are done already only give their results.
        workers: processes at a time.
        console: told of every job that ends; by default on the error stream.
    """
    console = console or Console(stderr=True)
    _check(todo, workers)
    _check_folders(todo)
    waiting = deque((job, order) for job, order in todo if _stored(job, order) is None)
    _say_what_is_done(len(todo) - len(waiting), len(todo), console)
    _run_all(waiting, workers, console)
    found = (_stored(job, order) for job, order in todo)
    return [result for result in found if result is not None]


def _check(todo: Sequence[Ordered], workers: int) -> None:
    if workers < 1:
        raise InputError(f"workers: expected at least 1, got {workers}.")
    files = [_file_of(job, order.folder) for job, order in todo]
    if twice := sorted({file.stem for file in files if files.count(file) > 1}):
        raise InputError(f"jobs: {', '.join(twice)} would be run twice. List each job once.")


def _check_folders(todo: Sequence[Ordered]) -> None:
    """Before anything runs: would the results stand beside, or replace, others of another kind?"""
    for folder in dict.fromkeys(order.folder for _, order in todo):
        wanted = [order.told(job) for job, order in todo if order.folder == folder]
        for path, found in _readable(folder):
            apart = next(filter(None, (differences(found, each) for each in wanted)), None)
            if apart:
                raise InputError(
                    f"{path} was run with another setting ({words_of(apart, 'there', 'now')}), and "
                    f"jobs of both do not compare; nothing was run. Choose another --folder, or "
                    f"delete {path.parent}."
                )


def _readable(folder: Path) -> Iterator[tuple[Path, Result]]:
    """The jobs that are done. A damaged file is none, and is replaced."""
    for path in sorted((folder / "jobs").glob("*.json")):
        try:
            found = json.loads(path.read_text())
            whole = isinstance(found["settings"], dict) and isinstance(found["job"]["method"], str)
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if whole:
            yield path, found


def _say_what_is_done(done: int, count: int, console: Console) -> None:
    if done:
        left = "; there is nothing to run" if done == count else ""
        console.print(f"{done} of {count} jobs are done already{left}.", highlight=False)


def _run_all(waiting: deque[Ordered], workers: int, console: Console) -> None:
    running: dict[Any, _Running] = {}  # by what tells that a process has ended
    count, ended = len(waiting), 0
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                started = _start(*waiting.popleft())
                running[started.process.sentinel] = started
            for sentinel in wait(list(running)):
                gone, ended = running.pop(sentinel), ended + 1
                gone.process.join()
                gone.report(console, f"{ended} of {count}")
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from the last net of each job.")
        raise
    finally:  # what is on the disk is whole, and jobs go on from there
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
    run_job(job, order, partial(_tell, job.name))


def _tell(name: str, number: int, params: int, metrics: Mapping[str, float]) -> None:
    """A line for each net, so that hours of training are not silent."""
    Console(stderr=True).print(
        f"{name}: net {number + 1}, {params:,} parameters, "
        f"{100 * metrics['validation']:.1f}% on validation",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


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
    for one, other in combinations(found, 2):
        if apart := differences(one, other):
            raise InputError(
                f"{place}: these jobs were run with different settings "
                f"({words_of(apart, 'in one', 'in another')}), and do not compare. Run each "
                "setting with a --folder of its own."
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
    found = [job for job in todo if job.arch in (archs or [job.arch])
             and job.method in (methods or [job.method])]  # fmt: skip
    if not found:
        there = dict.fromkeys(job.method for job in todo if job.arch in (archs or ()))
        nets = dict.fromkeys(job.arch for job in todo if job.method in (methods or ()))
        raise InputError(
            f"--arch {', '.join(archs or ())} --method {', '.join(methods or ())}: there is no job "
            f"of both. There is {', '.join(there)} of that net, and that method of "
            f"{', '.join(nets)}."
        )
    return found
