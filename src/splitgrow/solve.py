"""Solve: which way to the smallest eigenpairs of a unit is the cheapest."""

from __future__ import annotations

from torch import Tensor

from splitgrow import span
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
# A unit is solved densely when building S takes at most this many multiplications ...
DENSE_WORK = 2e7
# ... and its matrices fit into this many numbers.
DENSE_NUMBERS = 2**26


def solve(products: Products, theta: Tensor, steps: int | None) -> UnitScores:
    """The scores of a unit from products with its splitting matrices.

    Args:
        products: which are asked for.
        theta: (n, d) the neurons themselves.
        steps: of Lanczos; None: chosen here.
    """
    pairs, method = _eigenpairs(products, theta, steps)
    team, place = products.team, products.unit.name
    spread = Spread(len(theta), theta.device)
    if method == "zero":
        error = theta.new_zeros(len(theta))
    else:
        if team.sum(products.groups, place) > 1:
            products.spread(pairs.vectors, spread)
        error = spread.error(team, place).to(theta.dtype)
    return scores_of(products.unit, team, pairs, theta, error, method)


def _eigenpairs(products: Products, theta: Tensor, steps: int | None) -> tuple[Eigenpairs, str]:
    n, d = theta.shape
    if products.team.every(products.is_zero, f"a product of {products.unit.name}"):
        return no_curvature(theta), "zero"
    if d <= steps if steps is not None else _is_small(products, d):
        return answered(dense_solver(n, d, theta), products), "dense"
    steps = steps or LANCZOS_STEPS
    if span.pays(products.unit, products.terms, steps, products.team):
        return span.Span(products.unit, products.terms, products.team).smallest(steps), "span"
    return answered(lanczos(theta, steps), products), "lanczos"


def lanczos(theta: Tensor, steps: int) -> Solver:
    """Lanczos from one random direction for all neurons of a unit."""
    n, d = theta.shape
    return lanczos_solver(random_vector(d, seed=0).to(theta).expand(n, d), steps)


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
