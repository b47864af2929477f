"""A data set compressed into a few weighted points (Appendix, "Minimizing MMD").

The points are the neurons of a net f(x) = sum_i w_i sigma(theta_i, x) over the features x of the
kernel, k(s, t) = E_x[sigma(s, x) sigma(t, x)], and MMD is the mean squared distance between f and
the same net of all the data. The library grows that net like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitgrow.paper.descent import Descent, Stack
from splitgrow.paper.growth import Field
from splitgrow.paper.results import Results, Run
from splitgrow.paper.stats import compare, quartiles

# How each method grows, by the library's names. Herding finds one new point and trains it alone.
GROWN = {"splitting": "splitting", "random": "random-neuron", "new": "new", "boosting": "new"}
METHODS = tuple(GROWN)
MIXTURE = ((0.2, -2.0), (0.3, 1.0), (0.5, 3.0))  # weight and mean of each part
SHOWN = 5  # particles over phases 1 to 5


@dataclass(frozen=True)
class Setting:
    """What the paper states, and below the line what it leaves open.

    The phases are long because Adagrad at 0.01 is slow. With 1,500 iterations in every phase, the
    first one too, its point has hardly left its start, and splitting ends behind new points and
    herding (seeds 0 and 1): Algorithm 1 is meant for nets that have learnt what they can.
    """

    samples: int = 1000
    variance: float = 0.5  # of each part of the mixture
    start: tuple[float, float] = (-5.0, -3.0)
    learning_rate: float = 0.01
    # ---------------------------------------------------------------------------------------
    particles: int = 10
    bandwidth: float | None = None  # by default the median distance of the data
    first_iterations: int = 30_000  # one point, the same for all methods, has far to go
    iterations: int = 5000  # of each phase after that, for every method
    fresh: tuple[float, float] = (-5.0, 5.0)  # where "new" draws its points
    step: float = 0.1  # a point has a place and no length, to which a step could be relative
    nodes: int = 40  # of the quadrature over the kernel's frequencies
    random_features: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    points: int = 40

    def quick(self) -> Setting:
        """The same in seconds."""
        return replace(self, particles=5, first_iterations=4000, iterations=800, points=20)


class Particles(nn.Module):
    """f(x) = sum_i w_i a(x) cos(omega(x) theta_i + b(x)), for features x = (omega, b, a).

    The weights w are not trained: splits halve them.
    """

    def __init__(self, theta: Tensor, fresh: tuple[float, float]) -> None:
        super().__init__()
        self.fresh = fresh
        self.theta = nn.Parameter(theta.clone())
        self.weight: Tensor
        self.register_buffer("weight", torch.full_like(theta, 1 / len(theta)))

    def reset_parameters(self) -> None:
        """Draw all points anew; the library's "new" method takes new neurons from here."""
        nn.init.uniform_(self.theta, *self.fresh)

    def forward(self, features: Tensor) -> Tensor:
        """Map (B, 3) to (B,)."""
        return response(features, self.theta, self.weight)

    def numbers(self) -> list[list[float]]:
        """The points and their weights."""
        return [self.theta.tolist(), self.weight.tolist()]

    def share_evenly(self) -> None:
        """Every point the same weight, as in herding."""
        self.weight.fill_(1 / len(self.weight))


def response(features: Tensor, theta: Tensor, weight: Tensor) -> Tensor:
    """The outputs (..., B) of one net or a stack of nets with tensors (..., points)."""
    omega, phase, height = features.unbind(-1)
    z = omega.unsqueeze(-1) * theta.unsqueeze(-2) + phase.unsqueeze(-1)  # (..., B, points)
    return height * (torch.cos(z) @ weight.unsqueeze(-1)).squeeze(-1)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """MMD, in the paper's sense: without a root."""
    return (model(batch[0]) - batch[1]).square().mean()


