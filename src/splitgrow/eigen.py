"""The smallest eigenpair of many symmetric matrices at once, from products alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Matvec = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Eigenpairs:
    """lambda_min, its unit eigenvector and ||S v - lambda v|| of n matrices."""

    values: Tensor  # (n,)
    vectors: Tensor  # (n, d)
    residuals: Tensor  # (n,)


def dense(apply: Matvec, n: int, d: int, like: Tensor) -> Tensor:
    """The n matrices (n, d, d), column by column: one product gives one column of each."""
    columns = []
    for j in range(d):
        basis = like.new_zeros(n, d)
        basis[:, j] = 1
        columns.append(apply(basis))
    matrix = torch.stack(columns, dim=-1)
    return (matrix + matrix.mT) / 2


def from_dense(matrix: Tensor) -> Eigenpairs:
    """By eigh in float64: lambda near 0 decides a split, and float32 can fail to converge."""
    exact = matrix.double()
    values, vectors = torch.linalg.eigh(exact)
    value, vector = values[:, 0], vectors[:, :, 0]
    value = _without_noise(value, values.abs().amax(dim=1), matrix)
    residual = (exact @ vector[..., None]).squeeze(-1) - value[:, None] * vector
    return Eigenpairs(
        value.to(matrix.dtype), _oriented(vector).to(matrix.dtype), residual.norm(dim=1).to(matrix.dtype)
    )


def lanczos(apply: Matvec, start: Tensor, steps: int) -> Eigenpairs:
    """Lanczos with full re-orthogonalisation, for n matrices side by side.

    Args:
        apply: (n, d) -> (n, d), S_k v_k for each k.
        start: (n, d), the first vectors.
        steps: products to take; the Krylov space has at most this dimension.
    """
    n, d = start.shape
    steps = min(steps, d)
    basis = start.new_zeros(steps, n, d)
    alpha = torch.zeros(n, steps, dtype=torch.float64, device=start.device)
    beta = torch.zeros(n, steps, dtype=torch.float64, device=start.device)
    q = start / start.norm(dim=1, keepdim=True)
    alive = torch.ones(n, dtype=torch.bool, device=start.device)
    for j in range(steps):
        basis[j] = q
        w = apply(q)
        alpha[:, j] = (q.double() * w.double()).sum(dim=1)
        for _ in range(2):  # once is not enough in floating point, twice is
            overlap = torch.einsum("jnd,nd->jn", basis[: j + 1], w)
            w = w - torch.einsum("jnd,jn->nd", basis[: j + 1], overlap)
        norm = w.double().norm(dim=1)
        scale = alpha.abs().amax(dim=1) + beta.abs().amax(dim=1)
        # Below this the Krylov space is invariant: what is left of w is rounding.
        alive = alive & (norm > _noise(start.dtype, d) * scale)
        beta[:, j] = torch.where(alive, norm, 0.0)
        q = torch.where(alive[:, None], w / norm.clamp_min(1e-300).to(w.dtype)[:, None], 0.0)
    return _ritz(basis, alpha, beta)


def _ritz(basis: Tensor, alpha: Tensor, beta: Tensor) -> Eigenpairs:
    steps, n, _ = basis.shape
    used = basis.double().norm(dim=2).T > 0.5  # (n, steps)
    scale = alpha.abs().amax(dim=1, keepdim=True) + beta.abs().amax(dim=1, keepdim=True)
    diagonal = torch.where(used, alpha, 3 * scale + 1)  # an empty direction is never the smallest
    tridiagonal = torch.diag_embed(diagonal)
    if steps > 1:
        off = beta[:, : steps - 1]
        tridiagonal += torch.diag_embed(off, offset=1) + torch.diag_embed(off, offset=-1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    smallest = vectors[:, :, 0]  # (n, steps)
    vector = torch.einsum("jnd,nj->nd", basis, smallest.to(basis.dtype))
    vector = vector / vector.norm(dim=1, keepdim=True)
    last = used.long().sum(dim=1, keepdim=True) - 1
    tail = (beta.gather(1, last) * smallest.gather(1, last)).squeeze(1).abs()
    value = _without_noise(values[:, 0], scale.squeeze(1), basis[0])
    return Eigenpairs(value.to(basis.dtype), _oriented(vector), tail.to(basis.dtype))


def _noise(dtype: torch.dtype, d: int) -> float:
    return torch.finfo(dtype).eps * max(d, 8)


def _without_noise(value: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """A lambda within rounding of 0 is 0: a split must not hang on a rounding error."""
    return torch.where(value.abs() <= _noise(like.dtype, like.shape[-1]) * scale, 0.0, value)


def _oriented(vectors: Tensor) -> Tensor:
    """+v and -v are the same split: make the largest entry positive, so that runs agree."""
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)
