"""Normalisations: per channel they carry the unit, across channels they end it.

Rules describe the first result alone; the others are statistics for the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from splitgrow.capture import path_of
from splitgrow.execute import REPLACED
from splitgrow.layout import Dims
from splitgrow.rules.registry import Op, Trait, normalise_dims, rule


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
      "native_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")  # fmt: skip
def batch_norm(op: Op) -> Dims:
    """Each channel on its own: affine and running statistics follow their channel."""
    data = op.dims("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if op.is_tensor(name):
            op.unify(op.dims(name)[0], data[1])
    op.normalise("weight", "bias")
    op.analysis.channels.append((path_of(op.node), data[1]))
    return data


@rule("_native_batch_norm_legit_no_training", traits=Trait.POINTWISE | Trait.LINEAR)
def batch_norm_inference(op: Op) -> Dims:
    """A fixed affine map of each channel."""
    return batch_norm(op)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(op: Op) -> Dims:
    """Normalises over its last dimensions, so none of their neurons can be split alone."""
    data = op.dims("input")
    start = len(data) - len(op["normalized_shape"])
    op.block(list(data[start:]), f"is normalised over ({_short(op)})")
    op.normalise("weight", "bias")
    for name in ("weight", "bias"):
        if op.is_tensor(name):
            for affine, layout in zip(op.dims(name), data[start:], strict=True):
                op.unify(affine, layout)
    return data


@rule("group_norm", "native_group_norm")
def group_norm(op: Op) -> Dims:
    """Normalises over groups of channels, so none of them can be split alone."""
    data = op.dims("input")
    op.block(data[1], f"is normalised over ({_short(op)})")
    op.normalise("weight", "bias")
    for name in ("weight", "bias"):
        if op.is_tensor(name):
            op.unify(op.dims(name)[0], data[1])
    return data


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax")
def softmax(op: Op) -> Dims:
    """Normalises over one dimension; the others are carried."""
    data = op.dims(op.inputs[0])
    for dim in normalise_dims(op["dim"], len(data)):
        op.block(data[dim], f"is normalised over ({_short(op)})")
    return data


@rule("cumsum", "cumprod", "logcumsumexp")
def cumulative(op: Op) -> Dims:
    """Accumulates along one dimension; the others are carried."""
    data = op.dims(op.inputs[0])
    for dim in normalise_dims(op["dim"], len(data)):
        op.block(data[dim], f"is accumulated over ({_short(op)})")
    return data


def _normalised_weight(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """``_weight_norm`` with a second derivative: PyTorch's own is wrong."""
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))


REPLACED[torch.ops.aten._weight_norm.default] = _normalised_weight


@rule("_weight_norm")
def weight_norm(op: Op) -> Dims:
    """Each row is divided by its length: rows are carried, columns cannot be halved."""
    weight, lengths = op.dims("v"), op.dims("g")
    for dim in range(len(weight)):
        if dim == op["dim"] % len(weight):
            op.unify(weight[dim], lengths[dim])
        else:
            op.block(weight[dim], "is normalised over (weight norm)")
    return weight


def _short(op: Op) -> str:
    return op.name.rsplit(".", 1)[-1].lstrip("_").removeprefix("native_")