def slope(batch: tuple[Tensor, Tensor], stack: Stack) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of every net of a stack, and its gradient."""
    (omega, phase, height), targets = batch[0].unbind(-1), batch[1]
    theta, weight = stack["theta"], stack["weight"]
    z = torch.addcmul(phase.unsqueeze(-1), omega.unsqueeze(-1), theta.unsqueeze(-2))
    error = height * (torch.cos(z) @ weight.unsqueeze(-1)).squeeze(-1) - targets  # (nets, B)
    ahead = error * (height * omega * (-2 / len(targets)))
    gradient = weight * (ahead.unsqueeze(-2) @ torch.sin(z)).squeeze(-2)
    return error.square().mean(-1), {"theta": gradient}


# --- features of the kernel k(s, t) = exp(-(s - t)^2 / (2 h^2)) -------------------------------


def exact_features(bandwidth: float, nodes: int) -> Tensor:
    """(2 nodes, 3) features whose mean is the kernel to rounding: Gauss-Hermite, not random.

    cos(omega s) cos(omega t) + sin(omega s) sin(omega t) = cos(omega (s - t)), and its mean over
    omega ~ N(0, 1 / h^2) is the kernel.
    """
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    omega = torch.from_numpy(x) / bandwidth
    height = torch.from_numpy(2 * nodes * w / w.sum()).sqrt()
    zero = torch.zeros_like(omega)
    cosines = torch.stack([omega, zero, height], 1)
    sines = torch.stack([omega, zero - torch.pi / 2, height], 1)
    return torch.cat([cosines, sines])


def random_features(bandwidth: float, count: int, generator: torch.Generator) -> Tensor:
    """(count, 3) features sqrt(2) cos(omega t + b) of Rahimi and Recht (2007)."""
    omega = torch.randn(count, generator=generator, dtype=torch.float64) / bandwidth
    phase = torch.rand(count, generator=generator, dtype=torch.float64) * (2 * torch.pi)
    return torch.stack([omega, phase, torch.full_like(omega, sqrt(2))], 1)


def kernel_indexes(net: Particles, data: Tensor, bandwidth: float) -> Tensor:
    """(points,) the splitting matrices, from the second derivative of the kernel alone.

    S_i = 2 w_i ( sum_j w_j k''(theta_i, theta_j) - mean_j k''(theta_i, data_j) ); the paper
    leaves out the factor w_i, which belongs to the change of the loss.
    """
    theta = net.theta.detach()
    own = curvature(theta[:, None] - theta, bandwidth) @ net.weight
    return 2 * net.weight * (own - curvature(theta[:, None] - data, bandwidth).mean(1))


def curvature(distance: Tensor, bandwidth: float) -> Tensor:
    """Second derivative of exp(-d^2 / (2 h^2))."""
    u = (distance / bandwidth).square()
    return (u - 1) * torch.exp(-0.5 * u) / bandwidth**2


def mmd(theta: Tensor, weight: Tensor, data: Tensor, bandwidth: float) -> Tensor:
    """MMD of weighted points from the data, by the kernel alone."""

    def mean_kernel(s: Tensor, ws: Tensor, t: Tensor, wt: Tensor) -> Tensor:
        return ws @ torch.exp(-0.5 * ((s[:, None] - t) / bandwidth).square()) @ wt

    even = torch.full_like(data, 1 / len(data))
    own, cross = (theta, weight), (data, even)
    return mean_kernel(*own, *own) - 2 * mean_kernel(*own, *cross) + mean_kernel(*cross, *cross)


# --- one seed ------------------------------------------------------------------------------


class Study:
    """One seed: a data set and a first point, and every method on them."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.data = mixture(setting.samples, setting.variance, generator)
        self.bandwidth = setting.bandwidth or median_distance(self.data)
        low, high = setting.start
        first = low + (high - low) * torch.rand(1, generator=generator, dtype=torch.float64)
        self.start = Particles(first, setting.fresh)
        self.generator = generator
        self.field = self._field(exact_features(self.bandwidth, setting.nodes))
        self.descent = Descent(
            partial(slope, self.field.batch),
            partial(torch.optim.Adagrad, lr=setting.learning_rate),
            setting.iterations,
            setting.points,
        )

    def _field(self, features: Tensor) -> Field:
        """The loss and, for each feature, its mean over the data."""
        even = torch.full_like(self.data, 1 / len(self.data))
        targets = [response(piece, self.data, even) for piece in features.split(2000)]
        return Field(loss_fn, (features, torch.cat(targets)), self.setting.step)

    def run(self) -> Run:
        """All methods, up to the last number of points."""
        first = replace(self.descent, iterations=self.setting.first_iterations)
        (curve,) = first.train([self.start])
        nets = {name: copy.deepcopy(self.start) for name in METHODS}
        curves = {name: [curve] for name in METHODS}
        points = {name: [net.numbers()] for name, net in nets.items()}
        agreement: dict[str, Any] = {}
        for phase in range(2, self.setting.particles + 1):
            self._grow(nets, phase)
            found = self.descent.train(list(nets.values()), newest_only=[nets["boosting"]])
            for (name, net), curve in zip(nets.items(), found, strict=True):
                curves[name].append(curve)
                points[name].append(net.numbers())
            if phase == min(SHOWN, self.setting.particles):
                agreement = self._agreement(nets["splitting"])
        return {
            "final": {name: curve[-1][-1] for name, curve in curves.items()},
            "particles": {name: len(net.theta) for name, net in nets.items()},
            "curves": curves,
            "points": points,
            "bandwidth": self.bandwidth,
            "histogram": self._histogram(),
            "agreement": agreement,
        }

    def _grow(self, nets: Mapping[str, Particles], phase: int) -> None:
        for name, net in nets.items():
            self.field.grow(net, GROWN[name], seed=self.seed * 1000 + phase)
            if GROWN[name] == "new":
                net.share_evenly()
        self._herd(nets["boosting"])

    @torch.no_grad()
    def _herd(self, net: Particles) -> None:
        """The newest point starts at the one of the data that lowers MMD most."""
        tried = net.theta.detach().expand(len(self.data), -1).clone()
        tried[:, -1] = self.data
        losses, _ = slope(self.field.batch, {"theta": tried, "weight": net.weight})
        net.theta[-1] = self.data[losses.argmin()]

    def _histogram(self) -> list[int]:
        """The data in bins of width 0.25 from -6 to 7."""
        return [int(count) for count in np.histogram(self.data.numpy(), bins=52, range=(-6, 7))[0]]

    def _agreement(self, net: Particles) -> dict[str, Any]:
        """The splitting indexes of all points three ways: kernel, exact and random features."""
        kernel = kernel_indexes(net, self.data, self.bandwidth)
        found: dict[str, Any] = {"kernel": kernel.tolist(), "exact features": self._indexes(
            self.field, net).tolist(), "random features": {}}  # fmt: skip
        for count in self.setting.random_features:
            features = random_features(self.bandwidth, count, self.generator)
            indexes = self._indexes(self._field(features), net)
            found["random features"][str(count)] = indexes.tolist()
        return found

    @staticmethod
    def _indexes(field: Field, net: Particles) -> Tensor:
        (scores,) = field.score(net).values()
        return scores.values


