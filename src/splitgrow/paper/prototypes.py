"""Prototypes of MNIST grown from one (Figure 2 of the paper, and the appendix figure).

Every run is a plain ``splitgrow.grow``: what the figures need is read from its checkpoints and its
history afterwards.
"""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import log
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.checkpoint import load
from splitgrow.errors import InputError
from splitgrow.grow import grow
from splitgrow.history import History
from splitgrow.methods import Method, RandomNeuron, Site
from splitgrow.paper.augment import elastic
from splitgrow.paper.data import DataSet, mnist
from splitgrow.paper.growth import entries_of
from splitgrow.paper.prototype_net import Objective, PrototypeClassifier, squared_error
from splitgrow.paper.results import Results, Run
from splitgrow.paper.stats import compare, pearson, quartiles
from splitgrow.paper.training import Course, Rate, adam
from splitgrow.phase import Phase
from splitgrow.plan import Entry, SplitPlan
from splitgrow.policy import Budget, Policy
from splitgrow.runs import RunFolder
from splitgrow.score import score
from splitgrow.scores import Scores
from splitgrow.select import Candidate, Limits
from splitgrow.state import seeded
from splitgrow.units import Units, find_units

UNIT = "prototypes"
EVALUATED = 5000  # images at a time


class LowestIndex(RandomNeuron):
    """The neurons with the lowest indexes whatever their sign, as in the authors' code."""

    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        """By index."""
        found = score(site.model, site.loss_fn, site.batches, units=site.units)
        return {UNIT: [Candidate(-entry.lambda_, entry) for entry in entries_of(found)]}


# Each method: how it grows, and of which loss it takes the matrix.
GROWN: dict[str, tuple[str | Method, str]] = {
    "splitting": ("splitting", "full"),
    "classification": (LowestIndex(), "classification"),
    "random": ("random-neuron", "full"),
    "new": ("new", "full"),
}
METHODS = tuple(GROWN)
MATRICES = ("classification", "full")
DIVIDING = ("splitting", "classification", "random")  # methods that divide what is there
MEASURES = ("picture", "images")  # of ambiguity
DRAWS = 100_000  # random choices of the prototypes to split


@dataclass(frozen=True)
class Setting:
    """What is published of the network, and below the line what the paper leaves open."""

    learning_rate: float = 0.002
    batch: int = 250
    objective: Objective = field(default_factory=Objective)
    # ---------------------------------------------------------------------------------------
    prototypes: int = 10
    epochs: int = 12  # of every phase
    rate: str = "linear"  # down to 0 in every phase, so that it ends near a local optimum
    images: int = 60_000
    scored: int = 10_000
    step: float | None = None  # searched
    # Of the smooth minimum over prototypes, relative to the mean squared distance of the images to
    # their nearest one.
    temperature: float = 0.1
    fifth: int = 5  # prototypes at which each of them is split in turn
    judge_epochs: int = 10  # of the classifier that judges the pictures

    def quick(self) -> Setting:
        """The same in minutes on a CPU: few images, few prototypes, far from the optimum."""
        return replace(
            self, batch=100, prototypes=4, epochs=6, images=4000, scored=1000, fifth=3,
            judge_epochs=4,
        )  # fmt: skip


