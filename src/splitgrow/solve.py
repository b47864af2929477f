"""Solve: which way to the smallest eigenpairs of a unit is the cheapest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from splitgrow import span
from splitgrow.directions import Directions
from splitgrow.distributed import Team
from splitgrow.eigen import (
    Eigenpairs,
    Solver,
    answered,
    dense_solver,
    lanczos_solver,
    random_vector,
)
from splitgrow.products import Products
from splitgrow.scores import UnitScores
from splitgrow.spread import Spread
from splitgrow.units import Unit

LANCZOS_STEPS = 8
WARM_STEPS = 4  # where the vectors are known nearly
DOUBT = 0.2  # the length of what is random in such a start
# A unit is solved densely when building S takes at most this many multiplications ...
DENSE_WORK = 2e7
# ... and its matrices fit into this many numbers.
DENSE_NUMBERS = 2**26


@dataclass(frozen=True)
class Effort:
    """How far Lanczos goes, and from where.

    Args:
        steps: None leaves it to each unit, and solves small ones exactly.
        start: of the same neurons, close to what is sought.
    """

    steps: int | None = None
    start: Directions | None = None

    @property
    def products(self) -> int:
        """Steps of Lanczos where it is used."""
        return self.steps or (LANCZOS_STEPS if self.start is None else WARM_STEPS)

    def lanczos(self, unit: Unit, theta: Tensor) -> Solver:
        """From the same random direction for all neurons of a unit, or close to a known one."""
        n, d = theta.shape
        start = random_vector(d, seed=0).to(theta).expand(n, d)
        if self.start is not None:
            # Of an eigenvector alone Lanczos would see nothing else, be it the smallest or not.
            start = self.start.of(unit).to(theta) + DOUBT * start / start.norm(dim=1)[:, None]
        return lanczos_solver(start, self.products)


def solve(products: Products, theta: Tensor, effort: Effort) -> UnitScores:
    """The scores of a unit, whose neurons are theta (n, d), from products with its matrices."""
    pairs, method = _eigenpairs(products, theta, effort)
    team, place = products.team, products.unit.name
    spread = Spread(len(theta), theta.device)
    if method == "zero":
        error = theta.new_zeros(len(theta))
    else:
        if team.sum(products.groups, place) > 1:
            products.spread(pairs.vectors, spread)
        error = spread.error(team, place).to(theta.dtype)
    return scores_of(products.unit, team, pairs, theta, error, method)


def _eigenpairs(products: Products, theta: Tensor, effort: Effort) -> tuple[Eigenpairs, str]:
    (n, d), unit, steps = theta.shape, products.unit, effort.products
    if products.team.every(products.is_zero, f"a product of {unit.name}"):
        return no_curvature(theta), "zero"
    if d <= steps if effort.steps is not None else _is_small(products, d):
        return answered(dense_solver(n, d, theta), products), "dense"
    if span.pays(unit, products.terms, steps, products.team):
        # It starts from nothing, so it takes as many steps as that needs.
        cold = replace(effort, start=None).products
        return span.Span(unit, products.terms, products.team).smallest(cold), "span"
    return answered(effort.lanczos(unit, theta), products), "lanczos"


def no_curvature(theta: Tensor) -> Eigenpairs:
    """Of matrices that are 0: any direction is as good as any other."""
    vectors = theta.new_zeros(theta.shape)
    vectors[:, 0] = 1
    nothing = theta.new_zeros(len(theta))
    return Eigenpairs(nothing, vectors, nothing)


def _is_small(products: Products, d: int) -> bool:
    """Is building S no dearer than Lanczos, or cheap anyway?"""
    if d <= 2 * LANCZOS_STEPS:
        return True
    work = sum(matrix.work for _, matrix in products.terms) * d
    unit = products.unit
    work = products.team.sum(work, f"work of {unit.name}")
    return work <= DENSE_WORK and unit.width * d * d <= DENSE_NUMBERS


def scores_of(
    unit: Unit, team: Team, pairs: Eigenpairs, theta: Tensor, error: Tensor, method: str
) -> UnitScores:
    """The same on all ranks: S is, but each machine may round its eigenvectors differently."""
    scales = theta.norm(dim=1)
    team.first_((pairs.values, pairs.vectors, pairs.residuals, scales, error), unit.name)
    return UnitScores(unit, pairs.values, pairs.vectors, pairs.residuals, scales, method, error)
