"""What scoring gives: the splitting indexes and splitting gradients of a model's neurons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from splitgrow.units import Unit, Units


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

    def __getitem__(self, name: str) -> UnitScores:
        if name not in self._scores:
            raise KeyError(f"no unit {name!r}; there are: {', '.join(self._scores)}")
        return self._scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)

    def __str__(self) -> str:
        from splitgrow.show import scores_table

        return scores_table(self)

    __repr__ = __str__
