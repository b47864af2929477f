"""Normalisations: per channel they carry the unit, across channels they end it."""

from __future__ import annotations

from splitgrow.capture import path_of
from splitgrow.layout import Dims
from splitgrow.rules.registry import Op, Trait, normalise_dims, rule


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
      "native_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")  # fmt: skip
def batch_norm(op: Op) -> Dims | list[Dims]:
    """Each channel on its own: affine and running statistics follow their channel."""
    data = op.dims("input")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if op.is_tensor(name):
            op.unify(data[1], op.dims(name)[0])
    op.normalise("weight", "bias")
    op.analysis.channels.append((path_of(op.node), data[1]))
    return [data, (data[1],), (data[1],)] if isinstance(op.node.meta["val"], tuple) else data


@rule("_native_batch_norm_legit_no_training", traits=Trait.POINTWISE | Trait.LINEAR)
def batch_norm_inference(op: Op) -> Dims | list[Dims]:
    """A fixed affine map of each channel."""
    return batch_norm(op)


@rule("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def layer_norm(op: Op) -> Dims | list[Dims]:
    """Normalises over its last dimensions, so none of their neurons can be split alone."""
    data = op.dims("input")
    shape = op["normalized_shape"]
    start = len(data) - len(shape)
    op.block(list(data[start:]), f"is normalised over ({_short(op)})")
    op.normalise("weight", "bias")
    for name in ("weight", "bias"):
        if op.is_tensor(name):
            for a, b in zip(data[start:], op.dims(name), strict=True):
                op.unify(a, b)
    if not isinstance(op.node.meta["val"], tuple):
        return data
    kept = (*data[:start], *op.fresh((1,) * len(shape)))
    return [data, *[kept] * (len(op.node.meta["val"]) - 1)]


@rule("group_norm", "native_group_norm")
def group_norm(op: Op) -> Dims | list[Dims]:
    """Normalises over groups of channels, so none of them can be split alone."""
    data = op.dims("input")
    op.block(data[1], f"is normalised over ({_short(op)})")
    op.normalise("weight", "bias")
    for name in ("weight", "bias"):
        if op.is_tensor(name):
            op.unify(data[1], op.dims(name)[0])
    if not isinstance(op.node.meta["val"], tuple):
        return data
    return [data, op.fresh((1, 1)), op.fresh((1, 1))]


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
      "softmin")  # fmt: skip
def softmax(op: Op) -> Dims:
    """Mixes one dimension; the others are carried."""
    data = op.dims(op.inputs[0])
    for dim in normalise_dims(op["dim"], len(data)):
        op.block(data[dim], f"is normalised over ({_short(op)})")
    return data


def _short(op: Op) -> str:
    return op.name.rsplit(".", 1)[-1].lstrip("_").removeprefix("native_")
