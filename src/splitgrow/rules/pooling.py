"""Pooling, padding and upsampling: positions change, channels are carried."""

from __future__ import annotations

from splitgrow.layout import Dims
from splitgrow.rules.registry import Op, Trait, rule

# Max pooling picks entries: with the choice held, as its derivative does, it is linear.
_PICK = Trait.LINEAR | Trait.HOMOGENEOUS


@rule("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "upsample_nearest1d", "upsample_linear1d",
      "reflection_pad1d", "replication_pad1d", "_upsample_nearest_exact1d",
      traits=_PICK)  # fmt: skip
def over_one(op: Op) -> Dims:
    """Works along the last dimension of each channel."""
    return op.replace(op.dims(op.inputs[0]), -1)


@rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d",
      "upsample_bilinear2d", "upsample_bicubic2d", "reflection_pad2d", "replication_pad2d",
      "_upsample_nearest_exact2d", "_adaptive_avg_pool2d", "_upsample_bilinear2d_aa",
      traits=_PICK)  # fmt: skip
def over_two(op: Op) -> Dims:
    """Works on the last two dimensions of each channel."""
    return op.replace(op.dims(op.inputs[0]), -2)


@rule("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "upsample_nearest3d",
      "upsample_trilinear3d", "reflection_pad3d", "replication_pad3d",
      "_upsample_nearest_exact3d", "_adaptive_avg_pool3d", traits=_PICK)  # fmt: skip
def over_three(op: Op) -> Dims:
    """Works on the last three dimensions of each channel."""
    return op.replace(op.dims(op.inputs[0]), -3)


def _with_indices(places: int, op: Op) -> list[Dims]:
    out = op.replace(op.dims(op.inputs[0]), -places)
    return [out, out]


@rule("max_pool1d_with_indices", "adaptive_max_pool1d", traits=_PICK)
def over_one_indexed(op: Op) -> list[Dims]:
    """Max pooling along one dimension, with the places of the maxima."""
    return _with_indices(1, op)


@rule("max_pool2d_with_indices", "adaptive_max_pool2d", traits=_PICK)
def over_two_indexed(op: Op) -> list[Dims]:
    """Max pooling over two dimensions, with the places of the maxima."""
    return _with_indices(2, op)


@rule("max_pool3d_with_indices", "adaptive_max_pool3d", traits=_PICK)
def over_three_indexed(op: Op) -> list[Dims]:
    """Max pooling over three dimensions, with the places of the maxima."""
    return _with_indices(3, op)


@rule("pad", "constant_pad_nd", traits=Trait.LINEAR)
def pad(op: Op) -> Dims:
    """Padded dimensions become positions; a padded unit could not tell its neurons apart."""
    amounts = op["pad"]
    return op.replace(op.dims("self"), -(len(amounts) // 2)) if any(amounts) else op.dims("self")
