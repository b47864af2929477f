"""Together: Lanczos for the neurons of several units at once.

An operation has a price of its own, on a GPU most of what Lanczos costs for a small unit. So the
vectors of several units stand side by side, the shorter ones filled up with zeros: of a matrix with
zeros around it Lanczos sees no more than of the matrix. Only products are taken unit by unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitgrow.eigen import Eigenpairs, answered, lanczos_solver
from splitgrow.products import Products


@dataclass(frozen=True)
class Member:
    """A unit: products with its matrices, its neurons, and where Lanczos begins, (n, d) each."""

    products: Products
    theta: Tensor
    start: Tensor


class Together:
    """The matrices of all neurons of some units, as one family; called, a product with each.

    All have the same dtype, are on the same device, and have the same team.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._counts = [len(member.start) for member in members]
        self._sizes = [member.start.shape[1] for member in members]
        self._place = f"products of {', '.join(m.products.unit.name for m in members)}"

    def smallest(self, steps: int) -> list[Eigenpairs]:
        """lambda_min, its eigenvector and its residual, for every neuron of each unit."""
        start = self._joined([member.start for member in self._members])
        sizes = torch.tensor(self._sizes).repeat_interleave(torch.tensor(self._counts))
        found = answered(lanczos_solver(start, steps, sizes=sizes.to(start.device)), self)
        parts = zip(
            found.values.split(self._counts), self._parted(found.vectors),
            found.residuals.split(self._counts), strict=True,
        )  # fmt: skip
        # Copies: a view would hold the vectors of all units, and cannot be saved as it is.
        return [Eigenpairs(values, vectors.contiguous(), rest) for values, vectors, rest in parts]

    def __call__(self, vectors: Tensor) -> Tensor:
        """S_k v_k for every neuron k."""
        team = self._members[0].products.team
        parts = zip(self._members, self._parted(vectors), strict=True)
        return team.add_(self._joined([m.products.own(part) for m, part in parts]), self._place)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One above the other, each filled up with zeros."""
        if len(parts) == 1:
            return parts[0]
        whole = parts[0].new_zeros(sum(self._counts), max(self._sizes))
        for place, part in zip(self._parted(whole), parts, strict=True):
            place.copy_(part)
        return whole

    def _parted(self, whole: Tensor) -> list[Tensor]:
        """Views of each unit's own."""
        rows = whole.split(self._counts)
        return [part[:, :size] for part, size in zip(rows, self._sizes, strict=True)]
