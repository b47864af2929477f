"""The smallest eigenpair of many symmetric matrices at once, from products alone.

A solver asks for products and does not care where they come from: one operator may answer, or a
pass over the data that serves the solvers of many units together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

Matvec = Callable[[Tensor], Tensor]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Eigenpairs:
    """lambda_min, its unit eigenvector and ||S v - lambda v|| of n matrices."""

    values: Tensor  # (n,)
    vectors: Tensor  # (n, d)
    residuals: Tensor  # (n,)


Solver = Generator[Tensor, Tensor, Eigenpairs]  # yields vectors v_k, is sent S_k v_k for each k


def answered(asking: Generator[Tensor, Tensor, Answer], apply: Matvec) -> Answer:
    """What comes of a solver whose every question is answered by ``apply``."""
    try:
        vectors = next(asking)
        while True:
            vectors = asking.send(apply(vectors))
    except StopIteration as end:
        return cast("Answer", end.value)


def random_vector(size: int, seed: int) -> Tensor:
    """The same vector each time, in float64 on the CPU, whatever it is used with."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def dense(apply: Matvec, n: int, d: int, like: Tensor) -> Tensor:
    """The n matrices (n, d, d), column by column: one product gives one column of each."""
    return answered(_columns(n, d, like), apply)


def _columns(n: int, d: int, like: Tensor) -> Generator[Tensor, Tensor, Tensor]:
    columns = []
    for j in range(d):
        basis = like.new_zeros(n, d)
        basis[:, j] = 1
        columns.append((yield basis))
    matrix = torch.stack(columns, dim=-1)
    return (matrix + matrix.mT) / 2


def dense_solver(n: int, d: int, like: Tensor) -> Solver:
    """Builds the matrices: d products."""
    return from_dense((yield from _columns(n, d, like)))


def from_dense(matrix: Tensor) -> Eigenpairs:
    """By eigh in float64: lambda near 0 decides a split, and float32 can fail to converge."""
    exact = matrix.double()
    values, vectors = torch.linalg.eigh(exact)
    value, vector = values[:, 0], vectors[:, :, 0]
    noise = _noise(matrix.dtype, torch.tensor(matrix.shape[-1]))
    value = _without_noise(value, values.abs().amax(dim=1), noise)
    residual = (exact @ vector[..., None]).squeeze(-1) - value[:, None] * vector
    found = (value, oriented(vector), residual.norm(dim=1))
    return Eigenpairs(*(tensor.to(matrix.dtype) for tensor in found))


def lanczos(apply: Matvec, start: Tensor, steps: int, metric: Matvec | None = None) -> Eigenpairs:
    """What :func:`lanczos_solver` finds from the products of ``apply``."""
    return answered(lanczos_solver(start, steps, metric), apply)


def lanczos_solver(
    start: Tensor, steps: int, metric: Matvec | None = None, sizes: Tensor | None = None
) -> Solver:
    """Lanczos with full re-orthogonalisation, for n matrices side by side.

    Args:
        start: (n, d), the first vectors.
        steps: products to take; the Krylov space has at most this dimension.
        metric: v -> G v, where S is symmetric in the inner product a^T G b. The solver then asks
            for products with G v_k instead.
        sizes: (n,) of each matrix, where vectors are filled up with zeros to d; None: all are d.
    """
    n, d = start.shape
    steps = min(steps, d)
    sizes = torch.full((n,), d, device=start.device) if sizes is None else sizes
    noise = _noise(start.dtype, sizes)
    space = _Krylov(start.new_zeros(n, steps, d), metric)
    alpha = torch.zeros(n, steps, dtype=torch.float64, device=start.device)
    beta = torch.zeros(n, steps, dtype=torch.float64, device=start.device)
    alive = torch.ones(n, dtype=torch.bool, device=start.device)
    w, dual = start, space.dual(start)
    norm = _length(w, dual)
    for j in range(steps):
        inverse = (alive / norm.clamp_min(1e-30)).to(start.dtype)[:, None]
        space.add(j, w * inverse, dual * inverse)
        w, dual, overlap = space.reduce(j + 1, (yield space.duals[:, j]))
        norm = _length(w, dual)
        alpha[:, j] = overlap[:, j]
        scale = alpha.abs().amax(dim=1) + beta.abs().amax(dim=1)
        # Below this the Krylov space is invariant: what is left of w is rounding.
        alive = alive & (norm > noise * scale)
        beta[:, j] = torch.where(alive, norm.double(), 0.0)
    return _ritz(space, alpha, beta, noise)


