"""The paper's claims on prototypes, from the results file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitgrow.paper.prototype_study import MATRICES, METHODS
from splitgrow.paper.results import Results, Run
from splitgrow.paper.stats import compare, pearson, quartiles

DIVIDING = ("splitting", "classification", "random")  # methods that divide what is there
MEASURES = ("picture", "images")  # of ambiguity
DRAWS = 100_000  # random choices of the prototypes to split


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
