"""One seed of the prototypes: every method, and each split of the fifth step, as JSON has it."""

from __future__ import annotations

import base64
import copy
import zlib
from dataclasses import asdict
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitgrow.checkpoint import load
from splitgrow.grow import grow
from splitgrow.history import History
from splitgrow.methods import Method, RandomNeuron, Site
from splitgrow.paper.growth import entries_of
from splitgrow.paper.prototype_bench import UNIT, Batch, Bench, mean_over
from splitgrow.paper.prototype_net import PrototypeClassifier
from splitgrow.paper.results import Run
from splitgrow.phase import Phase
from splitgrow.plan import Entry, SplitPlan
from splitgrow.policy import Budget, Policy
from splitgrow.runs import RunFolder
from splitgrow.scores import Scores
from splitgrow.select import Candidate, Limits
from splitgrow.state import seeded


class LowestIndex(RandomNeuron):
    """The neurons with the lowest indexes whatever their sign, as in the authors' code."""

    def order(self, site: Site, scores: Scores) -> dict[str, list[Candidate]]:  # noqa: ARG002
        """By index."""
        return {UNIT: [Candidate(-entry.lambda_, entry) for entry in entries_of(scores)]}


# Each method: how it grows, and of which loss it takes the matrix.
GROWN: dict[str, tuple[str | Method, str]] = {
    "splitting": ("splitting", "full"),
    "classification": (LowestIndex(), "classification"),
    "random": ("random-neuron", "full"),
    "new": ("new", "full"),
}
METHODS = tuple(GROWN)
MATRICES = ("classification", "full")


