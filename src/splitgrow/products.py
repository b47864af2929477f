"""Products with the splitting matrices of a unit: the mean over the samples of many batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from splitgrow.analysis import Analysis
from splitgrow.chunks import groups_of, pieces
from splitgrow.curvature import Softplus
from splitgrow.matrix import SplittingMatrix, arranged
from splitgrow.spread import Spread
from splitgrow.tap import Evidence, Group
from splitgrow.team import Team
from splitgrow.units import Unit


@dataclass(frozen=True)
class Setup:
    """What the splitting matrices of all units of a model are made with.

    Attributes:
        constants: the model's tensors, by placeholder.
        stand_in: curvature of activations with kinks.
        team: the ranks that share the data.
    """

    analysis: Analysis
    constants: dict[fx.Node, Tensor]
    stand_in: Softplus | None
    team: Team

    def matrix(self, unit: Unit, evidence: Evidence) -> SplittingMatrix:
        """S of a unit on some samples."""
        return SplittingMatrix(unit, arranged(evidence, unit), self.constants, self.stand_in)


class Products:
    """S of a unit over the batches of this rank; called, a product with that of all ranks.

    Attributes:
        terms: for each piece of the data its weight and its matrix.
    """

    def __init__(self, unit: Unit, evidence: list[Evidence], setup: Setup, samples: int) -> None:
        self.unit, self.team = unit, setup.team
        self._setup = setup
        self._place = f"a product of {unit.name}"
        self.terms: list[tuple[float, SplittingMatrix]] = []
        self._groups: list[tuple[Group, ...]] = []
        self._joined: dict[int, Evidence] = {}  # by term, where several batches are in one
        for piece in pieces(evidence, unit, setup.analysis):
            matrix = setup.matrix(unit, piece)
            if len(piece.groups) > 1 and not matrix.has_forms:
                self._joined[len(self.terms)] = piece
            self.terms.append((piece.samples / samples, matrix))
            self._groups.append(piece.groups)

    @property
    def is_zero(self) -> bool:
        """Is sigma affine in theta, as far as this rank's data show?"""
        return all(matrix.is_zero for _, matrix in self.terms)

    def __call__(self, vectors: Tensor) -> Tensor:
        """S_k v_k for every neuron k."""
        return self.team.add_(self.own(vectors), self._place)

    def own(self, vectors: Tensor) -> Tensor:
        """The part of a product that is from the data of this rank."""
        weight, matrix = self.terms[0]
        total = matrix(vectors).mul_(weight)
        for weight, matrix in self.terms[1:]:
            total.add_(matrix(vectors), alpha=weight)
        return total

    def spread(self, vectors: Tensor, spread: Spread) -> None:
        """Add what each group of samples says of v_k^T S_k v_k: a batch, or a piece of one."""
        groups = [group for some in self._groups for group in some]
        forms = torch.cat(
            [self._forms(i, vectors).mul_(weight) for i, (weight, _) in enumerate(self.terms)]
        )
        samples: Counter[tuple[int, int | None]] = Counter()
        for group in groups:
            samples[group.key] += group.samples
        if len(samples) < len(groups):  # several terms say something of the same group
            row = {key: i for i, key in enumerate(samples)}
            rows = torch.tensor([row[group.key] for group in groups], device=forms.device)
            forms = forms.new_zeros(len(row), forms.shape[1]).index_add_(0, rows, forms)
        spread.add(forms, list(samples.values()))

    def _forms(self, i: int, vectors: Tensor) -> Tensor:
        """(groups, width) v_k^T S_k v_k of each group in a term."""
        groups, matrix = self._groups[i], self.terms[i][1]
        if matrix.has_forms:
            return matrix.forms(vectors, [g.rows for g in groups] if len(groups) > 1 else None)
        if i not in self._joined:
            return _form(matrix, vectors)[None]
        parts = groups_of(self._joined[i], self._setup.analysis.graph.constants)
        return torch.stack([_form(self._setup.matrix(self.unit, e), vectors) for e in parts])

    @property
    def groups(self) -> int:
        """Of samples, on this rank."""
        return len({group.key for some in self._groups for group in some})


def _form(matrix: SplittingMatrix, vectors: Tensor) -> Tensor:
    return (vectors * matrix(vectors)).sum(dim=1)
