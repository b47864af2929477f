"""Stream: all units solved together, with a pass over the batches for each product.

Nothing is kept from one batch to the next, so that the number of samples is limited by time alone.
A pass costs a forward and backward pass (three passes of each layer), building the matrices (one)
and a product (two), in place of the product alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitgrow.eigen import dense_solver, lanczos_solver
from splitgrow.products import Products, Setup
from splitgrow.scores import UnitScores
from splitgrow.solve import Effort, no_curvature, scores_of
from splitgrow.spread import Spread, errors
from splitgrow.tap import Source
from splitgrow.units import Unit

# A pass of the stream takes six passes of each layer, a pass that keeps what it sees three. With L
# Lanczos steps and one product for the standard errors, streaming takes 6 (L + 1), keeping what
# fits takes 3 a pass and 1 + 2 (L + 1) for the products.
STREAM_PASS, KEEPING_PASS = 6, 3


def pays(passes: float, effort: Effort) -> bool:
    """Is it cheaper than to keep what fits, where that takes this many passes?"""
    products = effort.products + 1
    return STREAM_PASS * products < KEEPING_PASS * passes + 1 + 2 * products


class _Solving:
    """One unit on its way: the vectors whose products it needs next, and at last its eigenpairs."""

    def __init__(self, unit: Unit, theta: Tensor, effort: Effort) -> None:
        n, d = theta.shape
        self._solver = (
            dense_solver(n, d, theta)
            if d <= effort.products
            else lanczos_solver(effort.begin(unit, theta), effort.products)
        )
        self.asked: Tensor | None = next(self._solver)
        self.pairs = no_curvature(theta)
        self.method = "zero"

    def answer(self, product: Tensor, *, zero: bool) -> None:
        """Go on with a product; a unit whose matrices are 0 is done at once."""
        self.asked = None
        if zero:
            return
        self.method = "stream"
        try:
            self.asked = self._solver.send(product)
        except StopIteration as end:
            self.pairs = end.value


@dataclass
class _Pass:
    """What comes of the products of one pass, on this rank."""

    products: dict[str, Tensor]
    bent: set[str]  # units that were seen to have any curvature
    loss: float = 0.0
    samples: int = 0


@dataclass(frozen=True)
class Stream:
    """Units of a model, and the batches that are passed over again and again."""

    source: Source
    setup: Setup

    def scores(
        self, thetas: Mapping[str, Tensor], effort: Effort
    ) -> tuple[dict[str, UnitScores], float, int]:
        """Of the units whose neurons (n, d) are given; the mean loss; the number of samples."""
        team = self.setup.team
        units = self.source.units
        solving = {n: _Solving(units[n], theta, effort) for n, theta in thetas.items()}
        loss, samples = 0.0, 0
        while asked := {n: one.asked for n, one in solving.items() if one.asked is not None}:
            seen = self._products(asked)
            samples = team.sum(seen.samples, "the number of samples")
            loss = team.sum(seen.loss, "the loss") / samples
            for name, product in seen.products.items():
                zero = not team.any(name in seen.bent, f"a product of {name}")
                total = team.add_(product, f"a product of {name}") / samples
                solving[name].answer(total, zero=zero)
        spreads = self._spreads(solving, samples)
        found = {
            n: scores_of(units[n], team, solving[n].pairs, thetas[n], error, solving[n].method)
            for n, error in zip(solving, errors(spreads, team, "standard errors"), strict=True)
        }
        return found, loss, samples

    def _products(self, asked: Mapping[str, Tensor]) -> _Pass:
        """Sums over the samples of this rank."""
        seen = _Pass({name: torch.zeros_like(vectors) for name, vectors in asked.items()}, set())
        for loss, samples, products in self._passed(list(asked), of=1):
            seen.loss, seen.samples = seen.loss + loss * samples, seen.samples + samples
            for one in products:
                name = one.unit.name
                seen.products[name] += one.own(asked[name])
                if not one.is_zero:
                    seen.bent.add(name)
                del one  # its matrices, before those of the next are made
        return seen

    def _spreads(self, solving: Mapping[str, _Solving], samples: int) -> list[Spread]:
        """What the standard errors of lambda need, from one more pass."""
        vectors = {name: one.pairs.vectors for name, one in solving.items()}
        spreads = {name: Spread(len(v), v.device) for name, v in vectors.items()}
        bent = [name for name, one in solving.items() if one.method != "zero"]
        for _, _, products in self._passed(bent, of=samples) if bent else ():
            for one in products:
                one.spread(vectors[one.unit.name], spreads[one.unit.name])
                del one
        return list(spreads.values())

    def _passed(
        self, names: Sequence[str], of: int
    ) -> Iterator[tuple[float, int, Iterator[Products]]]:
        """For each batch its loss, its samples, and S of each unit as a part of so many samples."""
        wanted = [self.source.units[name] for name in names]
        for loss, samples, evidence in self.source.collect(wanted):
            yield (
                loss,
                samples,
                (Products(unit, evidence.pop(unit.name), self.setup, of) for unit in wanted),
            )
            del evidence