def median_distance(data: Tensor) -> float:
    """The median of the distances between any two points."""
    first, second = torch.triu_indices(len(data), len(data), offset=1)
    return (data[first] - data[second]).abs().median().item()


def mixture(samples: int, variance: float, generator: torch.Generator) -> Tensor:
    """(samples,) drawn from the paper's mixture of three Gaussians."""
    weights = torch.tensor([weight for weight, _ in MIXTURE], dtype=torch.float64)
    means = torch.tensor([mean for _, mean in MIXTURE], dtype=torch.float64)
    part = torch.multinomial(weights, samples, replacement=True, generator=generator)
    noise = torch.randn(samples, generator=generator, dtype=torch.float64)
    return means[part] + sqrt(variance) * noise


def run_seed(setting: Setting, seed: int) -> Run:
    """Everything that one seed gives."""
    return Study(setting, seed).run()


# --- the paper's claims, from the results file alone -----------------------------------------


def claims(results: Results) -> dict[str, Any]:
    """Each claim of the paper, with the numbers that answer it."""
    runs = results["runs"]
    return {
        "splitting has the lowest final loss": _lowest(runs),
        "kernel and random features give the same splitting matrix": _agreements(runs),
    }


def _lowest(runs: Sequence[Run]) -> dict[str, Any]:
    losses = {name: [run["final"][name] for run in runs] for name in METHODS}
    count = max(max(run["particles"].values()) for run in runs)
    return {
        "lowest of all": sum(
            run["final"]["splitting"] == min(run["final"].values()) for run in runs
        ),
        "seeds": len(runs),
        "methods": {
            name: {
                "loss": list(quartiles(values)),
                "grew to the end": sum(run["particles"][name] == count for run in runs),
            }
            | ({} if name == "splitting" else compare(losses["splitting"], values))
            for name, values in losses.items()
        },
    }


def _agreements(runs: Sequence[Run]) -> dict[str, Any]:
    """The largest difference of any point's index, relative to the largest index of its net."""

    def differences(pick: Any) -> list[float]:
        return [
            max(abs(a - b) for a, b in zip(run["agreement"]["kernel"], pick(run), strict=True))
            / max(abs(a) for a in run["agreement"]["kernel"])
            for run in runs
        ]

    found: dict[str, Any] = {
        "exact features": max(differences(lambda run: run["agreement"]["exact features"]))
    }
    for count in runs[0]["agreement"]["random features"]:
        pick = partial(_random, count)
        found[f"{count} random features"] = list(quartiles(differences(pick)))
    return found


def _random(count: str, run: Run) -> list[float]:
    found: list[float] = run["agreement"]["random features"][count]
    return found