class _Krylov:
    """Orthonormal vectors q_j with their duals G q_j, by matrix."""

    def __init__(self, basis: Tensor, metric: Matvec | None) -> None:
        self.basis = basis  # (n, steps, d)
        self.duals = basis if metric is None else torch.zeros_like(basis)
        self._metric = metric

    def dual(self, w: Tensor) -> Tensor:
        return w if self._metric is None else self._metric(w)

    def add(self, j: int, q: Tensor, dual: Tensor) -> None:
        self.duals[:, j] = dual
        self.basis[:, j] = q

    def reduce(self, j: int, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """w without its parts in the first j vectors, its dual, and the sizes of those parts."""
        w, overlap = self._orthogonalise(w, slice(None), j)
        dual = self.dual(w)
        left = _length(w, dual)
        # What little is left of a vector is full of rounding: clean it once more.
        faint = left < 0.25 * torch.hypot(left, overlap.norm(dim=1))
        if w.is_cuda and self._metric is None:  # to ask which ones would wait for the GPU
            again, _ = self._orthogonalise(w, slice(None), j)
            w = torch.where(faint[:, None], again, w)
            return w, w, overlap
        which = faint.nonzero()[:, 0]
        if len(which):
            w[which], _ = self._orthogonalise(w[which], which, j)
            dual[which] = self.dual(w[which])
        return w, dual, overlap

    def _orthogonalise(self, w: Tensor, which: slice | Tensor, j: int) -> tuple[Tensor, Tensor]:
        overlap = torch.bmm(self.duals[which, :j], w[:, :, None])
        reduced = torch.baddbmm(w[:, None], overlap.mT, self.basis[which, :j], alpha=-1)
        return reduced[:, 0], overlap[:, :, 0]


def _length(w: Tensor, dual: Tensor) -> Tensor:
    """sqrt(w^T G w), given G w."""
    if w is dual:
        return w.norm(dim=1)
    return torch.linalg.vecdot(w, dual).clamp_min(0).sqrt()


def _ritz(space: _Krylov, alpha: Tensor, beta: Tensor, noise: Tensor) -> Eigenpairs:
    basis = space.basis
    steps = basis.shape[1]
    used = torch.linalg.vecdot(basis, space.duals) > 0.5
    scale = alpha.abs().amax(dim=1, keepdim=True) + beta.abs().amax(dim=1, keepdim=True)
    diagonal = torch.where(used, alpha, 3 * scale + 1)  # an empty direction is never the smallest
    tridiagonal = torch.diag_embed(diagonal)
    if steps > 1:
        off = beta[:, : steps - 1]
        tridiagonal += torch.diag_embed(off, offset=1) + torch.diag_embed(off, offset=-1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    smallest = vectors[:, :, 0]  # (n, steps)
    vector = torch.bmm(smallest.to(basis.dtype)[:, None], basis)[:, 0]
    vector = vector / vector.norm(dim=1, keepdim=True)
    last = used.long().sum(dim=1, keepdim=True) - 1
    tail = (beta.gather(1, last) * smallest.gather(1, last)).squeeze(1).abs()
    value = _without_noise(values[:, 0], scale.squeeze(1), noise)
    return Eigenpairs(value.to(basis.dtype), oriented(vector), tail.to(basis.dtype))


def _noise(dtype: torch.dtype, sizes: Tensor) -> Tensor:
    """What rounding makes of products with matrices of these sizes, as a part of their norm."""
    return torch.finfo(dtype).eps * sizes.clamp_min(8)


def _without_noise(value: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
    """A lambda within rounding of 0 is 0: a split must not hang on a rounding error."""
    return torch.where(value.abs() <= noise * scale, 0.0, value)


def oriented(vectors: Tensor) -> Tensor:
    """+v and -v are the same split: make the largest entry positive, so that runs agree."""
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)
