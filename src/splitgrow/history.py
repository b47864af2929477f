"""History: what happened in a growing run, and where every neuron comes from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from splitgrow.errors import CheckpointError
from splitgrow.units import Unit

FORMAT = "splitgrow-history-1"


@dataclass(frozen=True)
class Neuron:
    """One neuron, from the phase it was born in to the phase it was split in.

    Attributes:
        id: its number, unique within its unit and never given again.
        parent: the neuron it descends from; None for those of the seed and for new ones.
        born: the first phase it is trained in.
        ended: the phase at the end of which it was split; None while it lives.
        place: its index in the unit.
    """

    id: int
    parent: int | None
    born: int
    ended: int | None
    place: int


@dataclass(frozen=True)
class Event:
    """One neuron that became two, or one that was added (``parent`` is None)."""

    unit: str
    parent: int | None
    children: tuple[int, ...]
    lambda_: float | None
    step: float | None
    predicted: float | None


@dataclass(frozen=True)
class Split:
    """What happened at the end of a phase.

    Attributes:
        step: the step taken; ``relative`` to each neuron's length, or absolute.
        predicted: change of the loss by theory, None for methods without one.
        measured: change of the mean loss over the scoring batches.
        parity: largest change of an output before the offspring parted.
        neurons: what became of which neuron.
    """

    step: float | None
    relative: bool
    predicted: float | None
    measured: float | None
    loss_before: float | None
    loss_after: float | None
    parity: float | None
    neurons: tuple[Event, ...]


@dataclass(frozen=True)
class PhaseRecord:
    """One phase: the net it trained, how well that does, and the split that followed.

    Attributes:
        loss: mean loss over the scoring batches after training.
        metrics: what ``evaluate`` reported.
        seconds: time spent in ``train``, ``evaluate``, ``score`` and ``split``.
        curve: (iteration over the whole run, training loss), as far as it was logged.
        finish: is this the training after the last split, at the end of the run?
    """

    phase: int
    params: int
    macs: int
    widths: dict[str, int]
    loss: float
    metrics: dict[str, float]
    seconds: dict[str, float]
    curve: tuple[tuple[int, float], ...]
    iterations: int = 0
    split: Split | None = None
    finish: bool = False


@dataclass
class History:
    """All phases of a run so far, and the family tree of its neurons.

    Attributes:
        stopped: why the run ended: ``"phases"``, ``"params"``, ``"macs"``, ``"metric"``,
            ``"stable"`` (no neuron has a splitting index below the threshold), ``"policy"`` (its
            round_to, count, max_per_unit or max_growth let no neuron grow) or ``"refused"`` (no
            step lowers the loss); None while it has not.
        neurons: by unit, every neuron that ever was, in order of birth.
    """

    name: str
    method: str
    seed: int
    stopped: str | None = None
    phases: list[PhaseRecord] = field(default_factory=list)
    neurons: dict[str, list[Neuron]] = field(default_factory=dict)

    @property
    def events(self) -> list[tuple[int, Event]]:
        """(phase, event) of every neuron that was ever split or added."""
        return [(p.phase, e) for p in self.phases if p.split is not None for e in p.split.neurons]

    @property
    def iterations(self) -> int:
        """Training iterations that were logged so far."""
        return sum(record.iterations for record in self.phases)

    def alive(self, unit: str) -> dict[int, Neuron]:
        """A unit's neurons of today, by place."""
        return {n.place: n for n in self.neurons.get(unit, ()) if n.ended is None}

    def ancestors(self, unit: str, neuron: int) -> list[Neuron]:
        """A neuron's line, from itself to the one in the seed."""
        by_id = {n.id: n for n in self.neurons[unit]}
        line = [by_id[neuron]]
        while line[-1].parent is not None:
            line.append(by_id[line[-1].parent])
        return line

    def begin(self, unit: str, width: int, phase: int) -> None:
        """A unit that was not there before: each of its neurons founds a line."""
        if unit not in self.neurons:
            self.neurons[unit] = [Neuron(i, None, phase, None, i) for i in range(width)]

    def divide(self, unit: str, place: int, twin: int, phase: int) -> tuple[int, tuple[int, int]]:
        """The neuron at a place becomes two, there and at the twin's; ids of parent, children."""
        parent = self.alive(unit)[place]
        listed = self.neurons[unit]
        listed[listed.index(parent)] = replace(parent, ended=phase)
        first, second = (self._add(unit, parent.id, phase, p) for p in (place, twin))
        return parent.id, (first, second)

    def add(self, unit: str, place: int, phase: int) -> int:
        """A neuron without a parent; its id."""
        return self._add(unit, None, phase, place)

    def _add(self, unit: str, parent: int | None, phase: int, place: int) -> int:
        listed = self.neurons[unit]
        listed.append(Neuron(len(listed), parent, phase + 1, None, place))
        return listed[-1].id

    # ---- as JSON ------------------------------------------------------------------------------

    def to_json(self) -> str:
        """As it is kept in a run's folder; numbers that are not finite become null."""
        phases = [{**asdict(p), "split": _split_to_json(p.split)} for p in self.phases]
        neurons = {u: [asdict(n) for n in listed] for u, listed in self.neurons.items()}
        data = {
            "format": FORMAT, "name": self.name, "method": self.method, "seed": self.seed,
            "stopped": self.stopped, "phases": phases, "neurons": neurons,
        }  # fmt: skip
        return json.dumps(_finite(data), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, place: str) -> History:
        """Read it back; ``place`` names the file in errors."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {FORMAT!r}")
            history = cls(data["name"], data["method"], data["seed"], data["stopped"])
            history.phases = [_phase_from_json(p) for p in data["phases"]]
            history.neurons = {u: [Neuron(**n) for n in ns] for u, ns in data["neurons"].items()}
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{place} is not a history that this version of splitgrow can read ({error})."
            ) from error
        return history


def _split_to_json(split: Split | None) -> dict[str, Any] | None:
    if split is None:
        return None
    events = [asdict(event) for event in split.neurons]
    for event in events:
        event["lambda"] = event.pop("lambda_")
    return {**asdict(split), "neurons": events}


def _phase_from_json(data: Mapping[str, Any]) -> PhaseRecord:
    split = data["split"]
    if split is not None:
        split = Split(**{**split, "neurons": tuple(map(_event_from_json, split["neurons"]))})
    curve = tuple((int(i), float("nan") if v is None else float(v)) for i, v in data["curve"])
    metrics = {k: float("nan") if v is None else v for k, v in data["metrics"].items()}
    return PhaseRecord(**{**data, "split": split, "curve": curve, "metrics": metrics})


def _event_from_json(data: Mapping[str, Any]) -> Event:
    named = {"lambda_" if key == "lambda" else key: value for key, value in data.items()}
    return Event(**{**named, "children": tuple(data["children"])})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return value


def lasting_names(units: Iterable[Unit]) -> dict[str, str]:
    """For each unit's name, one that stays the same while the net grows.

    A part of a layer is named by its range, ``block[8:16]``, which moves as its neighbours grow. It
    goes down in history as ``block#1``, by its number among the parts of that layer.
    """
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for unit in units:
        base, bracket, _ = unit.name.partition("[")
        names[unit.name] = f"{base}#{counts[base]}" if bracket else unit.name
        counts[base] += 1
    return names
