"""A one-dimensional RBF net grown from 1 neuron to 8 (Figure 1 and Appendix, "Two-Layer RBF")."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi, sin, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from splitgrow.errors import SplitRefused
from splitgrow.paper.descent import Descent, Stack
from splitgrow.paper.growth import Field, entries_of
from splitgrow.paper.results import Results, Run
from splitgrow.paper.stats import compare, pearson, quartiles
from splitgrow.plan import Entry

# How each method grows a net, by the library's names. Boosting adds a new neuron and then trains
# that one alone; "scratch" has all its neurons from the start.
GROWN = {"splitting": "splitting", "random": "random", "new": "new", "boosting": "new"}
METHODS = (*GROWN, "scratch")


@dataclass(frozen=True)
class Setting:
    """What the paper states, and below the line what it leaves open."""

    truth_neurons: int = 15
    truth_variance: float = 3.0
    samples: int = 1000
    interval: float = 5.0
    neurons: int = 8
    early: int = 3  # the appendix shows fits of this size too
    # ---------------------------------------------------------------------------------------
    start_variance: float = 1.0
    iterations: int = 1500  # of each phase, for every method; from scratch, of all phases
    learning_rate: float = 0.01
    momentum: float = 0.9
    points: int = 40
    eigenvalues: int = 5
    angles: int = 13
    probe_step: float = 0.01

    def quick(self) -> Setting:
        """The same in seconds."""
        return replace(self, iterations=250, points=25, angles=7)


class Bumps(nn.Module):
    """f(x) = sum_i w_i theta_i3 exp(-(theta_i1 x + theta_i2)^2 / 2).

    theta is `scale`, `shift` and `height`, each (neurons,). The weights w are not trained: they
    are what a split halves.
    """

    def __init__(self, neurons: int, variance: float, generator: torch.Generator) -> None:
        super().__init__()
        self.deviation = sqrt(variance)
        drawn = torch.randn(3, neurons, generator=generator, dtype=torch.float64) * self.deviation
        self.scale, self.shift, self.height = (nn.Parameter(row.clone()) for row in drawn)
        self.weight: Tensor
        self.register_buffer("weight", torch.ones(neurons, dtype=torch.float64))

    def reset_parameters(self) -> None:
        """Draw all neurons anew; the library's "new" method takes new neurons from here."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.deviation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1) to (B,)."""
        return response(x, self.scale, self.shift, self.height, self.weight)

    @torch.no_grad()
    def fold(self, *, whole: bool = False) -> None:
        """Move w into theta_3, which leaves f as it is: all neurons then learn at one rate.

        ``whole``: a new neuron, which the library adds without effect, takes full effect instead,
        as in the paper.
        """
        if not whole:
            self.height.mul_(self.weight)
        self.weight.fill_(1)

    def numbers(self) -> list[list[float]]:
        """theta_1, theta_2 and theta_3 of all neurons."""
        assert bool((self.weight == 1).all())
        return [self.scale.tolist(), self.shift.tolist(), self.height.tolist()]


