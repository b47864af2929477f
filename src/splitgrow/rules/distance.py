"""Distances and similarities: a row that is compared with the data is a neuron (a prototype)."""

from __future__ import annotations

import torch
from torch import Tensor

from splitgrow.execute import REPLACED
from splitgrow.layout import ONE, Dims
from splitgrow.rules.registry import Op, rule


def _distances(left: Tensor, right: Tensor, p: float = 2.0, *_: object) -> Tensor:
    """``cdist`` with a second derivative, which PyTorch's own does not have."""
    difference = left.unsqueeze(-2) - right.unsqueeze(-3)
    if p != 2:
        return torch.linalg.vector_norm(difference, p, -1)
    squared = difference.square().sum(-1)
    apart = squared > 0  # where a prototype lies on a sample, the distance has a kink
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)


REPLACED[torch.ops.aten.cdist.default] = _distances
REPLACED[torch.ops.aten._cdist_forward.default] = _distances


@rule("cdist", "_cdist_forward")
def cdist(op: Op) -> Dims:
    """Distances between rows: the rows of both sides are carried, what they measure is not."""
    left, right = op.dims("x1"), op.dims("x2")
    op.block([left[-1], right[-1]], "is measured by a distance")
    return (*op.broadcast_dims(left[:-2], right[:-2]), left[-2], right[-2])


@rule("pairwise_distance")
def pairwise_distance(op: Op) -> Dims:
    """The distance between two tensors along the last dimension; the others are carried."""
    *rest, measured = op.broadcast_dims(op.dims("x1"), op.dims("x2"))
    op.block(measured, "is measured by a distance")
    return (*rest, ONE) if op["keepdim"] else tuple(rest)


@rule("cosine_similarity")
def cosine_similarity(op: Op) -> Dims:
    """The angle between two tensors along one dimension; the others are carried."""
    dims = op.broadcast_dims(op.dims("x1"), op.dims("x2"))
    along = op["dim"] % len(dims)
    op.block(dims[along], "is normalised over (cosine similarity)")
    return tuple(layout for d, layout in enumerate(dims) if d != along)