class Bench:
    """One seed's data and judge, on one device."""

    def __init__(self, setting: Setting, seed: int, data: DataSet, device: torch.device) -> None:
        self.setting, self.seed, self.device = setting, seed, device
        self._units: dict[int, Units] = {}
        self.images = _scaled(data.train.images[: setting.images]).to(device)
        self.labels = data.train.labels[: setting.images].to(device)
        self.test = _scaled(data.test.images).to(device), data.test.labels.to(device)
        if len(self.images) < setting.batch:
            raise InputError(f"prototypes: expected at least {setting.batch} images.")
        scored = self.images[: setting.scored], self.labels[: setting.scored]
        self.scored = list(zip(*(part.split(setting.batch) for part in scored), strict=True))
        self.course = Course(
            len(self.images), setting.batch, setting.epochs,
            Rate(setting.learning_rate, setting.rate),
        )  # fmt: skip

    def new_net(self) -> PrototypeClassifier:
        """One prototype, at random."""
        with seeded(self.seed):
            return PrototypeClassifier().to(self.device)

    def others(self, net: nn.Module) -> list[str]:
        """The units of encoder and decoder, which do not grow."""
        return [u.name for u in find_units(net, (self.images[:2],)) if u.name != UNIT]

    def units(self, net: PrototypeClassifier) -> Units:
        """The prototypes alone; traced once for each number of them."""
        count = len(net.prototypes.theta)
        if count not in self._units:
            example = (self.images[:2],)
            self._units[count] = find_units(net, example, exclude=self.others(net))
        return self._units[count]

    def scores(self, net: PrototypeClassifier, matrix: str) -> Scores:
        """Splitting index and direction of every prototype."""
        return score(net, self.loss_fn(matrix), self.scored, units=self.units(net))

    def loss_fn(self, matrix: str) -> Any:
        """The loss whose splitting matrix is taken."""
        objective = self.setting.objective
        return objective.classifying if matrix == "classification" else objective.full

    # ---- training -----------------------------------------------------------------------------

    def train(self, net: nn.Module, phase: Phase) -> None:
        """One phase with the published loss, on images that are bent anew every time."""
        net = cast("PrototypeClassifier", net)

        def loss_of(index: Tensor) -> Tensor:
            batch = elastic(self.images[index]), self.labels[index]
            return self.setting.objective.published(net, batch)

        self.course.train(net, loss_of, adam, phase)
        self._settle(net)

    @torch.no_grad()
    def _settle(self, net: PrototypeClassifier) -> None:
        """Prepare the terms that only scoring uses: even masses, a temperature that fits."""
        net.share_evenly()
        squares = torch.cat([net.prototypes(net.encoder(x)).amin(1) for x, _ in self.scored])
        net.temperature.copy_(self.setting.temperature * squares.mean().clamp_min(1e-6))

    def evaluate(self, net: nn.Module) -> dict[str, float]:
        """The loss on the training images as they are, and how the test images fare."""
        net = cast("PrototypeClassifier", net)
        loss = _mean(partial(self.setting.objective.published, net), (self.images, self.labels))
        return {
            "loss": loss,
            "accuracy": _mean(partial(_accuracy, net), self.test),
            "reconstruction": _mean(partial(_reconstruction, net), self.test),
        }

    def judge(self) -> nn.Module:
        """A classifier of its own kind, which has seen nothing of the prototypes."""
        with seeded(self.seed + 1_000_000):
            net = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Dropout(), nn.Linear(32 * 49, 10),
            ).to(self.device)  # fmt: skip

            def loss_of(index: Tensor) -> Tensor:
                return F.cross_entropy(net(elastic(self.images[index])), self.labels[index])

            rate = Rate(self.setting.learning_rate, "linear")
            course = replace(self.course, epochs=self.setting.judge_epochs, rate=rate)
            course.train(net, loss_of, adam, Phase())
        return net.eval()


def _scaled(images: Tensor) -> Tensor:
    return images.float() / 255


def _mean(of: Any, data: tuple[Tensor, Tensor]) -> float:
    """The mean over a data set of something that takes batches of equal size."""
    parts = zip(*(part.split(EVALUATED) for part in data), strict=True)
    with torch.no_grad():
        found = [(float(of(batch)), len(batch[0])) for batch in parts]
    return sum(value * count for value, count in found) / sum(count for _, count in found)


def _accuracy(net: PrototypeClassifier, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]).logits.argmax(1) == batch[1]).float().mean()


def _reconstruction(net: PrototypeClassifier, batch: tuple[Tensor, Tensor]) -> Tensor:
    return squared_error(net(batch[0]).pictures, batch[0])


# --- one seed ------------------------------------------------------------------------------


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
            "judge": _mean(self._judged, self.bench.test),
            "methods": runs,
            "fifth": self._fifth_step(),
        }

    def _judged(self, batch: tuple[Tensor, Tensor]) -> Tensor:
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


def packed(pictures: Tensor) -> str:
    """(count, 28, 28) in [0, 1] as text, 8 bits a pixel."""
    bits = pictures.mul(255).round().to(torch.uint8).cpu().numpy().tobytes()
    return base64.b64encode(zlib.compress(bits, 9)).decode()


def unpacked(text: str) -> Any:
    """(count, 28, 28) bytes, from ``packed``."""
    bits = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(bits, dtype=np.uint8).reshape(-1, 28, 28)


def run_seed(setting: Setting, seed: int, *, data: Path, folder: Path, device: str) -> Run:
    """Everything that one seed gives. Its runs are kept in the folder, and go on from there."""
    key = sha256(json.dumps(asdict(setting), sort_keys=True).encode()).hexdigest()[:8]
    bench = Bench(setting, seed, mnist(data), torch.device(device))
    return Study(bench, folder / key).run()


# --- the paper's claims, from the results file alone -----------------------------------------


