"""Run seeds in processes, and keep what they found: one JSON file, the same for the same seeds."""

from __future__ import annotations

import json
import multiprocessing
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import splitgrow
from splitgrow.errors import InputError
from splitgrow.files import write_file

Run = dict[str, Any]  # what one seed gave, as JSON has it
Results = dict[str, Any]
DIGITS = 7  # of every number in the file


def collect(
    name: str,
    run_seed: Callable[[Any, int], Run],
    setting: Any,
    seeds: Sequence[int],
    workers: int,
    console: Console | None = None,
) -> Results:
    """The results of all seeds, in their order, whichever process is done first."""
    if not seeds or workers < 1:
        raise InputError(f"paper: expected seeds and workers, got {len(seeds)} and {workers}.")
    one = partial(_one_thread, run_seed, setting)
    return {
        "experiment": name,
        "settings": asdict(setting),
        "seeds": list(seeds),
        "versions": {"splitgrow": splitgrow.__version__, "torch": torch.__version__,
                     "numpy": np.__version__},
        "runs": list(_shown(_mapped(one, seeds, workers), name, len(seeds), console)),
    }  # fmt: skip


def hardware(device: str) -> str:
    """The name of what computed."""
    return torch.cuda.get_device_name() if device == "cuda" else platform.machine()


def _one_thread(run_seed: Callable[[Any, int], Run], setting: Any, seed: int) -> Run:
    """One seed with one thread: sums over threads would depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {"seed": seed, **rounded(run_seed(setting, seed))}
    finally:
        torch.set_num_threads(threads)


def _mapped(one: Callable[[int], Run], seeds: Sequence[int], workers: int) -> Iterator[Run]:
    if min(workers, len(seeds)) == 1:
        yield from map(one, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(seeds)), mp_context=context) as pool:
        yield from pool.map(one, seeds)


def _shown(runs: Iterator[Run], name: str, count: int, console: Console | None) -> Iterator[Run]:
    if console is None:
        yield from runs
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("seeds"), TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console) as progress:
        yield from progress.track(runs, total=count, description=f"paper {name}")


def rounded(value: Any) -> Any:
    """Numbers to seven significant digits, in lists and dicts of any depth."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def to_text(results: Results) -> str:
    """The file's text: a line for each seed, so that two files can be compared by eye."""
    head = {key: value for key, value in results.items() if key != "runs"}
    lines = ",\n".join(json.dumps(run, allow_nan=False) for run in results["runs"])
    return f'{json.dumps(head, indent=1, allow_nan=False)[:-2]},\n "runs": [\n{lines}\n ]\n}}\n'


def save(results: Results, path: Path) -> None:
    """Write the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, to_text(results).encode())


def read(path: Path, experiment: str) -> Results:
    """Read the results of one experiment."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: no results to read ({error}). Make them with: splitgrow paper {experiment}"
        ) from error
    if not isinstance(found, dict) or found.get("experiment") != experiment:
        raise InputError(
            f"{path}: expected results of the experiment {experiment!r}. "
            f"Make them with: splitgrow paper {experiment}"
        )
    return found
