"""Random changes of images, whole batches at a time, where the images are."""

from __future__ import annotations

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor


def mirror_and_shift(images: Tensor, most: int = 4) -> Tensor:
    """Each image mirrored or not, and moved by up to ``most`` pixels over black.

    (B, C, H, W) to the same, channels last in memory.
    """
    count, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, (most,) * 4)
    down, right = torch.randint(0, 2 * most + 1, (2, count, 1), device=device)
    rows = torch.arange(height, device=device) + down  # (B, H)
    columns = torch.arange(width, device=device) + right
    mirrored = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    sample = torch.arange(count, device=device).view(-1, 1, 1)
    picked = padded.permute(0, 2, 3, 1)[sample, rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2)


def elastic(images: Tensor, size: float = 20.0, smooth: float = 4.0) -> Tensor:
    """Each image bent by a smooth random field (Simard et al. 2003).

    The field's pixels are uniform in [-1, 1], blurred by a Gaussian of deviation ``smooth``, times
    ``size``: with the published values, pixels move by about 0.8.
    """
    count, _, height, width = images.shape
    field = torch.rand(count, 2, height, width, device=images.device) * 2 - 1
    field = _blur(field, smooth) * size
    y, x = torch.meshgrid(
        torch.arange(height, device=images.device, dtype=images.dtype),
        torch.arange(width, device=images.device, dtype=images.dtype),
        indexing="ij",
    )
    places = torch.stack([(x + field[:, 0]) / (width - 1), (y + field[:, 1]) / (height - 1)], -1)
    return F.grid_sample(images, places * 2 - 1, align_corners=True, padding_mode="border")


def _blur(fields: Tensor, deviation: float) -> Tensor:
    """A Gaussian blur of (B, C, H, W): a small matrix for each direction."""
    down, across = (_blurring(n, deviation, fields) for n in fields.shape[-2:])
    return down @ fields @ across.T


def _blurring(size: int, deviation: float, like: Tensor) -> Tensor:
    """(size, size) the matrix that blurs a line of pixels; nothing comes in from outside."""
    place = torch.arange(size, device=like.device, dtype=like.dtype)
    weight = torch.exp(-0.5 * ((place.unsqueeze(1) - place) / deviation).square())
    return weight / (deviation * (2 * pi) ** 0.5)
