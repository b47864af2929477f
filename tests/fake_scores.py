"""Scores with given numbers, of a net of as many neurons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import splitgrow as sg


def fake_scores(
    values: Sequence[float], errors: Sequence[float] | None = None, samples: int = 10
) -> sg.Scores:
    """All neurons are of length 2; without errors there are none."""
    width = len(values)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
    units = sg.find_units(model, torch.randn(2, 2))
    ones = torch.ones(width)
    found = sg.UnitScores(
        units[0], torch.tensor(values), torch.ones(width, 3), 0 * ones, 2 * ones, "dense",
        torch.tensor([0.0] * width if errors is None else errors),
    )  # fmt: skip
    return sg.Scores(units, {units[0].name: found}, 1.0, samples)
