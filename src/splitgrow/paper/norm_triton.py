"""The kernels of ``norm_kernels``, for Triton: it compiles these functions for the GPU.

Images are rows of pixels: (rows, channels) in memory. The number of channels comes as ``blocks`` of
``BLOCK``, so that the compiler knows a divisor of it and reads several channels at a time. A
program has CHANNELS of the channels; with the others of the same ones it goes through all rows.
"""

import triton
import triton.language as tl


@triton.jit
def moments(
    x, sums, rows, blocks, BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Sums of x and of its squares over a part of the rows; sums is (2, parts, channels).

    Of the difference from the first row: squares of what is far from 0 would cancel.
    """
    channels = blocks * BLOCK
    part, parts = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    first = tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    squares = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - first[None, :]
        value = tl.where(inside, value, 0.0)
        total += value
        squares += value * value
    place = sums + part * channels + channel
    tl.store(place, tl.sum(total, 0), mask=known)
    tl.store(place + parts * channels, tl.sum(squares, 0), mask=known)


@triton.jit
def settled(
    x, sums, weight, bias, running_mean, running_var, moment, parts, rows, blocks, momentum, eps,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """From the sums: mean, 1 / deviation, factor and shift of each channel; running statistics.

    moment is (4, channels).
    """
    channels = blocks * BLOCK
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    part = tl.arange(0, PARTS)
    there = (part < parts)[:, None] & known[None, :]
    place = sums + part[:, None] * channels + channel[None, :]
    apart = tl.sum(tl.load(place, mask=there, other=0.0), 0) / rows
    square = tl.sum(tl.load(place + parts * channels, mask=there, other=0.0), 0) / rows
    variance = tl.maximum(square - apart * apart, 0.0)
    mean = apart + tl.load(x + channel, mask=known, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(variance + eps)
    factor = inverse * tl.load(weight + channel, mask=known, other=0.0)
    shift = tl.load(bias + channel, mask=known, other=0.0) - mean * factor
    tl.store(moment + channel, mean, mask=known)
    tl.store(moment + channels + channel, inverse, mask=known)
    tl.store(moment + 2 * channels + channel, factor, mask=known)
    tl.store(moment + 3 * channels + channel, shift, mask=known)
    old = tl.load(running_mean + channel, mask=known, other=0.0)
    tl.store(running_mean + channel, old + momentum * (mean - old), mask=known)
    old = tl.load(running_var + channel, mask=known, other=0.0)
    unbiased = variance * rows / (rows - 1)
    tl.store(running_var + channel, old + momentum * (unbiased - old), mask=known)


@triton.jit
def applied(
    x, moment, result, rows, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """max(factor * x + shift, 0)."""
    channels = blocks * BLOCK
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    factor = tl.load(moment + 2 * channels + channel, mask=known, other=0.0)
    shift = tl.load(moment + 3 * channels + channel, mask=known, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & known[None, :]
    at = row[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = value * factor[None, :] + shift[None, :]
    value = tl.where(value < 0.0, 0.0, value)  # NaN stays, that a diverged net shows
    tl.store(result + at, value, mask=inside)


@triton.jit
def gradient_sums(
    x, gradient, moment, sums, rows, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient behind the ReLU, and of it times the normalised x, over a part."""
    channels = blocks * BLOCK
    part, parts = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    mean = tl.load(moment + channel, mask=known, other=0.0)
    inverse = tl.load(moment + channels + channel, mask=known, other=0.0)
    factor = tl.load(moment + 2 * channels + channel, mask=known, other=0.0)
    shift = tl.load(moment + 3 * channels + channel, mask=known, other=0.0)
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    product = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(part * ROWS, rows, parts * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & known[None, :]
        at = row[:, None] * channels + channel[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(value * factor[None, :] + shift[None, :] > 0, g, 0.0)
        total += g
        product += g * (value - mean[None, :])
    place = sums + part * channels + channel
    tl.store(place, tl.sum(total, 0), mask=known)
    tl.store(place + parts * channels, tl.sum(product, 0) * inverse, mask=known)


@triton.jit
def gradient_settled(
    sums, by_weight, by_bias, parts, blocks,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias: the sums of all parts."""
    channels = blocks * BLOCK
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    part = tl.arange(0, PARTS)
    there = (part < parts)[:, None] & (channel < channels)[None, :]
    place = sums + part[:, None] * channels + channel[None, :]
    total = tl.sum(tl.load(place, mask=there, other=0.0), 0)
    product = tl.sum(tl.load(place + parts * channels, mask=there, other=0.0), 0)
    tl.store(by_bias + channel, total, mask=channel < channels)
    tl.store(by_weight + channel, product, mask=channel < channels)


@triton.jit
def gradient_applied(
    x, gradient, moment, by_weight, by_bias, result, rows, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of x."""
    channels = blocks * BLOCK
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    mean = tl.load(moment + channel, mask=known, other=0.0)
    inverse = tl.load(moment + channels + channel, mask=known, other=0.0)
    factor = tl.load(moment + 2 * channels + channel, mask=known, other=0.0)
    shift = tl.load(moment + 3 * channels + channel, mask=known, other=0.0)
    product = tl.load(by_weight + channel, mask=known, other=0.0) / rows
    total = tl.load(by_bias + channel, mask=known, other=0.0) / rows
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & known[None, :]
    at = row[:, None] * channels + channel[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.where(value * factor[None, :] + shift[None, :] > 0, g, 0.0)
    normal = (value - mean[None, :]) * inverse[None, :]
    g = factor[None, :] * (g - total[None, :] - normal * product[None, :])
    tl.store(result + at, g, mask=inside)
