r"""Lanczos in the span of the data, for units with more parameters per neuron than data.

A head maps a neuron's parameters to z = X v, where X holds one row for each place that the filter
is applied to: S = X^T H X. Of v only its part in the span of those rows counts, v = X^T u, so

    S X^T u = X^T H (X X^T) u,

and the operator u -> H G u, symmetric in the inner product <a, b> = a^T G b with G = X X^T, has
the same eigenvalues. With M rows a product costs M^2 multiplications for each neuron in place of
2 M d, and G, which all neurons share, is built once. Late layers of a wide net have few places and
many parameters: 256 rows and d = 4,608 for the last layer of VGG19 on 64 images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from splitgrow.eigen import Eigenpairs, lanczos, oriented, random_vector
from splitgrow.matrix import SplittingMatrix
from splitgrow.team import Team
from splitgrow.units import Unit

Terms = Sequence[tuple[float, SplittingMatrix]]  # weight and matrix of each piece of the data


class Span:
    """S of every neuron of a unit in coordinates (u, w): v = X^T u in the head, w beside it."""

    def __init__(self, unit: Unit, terms: Terms, team: Team) -> None:
        self._unit, self._terms, self._team = unit, terms, team
        pieces = [patches(unit, matrix) for _, matrix in terms]
        self._counts = [len(piece) for piece in pieces]
        own = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        # (M, d of the head): the rows of all ranks, of which this one bends its own
        self._X, self._start = team.rows(own, f"rows of {unit.name}")
        self._rows = len(self._X)
        self._G = self._X @ self._X.mT  # (M, M)

    def smallest(self, steps: int) -> Eigenpairs:
        """lambda_min, its eigenvector and its residual, for every neuron."""
        size = self._rows + self._unit.size - self._X.shape[1]
        start = random_vector(size, seed=0).to(self._X).expand(self._unit.width, -1)
        found = lanczos(self._bend, start, steps, metric=self._metric)
        vectors = self._lift(found.vectors[:, : self._rows] @ self._X, found.vectors)
        return self._with_null_space(Eigenpairs(found.values, oriented(vectors), found.residuals))

    def _metric(self, u: Tensor) -> Tensor:
        """What the head makes of coordinates: G u, and w as it is."""
        out = u.clone()
        out[:, : self._rows] = u[:, : self._rows] @ self._G
        return out

    def _bend(self, z: Tensor) -> Tensor:
        """The body's Hessian, which acts on what the head has made."""
        out = torch.zeros_like(z)
        beside = z[:, self._rows :]
        start = self._start
        for (weight, matrix), count in zip(self._terms, self._counts, strict=True):
            place = slice(start, start + count)
            here, rest = matrix.bend_rows(z[:, place], beside)
            out[:, place] = here * weight
            out[:, self._rows :].add_(rest, alpha=weight)
            start += count
        return self._team.add_(out, f"a product of {self._unit.name}")

    def _lift(self, in_head: Tensor, coordinates: Tensor) -> Tensor:
        """Unit vectors of the neurons' parameters: the head's first, then those beside it."""
        vectors = torch.cat([in_head, coordinates[:, self._rows :]], dim=1)
        vectors = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return self._terms[0][1].from_head_order(vectors)

    def _with_null_space(self, found: Eigenpairs) -> Eigenpairs:
        """Where S is positive in the span, the smallest eigenvalue is the 0 outside of it."""
        positive = found.values > 0
        if not positive.any() or self._rows >= self._X.shape[1]:
            return found
        X = self._X.double()
        inverse = torch.linalg.pinv(X @ X.mT, hermitian=True)
        outside = random_vector(X.shape[1], seed=1).to(X)
        for _ in range(2):  # what rounding leaves in the span goes the second time
            outside = outside - X.mT @ (inverse @ (X @ outside))
        nothing = outside.new_zeros(1, self._rows + self._unit.size - X.shape[1])
        vector = oriented(self._lift(outside[None], nothing)).to(found.vectors)
        zeros = torch.zeros_like(found.values)
        return Eigenpairs(
            torch.where(positive, zeros, found.values),
            torch.where(positive[:, None], vector, found.vectors),
            torch.where(positive, zeros, found.residuals),
        )


def pays(unit: Unit, terms: Terms, steps: int, team: Team) -> bool:
    """Is the span of the data so small that working in it takes fewer multiplications?"""
    if not team.every(all(matrix.has_rows for _, matrix in terms), f"rows of {unit.name}"):
        return False
    n, d = unit.width, unit.size
    rows = team.sum(sum(matrix.places for _, matrix in terms), f"places of {unit.name}")
    by_span = rows * rows * d + steps * n * rows * rows + n * rows * d
    return by_span < 0.6 * (2 * steps + 1) * n * rows * d


def patches(unit: Unit, matrix: SplittingMatrix) -> Tensor:
    """X (places, d of the head): what each filter sees at each place, a 1 for the bias."""
    (head,) = unit.subgraph.heads
    x, unfolding = matrix.head_input(head)
    if unfolding is None:
        rows = x.reshape(-1, x.shape[-1])
    else:
        rows = F.unfold(x, **unfolding).mT.flatten(0, 1)
    bias = len(head.parameters) > 1
    return torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1) if bias else rows
