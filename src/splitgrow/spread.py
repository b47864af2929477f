"""How far the index of a sample may be from that of all the data: its standard error."""

from __future__ import annotations

import torch
from torch import Tensor

from splitgrow.distributed import Team


class Spread:
    r"""The standard error of lambda, from how it differs between groups of samples.

    Of G groups with n_g of the N samples each,

        lambda = sum_g c_g,   c_g = n_g / N * v^T S_g v,
        se^2   = G / (G - 1) * sum_g (c_g - n_g / N * lambda)^2.

    v is held fixed. To first order that is all there is, since lambda is stationary in v. What is
    left out is of second order and one-sided: the smallest eigenvalue of a sample lies below that
    of all the data, the more so the more parameters a neuron has.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        zeros = torch.zeros(width, dtype=torch.float64, device=device)
        self._sum, self._squares, self._crossed = zeros, zeros.clone(), zeros.clone()
        # groups, their samples, and the squares of those
        self._counts = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, form: Tensor, samples: int) -> None:
        """One group: (width,) its c_g, and its n_g."""
        form = form.double()
        self._sum += form
        self._squares += form**2
        self._crossed += form * samples
        self._counts += torch.tensor([1, samples, samples**2], device=form.device)

    def error(self, team: Team, place: str) -> Tensor:
        """(width,) over the groups of all ranks; nan where there is but one."""
        sums = torch.cat([self._sum, self._squares, self._crossed, self._counts])
        sums = team.add_(sums, place)
        total, squares, crossed = sums[:-3].view(3, -1)
        groups, samples, samples_squared = sums[-3:]
        share = total / samples  # of one sample
        spread = squares - 2 * share * crossed + share**2 * samples_squared
        error = (groups / (groups - 1) * spread.clamp_min(0)).sqrt()
        return torch.where(groups > 1, error, torch.nan)