def claims(results: Results) -> dict[str, Any]:
    """Each claim of the paper, with the numbers that answer it."""
    runs = results["runs"]
    return {
        "splitting has the lowest final loss": _lowest(runs),
        "the least interpretable prototypes are split first": {
            measure: {method: _ambiguous_first(runs, method, measure) for method in DIVIDING}
            for measure in MEASURES
        },
        "eigenvalue and loss decrease correlate": _fifth(runs),
        "prototypes that are stable by the classification matrix": _stable(runs),
    }


def _lowest(runs: Sequence[Run]) -> dict[str, Any]:
    """The last phase of every method; losses compared on the same seeds."""
    last = {name: [run["methods"][name]["phases"][-1] for run in runs] for name in METHODS}
    losses = {name: [phase["loss"] for phase in phases] for name, phases in last.items()}
    count = max(phase["prototypes"] for phases in last.values() for phase in phases)
    return {
        "lowest of all": sum(
            losses["splitting"][i] == min(values[i] for values in losses.values())
            for i in range(len(runs))
        ),
        "seeds": len(runs),
        "methods": {
            name: {
                "loss": list(quartiles(losses[name])),
                "accuracy": list(quartiles([phase["accuracy"] for phase in phases])),
                "reconstruction": list(quartiles([phase["reconstruction"] for phase in phases])),
                "grew to the end": sum(phase["prototypes"] == count for phase in phases),
            }
            | ({} if name == "splitting" else compare(losses["splitting"], losses[name]))
            for name, phases in last.items()
        },
    }


def _ambiguous_first(runs: Sequence[Run], method: str, measure: str) -> dict[str, Any]:
    """Where the prototype that was split stands among those that could have been.

    1 is the most ambiguous, 0 the least, 1/2 what a random choice gives on average; p is the
    chance that random choices stand as high or higher.
    """
    standings = [
        _standings(phase["ambiguity"][measure])
        for run in runs
        for phase in run["methods"][method]["phases"]
        if phase["split"] is not None and phase["prototypes"] > 1
    ]
    chosen = [
        _place_of(run["methods"][method], phase["split"]["parent"])
        for run in runs
        for phase in run["methods"][method]["phases"]
        if phase["split"] is not None and phase["prototypes"] > 1
    ]
    if not chosen:
        return {"splits": 0}
    mean = sum(all_[k] for all_, k in zip(standings, chosen, strict=True)) / len(chosen)
    generator = np.random.default_rng(0)
    drawn = sum(generator.choice(all_, DRAWS) for all_ in standings) / len(standings)
    return {
        "splits": len(chosen),
        "standing": mean,
        "p": float((np.sum(drawn >= mean - 1e-9) + 1) / (DRAWS + 1)),
    }


def _standings(values: Sequence[float]) -> list[float]:
    """The share of the others that each value exceeds; equal ones count half."""
    return [
        (sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2)
        / (len(values) - 1)
        for value in values
    ]


def _place_of(method: Mapping[str, Any], neuron: int) -> int:
    place: int = next(n["place"] for n in method["tree"] if n["id"] == neuron)
    return place


def _fifth(runs: Sequence[Run]) -> dict[str, Any]:
    """For both matrices: the correlation over the prototypes of one seed, and what follows."""
    found: dict[str, Any] = {}
    for matrix in MATRICES:
        pairs = [decreases(run["fifth"], matrix) for run in runs if run["fifth"]]
        correlations = [pearson(indexes, lowered) for indexes, lowered in pairs]
        r = [value for value in correlations if value is not None]
        best = [indexes.index(max(indexes)) == lowered.index(max(lowered))
                for indexes, lowered in pairs]  # fmt: skip
        found[matrix] = {
            "r": list(quartiles(r)) if r else None,
            "positive": sum(value > 0 for value in r),
            "the lowest index is the best split": sum(best),
            "seeds": len(pairs),
        }
    return found


def decreases(fifth: Mapping[str, Any], matrix: str) -> tuple[list[float], list[float]]:
    """For each prototype -lambda, and how far its split went below training on without one."""
    each = fifth[matrix]
    return [-one["lambda"] for one in each], [fifth["control"] - one["trained"] for one in each]


def _stable(runs: Sequence[Run]) -> dict[str, Any]:
    """By number of prototypes: nets of splitting in which no classification index is negative."""
    phases = [phase for run in runs for phase in run["methods"]["splitting"]["phases"]]
    return {
        str(count): {
            "nets": sum(phase["prototypes"] == count for phase in phases),
            "stable": sum(
                phase["prototypes"] == count and min(phase["lambda"]["classification"]) >= 0
                for phase in phases
            ),
        }
        for count in sorted({phase["prototypes"] for phase in phases})
    }