def response(x: Tensor, scale: Tensor, shift: Tensor, height: Tensor, weight: Tensor) -> Tensor:
    """The outputs (..., B) of one net or a stack of nets with tensors (..., neurons), x (B, 1)."""
    z = x * scale.unsqueeze(-2) + shift.unsqueeze(-2)  # (..., B, neurons)
    bumps = height.unsqueeze(-2) * torch.exp(-0.5 * z.square())
    return (bumps @ weight.unsqueeze(-1)).squeeze(-1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return (model(batch[0]) - batch[1]).square().mean()


def slope(batch: tuple[Tensor, Tensor], stack: Stack) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every net of a stack, and its gradient."""
    x, y = batch
    z = torch.addcmul(stack["shift"].unsqueeze(-2), x, stack["scale"].unsqueeze(-2))
    bumps = torch.exp(-0.5 * z * z)  # (nets, B, neurons)
    height = stack["height"] * stack["weight"]
    error = (bumps @ height.unsqueeze(-1)).squeeze(-1) - y  # (nets, B)
    ahead = error * (2 / len(y))
    to_height = (ahead.unsqueeze(-2) @ bumps).squeeze(-2)
    both = torch.stack([ahead * x.squeeze(-1), ahead], -2) @ bumps.mul_(z)  # (nets, 2, neurons)
    gradients = {
        "scale": -height * both[:, 0],
        "shift": -height * both[:, 1],
        "height": stack["weight"] * to_height,
    }
    return error.square().mean(-1), gradients


class Study:
    """One seed: a truth, its data, and every method on them."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.truth = Bumps(setting.truth_neurons, setting.truth_variance, generator)
        drawn = torch.rand(setting.samples, 1, generator=generator, dtype=torch.float64)
        x = (2 * drawn - 1) * setting.interval
        self.batch = x, self.truth(x).detach()
        self.field = Field(loss_fn, self.batch)
        self.start = Bumps(1, setting.start_variance, generator)
        self.scratch = Bumps(setting.neurons, setting.start_variance, generator)
        self.descent = Descent(
            partial(slope, self.batch),
            partial(torch.optim.SGD, lr=setting.learning_rate, momentum=setting.momentum),
            setting.iterations,
            setting.points,
        )

    def run(self) -> Run:
        """All methods, and the two probes of the splitting theory before the last split."""
        setting = self.setting
        nets = {name: copy.deepcopy(self.start) for name in GROWN}
        curves: dict[str, list[list[float]]] = {name: [] for name in GROWN}
        early, probes = {}, {}
        for phase in range(1, setting.neurons + 1):
            if phase > 1:
                self._grow(nets, phase)
            self._train(nets, curves)
            if phase == setting.early:
                early = {name: net.numbers() for name, net in nets.items()}
            if phase == setting.neurons - 1:
                probes = self._probe(nets["splitting"])
        curves["scratch"] = self._from_scratch()
        nets["scratch"] = self.scratch
        return {
            "final": {name: curve[-1][-1] for name, curve in curves.items()},
            "neurons": {name: len(net.scale) for name, net in nets.items()},
            "curves": curves,
            "truth": self.truth.numbers(),
            "early": early,
            "late": {name: net.numbers() for name, net in nets.items()},
            **probes,
        }

    def _grow(self, nets: Mapping[str, Bumps], phase: int) -> None:
        for name, net in nets.items():
            self.field.grow(net, GROWN[name], seed=self.seed * 1000 + phase)
            net.fold(whole=GROWN[name] == "new")

    def _train(self, nets: Mapping[str, Bumps], curves: dict[str, list[list[float]]]) -> None:
        found = self.descent.train(list(nets.values()), newest_only=[nets["boosting"]])
        for name, curve in zip(nets, found, strict=True):
            curves[name].append(curve)

    def _from_scratch(self) -> list[list[float]]:
        """As many iterations as all phases have; cut like theirs."""
        phases, points = self.setting.neurons, self.setting.points
        whole = replace(
            self.descent, iterations=phases * self.setting.iterations, points=phases * points
        )
        (curve,) = whole.train([self.scratch])
        return [curve[i * points : (i + 1) * points + 1] for i in range(phases)]

    # ---- what theory says of the last split ---------------------------------------------------

    def _probe(self, net: Bumps) -> Run:
        """Split each of the best neurons, and the best one along other directions."""
        entries = entries_of(self.field.score(net))
        chosen = [entry for entry in entries if entry.lambda_ < 0][: self.setting.eigenvalues]
        turned = _turned(entries[0], self.setting.angles, self.seed)
        before = loss_fn(net, self.batch).item()
        trials = [self._trial(net, entry, searched=True) for entry in chosen]
        trials += [self._trial(net, entry, searched=False) for entry in turned.values()]
        at_once = [change for _, change in trials]
        curves = self.descent.train([trial for trial, _ in trials])
        trained = [before - curve[-1] for curve in curves]
        n = len(chosen)
        return {
            "loss_before_last": before,
            "eigenvalues": {"lambda": [entry.lambda_ for entry in chosen],
                            "at_once": at_once[:n], "trained": trained[:n]},
            "angles": {"degrees": list(turned), "at_once": at_once[n:], "trained": trained[n:],
                       "lambda": entries[0].lambda_},
        }  # fmt: skip

    def _trial(self, net: Bumps, entry: Entry, *, searched: bool) -> tuple[Bumps, float]:
        """A copy with one neuron split, to be trained; and the decrease at the fixed step."""
        fixed = copy.deepcopy(net)
        receipt = self.field.split(fixed, entry, step=self.setting.probe_step)
        assert receipt.measured is not None
        trial = fixed
        if searched:
            trial = copy.deepcopy(net)
            try:
                self.field.split(trial, entry)
            except SplitRefused:
                trial = fixed
        trial.fold()
        return trial, -receipt.measured


def _turned(entry: Entry, count: int, seed: int) -> dict[float, Entry]:
    """By angle in degrees, the same neuron with its direction turned in a random plane."""
    generator = torch.Generator().manual_seed(seed)
    v = entry.direction
    other = torch.randn(len(v), generator=generator, dtype=torch.float64)
    other -= (other @ v) * v
    other /= other.norm()
    found = {}
    for i in range(count):
        angle = pi * (i / (count - 1) - 0.5)
        direction = v if 2 * i == count - 1 else cos(angle) * v + sin(angle) * other
        found[round(180 * angle / pi, 6)] = replace(entry, direction=direction)
    return found


def run_seed(setting: Setting, seed: int) -> Run:
    """Everything that one seed gives."""
    return Study(setting, seed).run()


# --- the paper's claims, from the results file alone -----------------------------------------


def claims(results: Results) -> dict[str, Any]:
    """Each claim of the paper, with the numbers that answer it."""
    runs = results["runs"]
    return {
        "eigenvalue and loss decrease correlate linearly": _correlation(runs),
        "the eigenvector's angle is the best": _best_angle(runs),
        "splitting has the lowest final loss": _lowest(runs),
        "why not: error where no neuron responds": _out_of_sight(
            runs, results["settings"]["interval"]
        ),
    }


def _correlation(runs: Sequence[Run]) -> dict[str, Any]:
    found = {}
    for when in ("at_once", "trained"):
        pairs = [(run["eigenvalues"]["lambda"], run["eigenvalues"][when]) for run in runs]
        rs = [r for x, y in pairs if (r := pearson([-v for v in x], y)) is not None]
        found[when] = {
            "r": list(quartiles(rs)) if rs else None,
            "above 0.9": sum(r > 0.9 for r in rs),
            "negative": sum(r < 0 for r in rs),
            "seeds": len(rs),
        }
    return found


def _best_angle(runs: Sequence[Run]) -> dict[str, Any]:
    found = {}
    for when in ("at_once", "trained"):
        best = [
            max(zip(run["angles"][when], run["angles"]["degrees"], strict=True))[1] for run in runs
        ]
        found[when] = {"seeds": len(runs), "at 0": sum(angle == 0 for angle in best),
                       "fraction": sum(angle == 0 for angle in best) / len(best),
                       "within 30": sum(abs(angle) <= 30 for angle in best)}  # fmt: skip
    return found


def _lowest(runs: Sequence[Run]) -> dict[str, Any]:
    losses = {name: [run["final"][name] for run in runs] for name in METHODS}
    best = sum(run["final"]["splitting"] == min(run["final"].values()) for run in runs)
    return {
        "lowest of all": best,
        "seeds": len(runs),
        "methods": {
            name: {"loss": list(quartiles(values)), "grew to the end": _complete(runs, name)}
            | ({} if name == "splitting" else compare(losses["splitting"], values))
            for name, values in losses.items()
        },
    }


def _complete(runs: Sequence[Run], name: str) -> int:
    return sum(run["neurons"][name] == run["neurons"]["scratch"] for run in runs)


def _out_of_sight(runs: Sequence[Run], edge: float) -> dict[str, Any]:
    """How much of the squared error lies where every bump is below a tenth of its height.

    There a neuron has next to no gradient, and its offspring neither: a split is local.
    """
    x = torch.linspace(-edge, edge, 2001, dtype=torch.float64)
    found = {}
    for name in METHODS:
        shares = [_share_out_of_sight(run["truth"], run["late"][name], x) for run in runs]
        found[name] = {
            "share": list(quartiles(shares)),
            "most of it": sum(share > 0.5 for share in shares),
            "seeds": len(runs),
        }
    return found


def _share_out_of_sight(truth: Sequence[Any], fitted: Sequence[Any], x: Tensor) -> float:
    bumps, outputs = _evaluated(fitted, x)
    error = (outputs - _evaluated(truth, x)[1]).square()
    return (error[bumps.amax(0) < 0.1].sum() / error.sum()).item()


def _evaluated(theta: Sequence[Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Every bump at height 1, (neurons, points), and the net's outputs, (points,)."""
    scale, shift, height = torch.tensor(theta, dtype=torch.float64).unsqueeze(-1)
    bumps = torch.exp(-0.5 * (scale * x + shift).square())
    return bumps, (height * bumps).sum(0)
