"""Keyword spotting on Speech Commands: DS-CNN grown from 16 channels, and its rivals (Table 1).

Growth by splitting (by lambda alone, and per MAC), by random splits, nets of uniform width from
scratch, pruning by batch norms from the full DS-CNN, and the seven nets of "Hello Edge". Where one
net of several is chosen, it is by validation; test accuracies are only reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

from rich.table import Table

from splitgrow.paper import jobs as shared
from splitgrow.paper.job_runs import Order, Result
from splitgrow.paper.jobs import FULL, GROWN, PRUNED, UNIFORM, Point
from splitgrow.paper.kws_bench import GROWABLE, Setting
from splitgrow.paper.kws_kept import ORIGIN, kept_bench
from splitgrow.paper.speech_data import speech_commands
from splitgrow.paper.speech_parts import SpeechData
from splitgrow.zoo.kws import HELLO_EDGE

EXPERIMENT = "kws"
COMPARED = ("splitting", "bn", "random", "splitting-macs", "uniform", "uniform-long")
SIZES = ("params", "macs", "operations")


@dataclass(frozen=True)
class Job(shared.Job):
    """One row of nets: of DS-CNN by any method, of the others the ``"full"`` net alone.

    The activation is that of DS-CNN; the others have their own.
    """

    ARCHS: ClassVar[Sequence[str]] = tuple(HELLO_EDGE)
    METHODS: ClassVar[Sequence[str]] = (*GROWN, *UNIFORM, *PRUNED, FULL)

    def _problems(self) -> list[str]:
        wrong = super()._problems()
        if self.arch in self.ARCHS and self.arch != GROWABLE and self.method != FULL:
            wrong.append(f'method: {self.arch} is there at full size only; take "{FULL}"')
        return wrong


def study(seeds: Iterable[int] = range(5)) -> list[Job]:
    """The jobs of the whole study, seed by seed, the most important ones of each first."""
    listed: list[Job] = []
    for seed in seeds:
        listed += [Job(GROWABLE, method, seed=seed) for method in COMPARED]
        listed += [Job(arch, FULL, seed=seed) for arch in Job.ARCHS]
    return listed


def order(
    setting: Setting,
    *,
    data: Path,
    folder: Path,
    device: str,
    read: Callable[[Path], SpeechData] | None = None,
    contents: str | None = None,
) -> Order:
    """What the jobs share, for ``job_runs.run_job`` and ``run_jobs``.

    Args:
        setting: how nets are trained, grown and pruned.
        data: the folder of the packed features or of the wav files of Speech Commands.
        folder: see :class:`splitgrow.paper.job_runs.Order`.
        device: ``"cuda"`` or ``"cpu"``.
        read: gives the clips in ``data``; by default ``reader(folder)``.
        contents: ``digest`` of these clips.
    """
    return Order(
        EXPERIMENT, setting, data, folder, device, read or reader(folder),
        partial(kept_bench, folder), ORIGIN, contents,
    )  # fmt: skip


def reader(folder: Path) -> Callable[[Path], SpeechData]:
    """Reads the data set; the features of wav files are kept in ``folder`` for all processes."""
    return partial(speech_commands, cache=folder / "cache")


# --- what came of it ----------------------------------------------------------------------------


def best(points: Sequence[Point]) -> Point:
    """The net with the highest validation accuracy; of equal ones, the smallest."""
    return max(points, key=lambda point: (point["validation"], -point["params"]))


def summary(jobs: Sequence[Result]) -> dict[str, list[dict[str, Any]]]:
    """Means over seeds: of the nets chosen by validation, and of every step of every method."""
    rows = _rows(jobs)
    return {
        "chosen": [
            {**head, **_means([best(job["points"]) for job in members])} for head, members in rows
        ],
        "nets": [
            {**head, "net": k, **_means(nets)}
            for head, members in rows
            for k, nets in _steps([job["points"] for job in members])
        ],
    }


def _rows(jobs: Sequence[Result]) -> list[tuple[dict[str, str], list[Result]]]:
    """The jobs that differ by their seed alone, and what they have in common."""
    found: dict[tuple[str, ...], list[Result]] = {}
    names = ("arch", "method", "after", "activation")
    for job in jobs:
        found.setdefault(tuple(job["job"][name] for name in names), []).append(job)
    return [(dict(zip(names, key, strict=True)), members) for key, members in found.items()]


def _steps(rows: Sequence[Sequence[Point]]) -> list[tuple[int | str, list[Point]]]:
    """The first net of each seed, the second of each, as far as any goes; the finished ones."""
    finished = [point for row in rows for point in row if point.get("finished")]
    phases = [[point for point in row if not point.get("finished")] for row in rows]
    longest = max(len(row) for row in phases)
    steps: list[tuple[int | str, list[Point]]] = [
        (k, [row[k] for row in phases if k < len(row)]) for k in range(longest)
    ]
    return [*steps, ("finished", finished)] if finished else steps


def _means(points: Sequence[Point]) -> dict[str, Any]:
    accuracies = [point["accuracy"] for point in points]
    return {
        "seeds": len(points),
        "accuracy": mean(accuracies),
        "deviation": stdev(accuracies) if len(points) > 1 else None,
        "validation": mean(point["validation"] for point in points),
        **{name: mean(point[name] for point in points) for name in SIZES},
    }


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """The summary for the terminal."""
    return [
        _table("Of each method, the net with the best validation accuracy", found["chosen"]),
        _table("Every net of every method", found["nets"]),
    ]


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    headers = ("net", "test %", "val. %", "params k", "MACs M", "ops M", "n")
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in rows:
        sizes = (row["params"] / 1e3, row["macs"] / 1e6, row["operations"] / 1e6)
        table.add_row(
            _name(row), _percent(row["accuracy"], row["deviation"]), _percent(row["validation"]),
            *(f"{size:.2f}" for size in sizes), str(row["seeds"]),
        )  # fmt: skip
    return table


def _name(row: Mapping[str, Any]) -> str:
    after = ", retrain" if row["after"] == "retrain" else ""
    number = f" {row['net']}" if "net" in row and row["method"] != FULL else ""
    return f"{row['arch']} {row['method']}{after}{number}"


def _percent(share: float, deviation: float | None = None) -> str:
    return f"{100 * share:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")
