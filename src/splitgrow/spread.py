"""How far the index of a sample may be from that of all the data: its standard error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from splitgrow.team import Team


class Spread:
    r"""What the standard errors of some neurons need, from how their indexes differ by group.

    Of G groups with n_g of the N samples each,

        lambda = sum_g c_g,   c_g = n_g / N * v^T S_g v,
        se^2   = G / (G - 1) * sum_g (c_g - n_g / N * lambda)^2.

    v is held fixed. To first order that is all there is, since lambda is stationary in v. What is
    left out is of second order and one-sided: the smallest eigenvalue of a sample lies below that
    of all the data, the more so the more parameters a neuron has.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        # Of each neuron the sums over g of c, c^2, c n, 1, n, n^2.
        self.sums = torch.zeros(6, width, dtype=torch.float64, device=device)

    def add(self, forms: Tensor, samples: Sequence[int]) -> None:
        """Some groups: (groups, width) their c_g, and the n_g of each."""
        c = forms.double()
        n = torch.tensor(samples, device=c.device).double()[:, None].expand_as(c)
        self.sums += torch.stack([c, c * c, c * n, torch.ones_like(c), n, n * n]).sum(dim=1)


def errors(spreads: Sequence[Spread], team: Team, place: str) -> list[Tensor]:
    """(width,) of each spread, over the groups of all ranks; nan where there is but one."""
    if not spreads:
        return []
    device = spreads[0].sums.device  # units may lie on several
    sums = team.add_(torch.cat([s.sums.to(device) for s in spreads], dim=1), place)
    total, squares, crossed, groups, samples, samples_squared = sums
    share = total / samples  # of one sample
    spread = squares - 2 * share * crossed + share**2 * samples_squared
    error = (groups / (groups - 1) * spread.clamp_min(0)).sqrt()
    error = torch.where(groups > 1, error, torch.nan)
    return list(error.split([spread.sums.shape[1] for spread in spreads]))
