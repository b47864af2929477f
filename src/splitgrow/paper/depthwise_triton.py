"""The kernels of ``depthwise_kernels``, for Triton: it compiles these functions for the GPU.

Images are (images, rows, columns, channels) in memory. The number of channels comes as ``blocks``
of ``BLOCK``, so that the compiler knows a divisor of it and reads several channels at a time.
"""

import triton
import triton.language as tl


@triton.jit
def neighbour(pixel, height, width, rows, columns, i, j, stride, pad, TRANSPOSED: tl.constexpr):
    """Where tap (i, j) of a pixel's filter lies among images of rows x columns; is it there?

    ``pixel`` counts through images of height x width.
    """
    image = pixel // (height * width)
    h = pixel // width % height
    w = pixel % width
    if TRANSPOSED:
        h, w = h + pad - i, w + pad - j
        there = (h % stride == 0) & (w % stride == 0) & (h >= 0) & (w >= 0)
        h, w = h // stride, w // stride
    else:
        h, w = h * stride + i - pad, w * stride + j - pad
        there = (h >= 0) & (w >= 0)
    there = there & (h < rows) & (w < columns)
    return (image * rows + h) * columns + w, there


@triton.jit
def filtered(
    source, weight, result, pixels, height, width, rows, columns, blocks, stride, pad,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, TRANSPOSED: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Each pixel of ``result`` from those of ``source`` around it."""
    channels = blocks * BLOCK
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for i in tl.static_range(SIDE):
        for j in tl.static_range(SIDE):
            at, there = neighbour(
                pixel, height, width, rows, columns, i, j, stride, pad, TRANSPOSED
            )
            place = source + at[:, None] * channels + channel[None, :]
            value = tl.load(place, mask=inside & there[:, None], other=0.0)
            place = weight + (channel * SIDE + i) * SIDE + j
            tap = tl.load(place, mask=channel < channels, other=0.0)
            total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    tl.store(result + pixel[:, None] * channels + channel[None, :], total, mask=inside)


@triton.jit
def summed(
    gradient, source, sums, pixels, height, width, rows, columns, blocks, stride, pad,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of one tap over a part of all pixels; sums is (parts, taps, channels).

    Programs of one part follow each other, so that all but the first find its pixels in the cache.
    """
    channels = blocks * BLOCK
    tap, part = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for start in range(part * PIXELS, pixels, tl.num_programs(1) * PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        at, there = neighbour(
            pixel, height, width, rows, columns, tap // SIDE, tap % SIDE, stride, pad, False
        )
        inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
        place = gradient + pixel[:, None] * channels + channel[None, :]
        g = tl.load(place, mask=inside, other=0.0)
        place = source + at[:, None] * channels + channel[None, :]
        x = tl.load(place, mask=inside & there[:, None], other=0.0)
        total += g.to(tl.float32) * x.to(tl.float32)
    place = sums + (part * SIDE * SIDE + tap) * channels + channel
    tl.store(place, tl.sum(total, 0), mask=channel < channels)
