"""Run directories as growing leaves them, made up in milliseconds, for tests of the report."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

UNITS = {"features.0": 8, "features.3": 8, "features.6": 12, "classifier.0": 16}

Json = dict[str, Any]


@dataclass
class FakeRun:
    """A net that grows: widths and lineage are consistent, losses and gains look like real ones."""

    name: str = "mine"
    method: str = "splitting"
    units: Mapping[str, int] = field(default_factory=lambda: dict(UNITS))
    phases: int = 6
    fraction: float = 0.3
    iterations: int = 300
    stopped: str | None = "params"
    quality: float = 1.0
    seed: int = 0

    def history(self) -> Json:
        rng = random.Random(self.seed)
        neurons = {unit: _founders(width) for unit, width in self.units.items()}
        phases = [self._phase(number, neurons, rng) for number in range(self.phases)]
        return {
            "format": "splitgrow-history-1",
            "name": self.name,
            "method": self.method,
            "seed": self.seed,
            "stopped": self.stopped,
            "phases": phases,
            "neurons": neurons,
        }

    def _phase(self, number: int, neurons: dict[str, list[Json]], rng: random.Random) -> Json:
        widths = {u: sum(n["ended"] is None for n in ns) for u, ns in neurons.items()}
        floor = self._floor(number)
        split = None if number == self.phases - 1 else self._split(number, neurons, rng)
        return {
            "phase": number,
            "params": sum(90 * w for w in widths.values()) + _pairs(widths),
            "macs": 3_000 * _pairs(widths),
            "widths": widths,
            "loss": floor,
            "metrics": {"accuracy": 1 - 0.35 * floor - 0.01 * rng.random()},
            "seconds": {"train": 11.0 + rng.random(), "score": 0.9, "split": 0.1},
            "curve": self._curve(number, rng),
            "split": split,
        }

    def _floor(self, number: int) -> float:
        """The loss at the end of a phase."""
        return 0.04 + 0.8 * math.exp(-0.5 * self.quality * (number + 1))

    def _curve(self, number: int, rng: random.Random) -> list[list[float]]:
        start = 2.3 if number == 0 else self._floor(number - 1) * 0.96
        end, length, first = self._floor(number), self.iterations, number * self.iterations
        return [
            [
                first + k,
                (end + (start - end) * math.exp(-5 * k / length)) * (1 + 0.08 * rng.gauss(0, 1)),
            ]
            for k in range(length)
        ]

    def _split(self, number: int, neurons: dict[str, list[Json]], rng: random.Random) -> Json:
        before = self._floor(number)
        events = [
            _divide(unit, lineage, neuron, number, rng)
            for unit, lineage in neurons.items()
            for neuron in _chosen(lineage, self.fraction, rng)
        ]
        predicted = -0.05 * before * self.quality
        shares = sum(event["predicted"] for event in events)
        for event in events:
            event["predicted"] *= predicted / shares
        measured = predicted * math.exp(rng.gauss(0, 0.35))
        return {
            "step": 0.02,
            "relative": True,
            "predicted": predicted,
            "measured": measured,
            "loss_before": before,
            "loss_after": before + measured,
            "parity": 1e-7,
            "neurons": events,
        }

    def write(self, root: Path, directory: str | None = None) -> Path:
        """Write the run under a root, as growing does: a history before and after each split."""
        run = root / (directory or self.name)
        history = self.history()
        for number in range(self.phases):
            stopped = self.stopped if number == self.phases - 1 else None
            part = {**history, "phases": history["phases"][: number + 1], "stopped": stopped}
            *before, newest = part["phases"]
            write_history(run, {**part, "phases": [*before, {**newest, "split": None}]}, number)
            if newest["split"]:
                write_history(run, part, number, "-grown")
        settings = {"method": self.method, "seed": self.seed, "status": "finished"}
        policy = {"fraction": self.fraction, "threshold": 0.0}
        text = json.dumps({**settings, "policy": policy, "versions": {"splitgrow": "0.1.0"}})
        (run / "run.json").write_text(text)
        return run


def write_history(run: Path, history: Json, number: int = 0, suffix: str = "") -> Path:
    """Write one phase of a run."""
    phase = run / f"phase-{number:04d}{suffix}"
    phase.mkdir(parents=True, exist_ok=True)
    (phase / "history.json").write_text(json.dumps(history))
    return run


def bare_history(**changes: Any) -> Json:
    """The least a history can have: one phase, no metric, no curve, no split, no neuron."""
    phase = {"phase": 0, "params": None, "macs": None, "widths": {}, "loss": None}
    phase |= {"metrics": {}, "seconds": {}, "curve": [], "split": None}
    history = {"format": "splitgrow-history-1", "name": "bare", "method": "splitting", "seed": 0}
    return {**history, "stopped": None, "phases": [phase], "neurons": {}, **changes}


def _founders(width: int) -> list[Json]:
    return [{"id": k, "parent": None, "born": 0, "ended": None, "place": k} for k in range(width)]


def _pairs(widths: Mapping[str, int]) -> int:
    sizes = [3, *widths.values(), 10]
    return sum(9 * a * b for a, b in pairwise(sizes))


def _chosen(lineage: list[Json], fraction: float, rng: random.Random) -> list[Json]:
    """Some of the living, and rather the first of them: families differ in size."""
    alive = [neuron for neuron in lineage if neuron["ended"] is None]
    count = max(1, round(fraction * len(alive)))
    return sorted(alive, key=lambda n: (n["parent"] or n["id"]) * rng.random())[:count]


def _divide(unit: str, lineage: list[Json], neuron: Json, number: int, rng: random.Random) -> Json:
    first = len(lineage)
    neuron["ended"] = number
    for k, place in enumerate((neuron["place"], first)):
        child = {"id": first + k, "parent": neuron["id"], "born": number + 1}
        lineage.append({**child, "ended": None, "place": place})
    lambda_ = -0.3 * math.exp(rng.gauss(0, 0.8))
    predicted = lambda_ * (0.2 + rng.random())  # shares, for now
    children = [first, first + 1]
    event = {"unit": unit, "parent": neuron["id"], "children": children, "lambda": lambda_}
    return {**event, "step": 0.02 * (0.5 + rng.random()), "predicted": predicted}
