"""MobileNet and VGG19 on CIFAR-10: growth against pruning and against plain nets (Figure 3).

The study is a set of independent jobs, one method on one net with one seed each. They run side by
side, and an interrupted one goes on from its last net. Accuracies are reported, and never used to
choose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from splitgrow.paper import job_runs
from splitgrow.paper.cifar10_bench import Bench, Setting
from splitgrow.paper.cifar10_jobs import Job, jobs
from splitgrow.paper.cifar10_nets import build
from splitgrow.paper.data import DataSet, cifar10
from splitgrow.paper.job_runs import Order, Result, key_of

__all__ = ["Job", "Setting", "build", "jobs", "key_of", "run_job", "run_jobs"]

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
    """The nets of a job, from its file if that is there, and else computed; see ``Order``."""
    return job_runs.run_job(job, Order("cifar10", setting, data, folder, device, read, Bench))


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
    """The results of all jobs that can be done, in their order: see ``job_runs.run_orders``."""
    return run_studies(
        jobs, {folder: setting}, data=data, device=device, workers=workers, read=read,
        console=console,
    )  # fmt: skip


def run_studies(
    jobs: Sequence[Job],
    settings: Mapping[Path, Setting],
    *,
    data: Path,
    device: str,
    workers: int,
    read: ReadData = cifar10,
    console: Console | None = None,
) -> list[Result]:
    """The same jobs with each of several settings, whose results are in different folders."""
    orders = [
        Order("cifar10", setting, data, folder, device, read, Bench)
        for folder, setting in settings.items()
    ]
    todo = [(job, order) for job in jobs for order in orders]
    return job_runs.run_orders(todo, workers, console)
