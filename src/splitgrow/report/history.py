"""Runs as they lie on disk: the newest ``phase-*/history.json``, and ``run.json``.

Numbers that are missing, null or not finite become None, so that a run that went wrong can still
be looked at. Only a file that is no history at all is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitgrow.errors import InputError

FORMAT = "splitgrow-history-1"
_PHASE = re.compile(r"phase-([0-9]+)(-grown)?")


@dataclass(frozen=True)
class SplitNeuron:
    """One neuron that was split, or one that was added (``parent`` is None)."""

    unit: str
    parent: int | None
    children: tuple[int, ...]
    lambda_: float | None
    step: float | None
    predicted: float | None


@dataclass(frozen=True)
class Split:
    """The split at the end of a phase, and the change of loss it predicted and made."""

    step: float | None
    relative: bool
    predicted: float | None
    measured: float | None
    before: float | None
    after: float | None
    neurons: tuple[SplitNeuron, ...]


@dataclass(frozen=True)
class Phase:
    """One phase: the net after its training, and the split that ended it, if one did."""

    number: int
    params: int | None
    macs: int | None
    widths: Mapping[str, int]
    loss: float | None
    metrics: Mapping[str, float | None]
    seconds: float
    curve: tuple[tuple[int, float | None], ...]
    split: Split | None


@dataclass(frozen=True)
class Neuron:
    """One neuron of a unit, from the phase it was born in to the one it was split in."""

    id: int
    parent: int | None
    born: int
    ended: int | None


@dataclass(frozen=True)
class Run:
    """Everything the report knows about one run."""

    directory: Path
    name: str
    method: str
    seed: int | None
    stopped: str | None
    phases: tuple[Phase, ...]
    neurons: Mapping[str, tuple[Neuron, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> Phase:
        """The newest phase."""
        return self.phases[-1]

    @property
    def splits(self) -> list[tuple[Phase, Split]]:
        """The phases that ended in a split."""
        return [(phase, phase.split) for phase in self.phases if phase.split]


def read_run(directory: Path) -> Run:
    """The run in a directory.

    Raises:
        InputError: There is no run in it, or its files cannot be read.
    """
    file = _newest_history(directory)
    history = _load(file)
    if not isinstance(history, dict) or history.get("format") != FORMAT:
        raise InputError(
            f"{file}: not a history of the format {FORMAT!r}. "
            "Read the run with the version of splitgrow that wrote it."
        )
    settings = _load(directory / "run.json") if (directory / "run.json").is_file() else {}
    try:
        return _run(directory, history, settings if isinstance(settings, dict) else {})
    except (AttributeError, LookupError, TypeError) as error:
        raise InputError(
            f"{file}: the history is damaged ({error}). Remove {file.parent.name} to go back to "
            "the phase before it."
        ) from error


def _newest_history(directory: Path) -> Path:
    """The history of the newest whole phase."""
    if not directory.is_dir():
        raise InputError(f"{directory}: there is no such directory. Name the run_dir of a run.")
    found = [(_age(path), path) for path in directory.glob("phase-*/history.json")]
    whole = [(age, path) for age, path in found if age is not None]
    if whole:
        return max(whole)[1]
    raise InputError(f"{directory}: no whole phase is in this directory. {_way_out(directory)}")


def _age(history: Path) -> tuple[int, bool] | None:
    """Phase, and whether it has been split; None where the directory is a temporary one."""
    match = _PHASE.fullmatch(history.parent.name)
    return (int(match[1]), match[2] is not None) if match else None


def _way_out(directory: Path) -> str:
    """What to name instead of a directory without phases."""
    if (directory / "history.json").is_file():
        return f"It is one phase of a run: name {directory.parent}."
    inside = sorted({str(path.parent.parent) for path in directory.glob("*/phase-*/history.json")})
    if inside:
        return f"Name the runs inside it: {' '.join(inside)}."
    return "Name the run_dir of a run, and wait until its first phase has ended."


def _load(file: Path) -> Any:
    """JSON with NaN and the infinities read as null."""
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{file}: cannot be read as JSON ({error}). Restore the file, or remove "
            f"{file.parent.name if file.name == 'history.json' else file.name}."
        ) from error


def _run(directory: Path, history: dict[str, Any], settings: dict[str, Any]) -> Run:
    phases = tuple(_phase(index, entry) for index, entry in enumerate(history["phases"]))
    if not phases:
        raise InputError(f"{directory}: its history has no phase. {_way_out(directory)}")
    units = history.get("neurons") or {}
    return Run(
        directory=directory,
        name=_text(history.get("name")) or directory.resolve().name,
        method=_text(history.get("method")) or _text(settings.get("method")) or "unknown",
        seed=_whole(history.get("seed")),
        stopped=_text(history.get("stopped")),
        phases=phases,
        neurons={str(unit): _neurons(entries) for unit, entries in units.items()},
        settings=settings,
    )


def _phase(index: int, entry: dict[str, Any]) -> Phase:
    number = _whole(entry.get("phase"))
    widths = {str(unit): _whole(width) for unit, width in (entry.get("widths") or {}).items()}
    seconds = [_number(value) or 0.0 for value in (entry.get("seconds") or {}).values()]
    return Phase(
        number=index if number is None else number,
        params=_whole(entry.get("params")),
        macs=_whole(entry.get("macs")),
        widths={unit: width for unit, width in widths.items() if width is not None},
        loss=_number(entry.get("loss")),
        metrics={str(k): _number(v) for k, v in (entry.get("metrics") or {}).items()},
        seconds=sum(seconds),
        curve=tuple(_curve(entry.get("curve") or [])),
        split=_split(entry["split"]) if entry.get("split") is not None else None,
    )


def _curve(points: list[Any]) -> list[tuple[int, float | None]]:
    """The points in the order of their iterations."""
    read = [(_whole(point[0]), _number(point[1])) for point in points]
    return sorted(((x, y) for x, y in read if x is not None), key=lambda point: point[0])


def _split(entry: dict[str, Any]) -> Split:
    return Split(
        step=_number(entry.get("step")),
        relative=bool(entry.get("relative")),
        predicted=_number(entry.get("predicted")),
        measured=_number(entry.get("measured")),
        before=_number(entry.get("loss_before")),
        after=_number(entry.get("loss_after")),
        neurons=tuple(_split_neuron(neuron) for neuron in entry.get("neurons") or []),
    )


def _split_neuron(entry: dict[str, Any]) -> SplitNeuron:
    children = (_whole(child) for child in entry.get("children") or [])
    return SplitNeuron(
        unit=str(entry.get("unit")),
        parent=_whole(entry.get("parent")),
        children=tuple(child for child in children if child is not None),
        lambda_=_number(entry.get("lambda")),
        step=_number(entry.get("step")),
        predicted=_number(entry.get("predicted")),
    )


def _neurons(entries: list[dict[str, Any]]) -> tuple[Neuron, ...]:
    """The neurons of a unit; of two with the same id the first is kept."""
    read = {}
    for entry in entries:
        identity = _whole(entry.get("id"))
        if identity is not None and identity not in read:
            read[identity] = Neuron(
                id=identity,
                parent=_whole(entry.get("parent")),
                born=_whole(entry.get("born")) or 0,
                ended=_whole(entry.get("ended")),
            )
    return tuple(read.values())


def _number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _whole(value: object) -> int | None:
    """A whole number, or None."""
    number = _number(value)
    return int(number) if number is not None and number.is_integer() else None


def _text(value: object) -> str | None:
    """A string that is not empty, or None."""
    return value if isinstance(value, str) and value else None
