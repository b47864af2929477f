"""Pooling, padding and upsampling: positions change, channels are carried."""

from __future__ import annotations

from typing import Any

from splitgrow.layout import Axis, Block, Cat, Dims, Layout, Prod, is_position, position, size_of
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
      "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
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


@rule("pad", "constant_pad_nd", "_pad_circular", traits=Trait.LINEAR)
def pad(op: Op) -> Dims:
    """Padded positions are positions still; channels are kept between the constants put in."""
    dims = list(op.dims("self"))
    pairs = zip(op["pad"][::2], op["pad"][1::2], strict=True)  # the last dimension first
    for d, amounts in enumerate(pairs, start=1):
        if any(amounts):
            dims[-d] = _padded(op, dims[-d], amounts, op.shape[-d])
    return tuple(dims)


def _padded(op: Op, layout: Layout, amounts: tuple[Any, Any], size: int) -> Layout:
    mode = op.arguments.get("mode", "constant")
    counted = all(isinstance(n, int) and n >= 0 for n in amounts)  # a negative one cuts off
    if is_position(layout) or not counted or mode != "constant":
        op.block(layout, f"is padded ({mode})")
        return position(size)
    reason = Block(op.place, "meets padding, which cannot grow along")
    before, after = ([Axis(n, [reason])] if n else [] for n in amounts)
    return Cat((*before, layout, *after))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sample(op: Op) -> Dims:
    """Samples each channel at the places that a grid names."""
    op.block(list(op.dims("grid")), "is a grid of places")
    return op.replace(op.dims("input"), 2)


@rule("im2col", traits=_PICK)
def im2col(op: Op) -> Dims:
    """Patches (``unfold``): each channel becomes as many entries as a patch has places."""
    *batch, channels, height, width = op.dims("self")
    op.block([height, width], "is cut into patches")
    places = position(op.shape[-2] // size_of(channels))
    return (*batch, Prod((channels, places)), *op.fresh(op.shape[-1:]))


@rule("col2im", traits=_PICK)
def col2im(op: Op) -> Dims:
    """Patches put together (``fold``): the entries of a patch become one channel."""
    *batch, patches, places = op.dims("self")
    op.block(places, "is put together from patches")
    channels = Axis(op.shape[-3])
    op.unify(patches, Prod((channels, position(size_of(patches) // channels.size))))
    return (*batch, channels, *op.fresh(op.shape[-2:]))
