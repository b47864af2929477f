"""Prototypes of MNIST grown from one (Figure 2 of the paper, and the appendix figure).

Every run is a plain ``splitgrow.grow``: what the figures need is read from its checkpoints and its
history afterwards.
"""

from __future__ import annotations

from pathlib import Path

import torch

from splitgrow.paper.data import mnist
from splitgrow.paper.job_runs import key_of
from splitgrow.paper.prototype_bench import Bench, Setting
from splitgrow.paper.prototype_claims import claims
from splitgrow.paper.prototype_study import Study
from splitgrow.paper.results import Run

__all__ = ["Setting", "claims", "run_seed"]


def run_seed(setting: Setting, seed: int, *, data: Path, folder: Path, device: str) -> Run:
    """Everything that one seed gives. Its runs are kept in the folder, and go on from there."""
    bench = Bench(setting, seed, mnist(data), torch.device(device))
    return Study(bench, folder / key_of(setting)).run()
