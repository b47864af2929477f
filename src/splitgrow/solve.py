"""Solve: which way to the smallest eigenpairs of a unit is the cheapest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from splitgrow import span
from splitgrow.chunks import limit_of
from splitgrow.directions import Directions
from splitgrow.eigen import Eigenpairs, answered, dense_solver, random_vector
from splitgrow.products import Products, Setup
from splitgrow.scores import UnitScores
from splitgrow.spread import Spread, errors
from splitgrow.tap import Evidence, bytes_of
from splitgrow.team import Team
from splitgrow.together import Member, Together
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

    def begin(self, unit: Unit, theta: Tensor) -> Tensor:
        """(n, d): the same random direction for all neurons of a unit, or close to a known one."""
        n, d = theta.shape
        start = random_vector(d, seed=0).to(theta).expand(n, d)
        if self.start is None:
            return start
        # Of an eigenvector alone Lanczos would see nothing else, be it the smallest or not.
        return self.start.of(unit).to(theta) + DOUBT * start / start.norm(dim=1)[:, None]


@dataclass(frozen=True)
class _Solved:
    """A unit with its eigenpairs, and what tells their standard errors."""

    unit: Unit
    theta: Tensor
    pairs: Eigenpairs
    method: str
    spread: Spread


class Solving:
    """Solves units as they come.

    Those that Lanczos solves wait for each other, as long as all that they hold, filled up to the
    size of the largest, is no more than one piece of the data of a large one; see
    :class:`splitgrow.together.Together`.
    """

    def __init__(self, setup: Setup, samples: int, effort: Effort) -> None:
        self._setup, self._samples, self._effort = setup, samples, effort
        self._waiting: list[Member] = []
        self._held = 0  # bytes of what those that wait were seen with
        self._solved: list[_Solved] = []

    def take(self, unit: Unit, theta: Tensor, evidence: list[Evidence]) -> None:
        """One more unit with its neurons theta (n, d); the evidence is taken out of the list."""
        team = self._setup.team
        held = team.sum(bytes_of(evidence), f"room for {unit.name}") // team.size
        if not self._may_wait(theta, held):
            self._solve_waiting()
        products = Products(unit, evidence, self._setup, self._samples)
        found = _without_lanczos(products, theta, self._effort)
        if found is None:
            self._waiting.append(Member(products, theta, self._effort.begin(unit, theta)))
            self._held += held
        else:
            self._keep(products, theta, *found)

    def _may_wait(self, theta: Tensor, held: int) -> bool:
        """Is there room for one more, which needs so many bytes beside its vectors?"""
        family = [theta, *(member.theta for member in self._waiting)]
        padded = sum(map(len, family)) * max(t.shape[1] for t in family)
        vectors = self._effort.products * padded * theta.element_size()
        alike = all(_are_alike(theta, other) for other in family)
        return alike and self._held + held + vectors <= limit_of(theta)

    def scores(self) -> Iterator[UnitScores]:
        """Of all units that were taken."""
        self._solve_waiting()
        team = self._setup.team
        found = errors([s.spread for s in self._solved], team, "standard errors")
        for s, error in zip(self._solved, found, strict=True):
            yield scores_of(s.unit, team, s.pairs, s.theta, error, s.method)

    def _solve_waiting(self) -> None:
        waiting, self._waiting, self._held = self._waiting, [], 0
        if waiting:
            pairs = Together(waiting).smallest(self._effort.products)
            for member, own in zip(waiting, pairs, strict=True):
                self._keep(member.products, member.theta, own, "lanczos")

    def _keep(self, products: Products, theta: Tensor, pairs: Eigenpairs, method: str) -> None:
        unit, spread = products.unit, Spread(len(theta), theta.device)
        if method != "zero" and self._setup.team.sum(products.groups, unit.name) > 1:
            products.spread(pairs.vectors, spread)
        self._solved.append(_Solved(unit, theta, pairs, method, spread))


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Can they be in one tensor?"""
    return (one.dtype, one.device) == (other.dtype, other.device)


def _without_lanczos(
    products: Products, theta: Tensor, effort: Effort
) -> tuple[Eigenpairs, str] | None:
    """Where it is exact, or cheaper."""
    (n, d), unit, steps = theta.shape, products.unit, effort.products
    if products.team.every(products.is_zero, f"a product of {unit.name}"):
        return no_curvature(theta), "zero"
    if d <= steps if effort.steps is not None else _is_small(products, d):
        return answered(dense_solver(n, d, theta), products), "dense"
    if span.pays(unit, products.terms, steps, products.team):
        # It starts from nothing, so it takes as many steps as that needs.
        cold = replace(effort, start=None).products
        return span.Span(unit, products.terms, products.team).smallest(cold), "span"
    return None


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
    """The same on all ranks: S is, but each machine may round its eigenvectors differently.

    Where there is no curvature, there is no doubt of it.
    """
    scales = theta.norm(dim=1)
    error = theta.new_zeros(len(theta)) if method == "zero" else error.to(theta)
    team.first_((pairs.values, pairs.vectors, pairs.residuals, scales, error), unit.name)
    return UnitScores(unit, pairs.values, pairs.vectors, pairs.residuals, scales, method, error)