class Study:
    """One seed: every method from the same first prototype, and each split of the fifth step."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.folder = bench, folder
        self.setting = bench.setting
        self.judge = bench.judge()

    def run(self) -> Run:
        """All methods, and what is asked of splitting alone."""
        runs = {name: self._grow(name) for name in METHODS}
        return {
            "judge": mean_over(self._judged, self.bench.test),
            "methods": runs,
            "fifth": self._fifth_step(),
        }

    def _judged(self, batch: Batch) -> Tensor:
        return (self.judge(batch[0]).argmax(1) == batch[1]).float().mean()

    def _path(self, method: str) -> Path:
        return self.folder / f"seed-{self.bench.seed}" / method

    def _grow(self, name: str) -> dict[str, Any]:
        method, matrix = GROWN[name]
        bench, net = self.bench, self.bench.new_net()
        result = grow(
            net, train=bench.train, loss_fn=bench.loss_fn(matrix), batches=bench.scored,
            evaluate=bench.evaluate, policy=Policy(count=1, step=self.setting.step),
            until=Budget(phases=self.setting.prototypes), method=method, exclude=bench.others(net),
            run_dir=self._path(name), resume=True, seed=bench.seed,
        )  # fmt: skip
        return self._told(name, result.history)

    def _told(self, name: str, history: History) -> dict[str, Any]:
        """A run in numbers: its curve, its tree, its pictures and how they are judged."""
        nets = [load(self.bench.new_net(), saved.model) for saved in
                RunFolder(self._path(name)).saved() if not saved.grown]  # fmt: skip
        events = dict(history.events)
        return {
            "stopped": history.stopped,
            "phases": [
                {
                    "prototypes": len(net.prototypes.theta),
                    **record.metrics,
                    "split": _event(events.get(record.phase)),
                    "ambiguity": self._ambiguity(net),
                    "lambda": {matrix: self._indexes(net, matrix) for matrix in MATRICES},
                    "pictures": packed(net.decoded()),
                }
                for record, net in zip(history.phases, nets, strict=True)
            ],
            "tree": [asdict(neuron) for neuron in history.neurons[UNIT]],
        }

    @torch.no_grad()
    def _ambiguity(self, net: PrototypeClassifier) -> dict[str, list[float]]:
        """Two entropies of each prototype, in bits.

        ``picture``: what the judge makes of its picture. ``images``: the labels of the images that
        it is nearest to; those of one without any are as mixed as the data.
        """
        bench = self.bench
        chances = self.judge(net.decoded().unsqueeze(1)).softmax(1)
        nearest = torch.cat([net.prototypes(net.encoder(x)).argmin(1) for x, _ in bench.scored])
        labels = torch.cat([y for _, y in bench.scored])
        counts = torch.zeros(len(chances), chances.shape[1], device=bench.device)
        counts.index_put_((nearest, labels), torch.ones((), device=bench.device), accumulate=True)
        counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, counts.sum(0))
        shares = counts / counts.sum(1, keepdim=True)
        return {"picture": _bits(chances), "images": _bits(shares)}

    def _indexes(self, net: PrototypeClassifier, matrix: str) -> list[float]:
        values: list[float] = self.bench.scores(net, matrix)[UNIT].values.tolist()
        return values

    # ---- Figure 2b ----------------------------------------------------------------------------

    def _fifth_step(self) -> dict[str, Any]:
        """Split each prototype in turn from one checkpoint, and train each net to its optimum."""
        saved = next((s for s in RunFolder(self._path("splitting")).saved()
                      if not s.grown and s.phase == self.setting.fifth - 1), None)  # fmt: skip
        if saved is None:
            return {}
        start = load(self.bench.new_net(), saved.model)
        before = self.bench.evaluate(start)["loss"]
        control = self._trained(copy.deepcopy(start))
        found: dict[str, Any] = {"before": before, "control": control,
                                 "ambiguity": self._ambiguity(start)}  # fmt: skip
        for matrix in MATRICES:
            found[matrix] = self._each_in_turn(start, matrix)
        return found

    def _each_in_turn(self, start: PrototypeClassifier, matrix: str) -> list[dict[str, float]]:
        entries = entries_of(self.bench.scores(start, matrix))
        entries = sorted(entries, key=lambda entry: entry.neuron)
        return [self._in_turn(start, entry, matrix) for entry in entries]

    def _in_turn(self, start: PrototypeClassifier, entry: Entry, matrix: str) -> dict[str, float]:
        bench, net = self.bench, copy.deepcopy(start)
        units = bench.units(net)
        site = Site(net, units, bench.loss_fn(matrix), bench.scored,
                    Policy(count=1, step=self.setting.step), Limits(1, None, None))  # fmt: skip
        growth = RandomNeuron().carry_out(site, SplitPlan([entry], units))
        return {
            "lambda": entry.lambda_,
            "predicted": growth.predicted or 0.0,
            "at once": growth.measured or 0.0,
            "trained": self._trained(net),
        }

    def _trained(self, net: PrototypeClassifier) -> float:
        """The loss after one more phase, the same for all that it is compared with."""
        with seeded(self.bench.seed + 2_000_000):
            self.bench.train(net, Phase(seed=self.bench.seed))
        return self.bench.evaluate(net.eval())["loss"]


def _bits(chances: Tensor) -> list[float]:
    """The entropy of each row."""
    found: list[float] = (torch.special.entr(chances).sum(1) / log(2)).tolist()
    return found


def _event(event: Any) -> dict[str, Any] | None:
    if event is None:
        return None
    return {"parent": event.parent, "children": list(event.children), "lambda": event.lambda_,
            "step": event.step, "predicted": event.predicted}  # fmt: skip


# --- pictures -----------------------------------------------------------------------------


def packed(pictures: Tensor) -> str:
    """(count, 28, 28) in [0, 1] as text, 8 bits a pixel."""
    bits = pictures.mul(255).round().to(torch.uint8).cpu().numpy().tobytes()
    return base64.b64encode(zlib.compress(bits, 9)).decode()


def unpacked(text: str) -> Any:
    """(count, 28, 28) bytes, from ``packed``."""
    bits = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(bits, dtype=np.uint8).reshape(-1, 28, 28)
