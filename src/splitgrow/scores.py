"""What scoring gives: the splitting indexes and splitting gradients of a model's neurons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from splitgrow.directions import Directions
from splitgrow.units import Unit, Units

Rank = Literal["lambda", "gain"]


@dataclass(frozen=True)
class UnitScores:
    """The splitting indexes and gradients of one unit.

    Attributes:
        values: (width,) lambda_min of each neuron's splitting matrix.
        vectors: (width, size) its unit eigenvector, in the order of the unit's parameters.
        residuals: (width,) || S v - lambda v ||, how far the eigenpair is from exact.
        scales: (width,) || theta ||, the neuron's own scale.
        method: how the unit was solved: "dense", "lanczos", "span", "stream", or "zero" where the
            neurons' outputs are affine in their parameters.
        errors: (width,) the standard error of lambda as an estimate for all the data that the
            samples were drawn from, by how it differs from batch to batch; nan where all samples
            were one small batch.
    """

    unit: Unit
    values: Tensor
    vectors: Tensor
    residuals: Tensor
    scales: Tensor
    method: str
    errors: Tensor

    def gains(self, rank: Rank) -> Tensor:
        """(width,) what neurons are ranked by, in float64: -lambda, or -lambda ||theta||^2."""
        return -self.values.double() * self._factors(rank)

    def gain_errors(self, rank: Rank) -> Tensor:
        """(width,) their standard errors."""
        return self.errors.double() * self._factors(rank)

    def _factors(self, rank: Rank) -> Tensor:
        scales = self.scales.double()
        return torch.ones_like(scales) if rank == "lambda" else scales**2


class Scores(Mapping[str, UnitScores]):
    """Scores of a model's units by name; printed, the most promising neurons.

    Attributes:
        loss: mean loss of the scored batches.
        samples: how many samples were scored.
    """

    def __init__(
        self, units: Units, scores: Mapping[str, UnitScores], loss: float, samples: int
    ) -> None:
        self.units = units
        self._scores = dict(scores)
        self.loss = loss
        self.samples = samples

    @property
    def neurons(self) -> int:
        """Of all units."""
        return sum(len(found.values) for found in self.values())

    @property
    def directions(self) -> Directions:
        """The vectors alone; ``directions.after(plan)`` is where the next scoring can start."""
        vectors = {name: found.vectors for name, found in self.items()}
        return Directions.of_units(self.units, vectors)

    def __getitem__(self, name: str) -> UnitScores:
        if name not in self._scores:
            raise KeyError(f"no unit {name!r}; there are: {', '.join(self._scores)}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def overlap(self, count: int, rank: Rank = "lambda", *, shrink: float = 1.0) -> float:
        """Of the ``count`` neurons with the largest gains, the share that is rightly among them.

        It is what to expect, by the standard errors: of each such neuron, how likely its true gain
        lies above the cut between the last one chosen and the next. nan where there are none.

        Args:
            count: how many neurons are chosen.
            rank: as in :func:`splitgrow.select`.
            shrink: a factor for the standard errors, as they would be with other samples.
        """
        gains = torch.cat([found.gains(rank).cpu() for found in self.values()])
        errors = torch.cat([found.gain_errors(rank).cpu() for found in self.values()])
        order = gains.argsort(descending=True, stable=True)
        chosen = order[:count][gains[order[:count]] > 0]
        if not len(chosen):
            return 1.0  # nothing is chosen, by whatever errors
        following = order[len(chosen) : len(chosen) + 1]
        last, following_gain = gains[chosen[-1]], gains[following].clamp_min(0).sum()
        margin = gains[chosen] - (last + following_gain) / 2
        sure = torch.special.ndtr(margin / (shrink * errors[chosen]).clamp_min(1e-300))
        return float(sure.mean())

    def __str__(self) -> str:
        from splitgrow.show import scores_table

        return scores_table(self)

    __repr__ = __str__
