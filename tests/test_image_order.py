"""In which order images are given to convolutions: faster, and never where that is unsafe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitgrow as sg
from splitgrow.matrix import arranged
from splitgrow.tap import collect


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (nn.Conv2d(4, 5, 1, stride=2), False),  # few channels: oneDNN writes past its workspace
        (nn.Conv2d(4, 5, 1, stride=(1, 2)), False),
        (nn.Conv2d(4, 5, 1), True),
        (nn.Conv2d(4, 5, 3, stride=2), True),
        (nn.Conv2d(16, 5, 1, stride=2), True),
    ],
)
@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_channels_last_but_not_where_it_corrupts_memory(
    first: nn.Conv2d, last: bool, given: torch.memory_format
) -> None:
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(5, 3, 3))
    images = torch.randn(2, first.in_channels, 12, 12).contiguous(memory_format=given)
    units = sg.find_units(model, images)
    ((_, _, found),) = collect(model, units, list(units), loss_fn, [images])
    (evidence,) = found["0"]
    tensors = [t for t in arranged(evidence, units["0"]).tensors() if t.ndim == 4]
    wanted = torch.channels_last if last else torch.contiguous_format
    assert tensors
    assert all(t.is_contiguous(memory_format=wanted) for t in tensors)
