"""The parametric phase: several nets of one kind trained side by side, as one stack of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.errors import LossError

Stack = Mapping[str, Tensor]  # by name of a tensor, (nets, ...)
# The loss of every net of a stack, (nets,), and by name of a parameter its gradient.
Slope = Callable[[Stack], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(frozen=True)
class Descent:
    """Gradient descent on all the data, for a fixed number of iterations.

    Both optimizers of the paper work entry by entry, so nets in a stack do not notice each other.

    Attributes:
        slope: losses and gradients of a stack. Written out for each experiment: on nets this
            small, autograd takes three times as long.
        optimizer: makes one for the stack's parameters.
        iterations: of one phase.
        points: of the curve that is kept for a phase, beside its start.
    """

    slope: Slope
    optimizer: Callable[[list[Tensor]], Optimizer]
    iterations: int
    points: int

    def train(
        self, nets: Sequence[nn.Module], newest_only: Sequence[nn.Module] = ()
    ) -> list[list[float]]:
        """Train the nets in place; their losses at the start and at even intervals.

        Nets in ``newest_only`` move their last neuron alone.
        """
        curves: dict[int, list[float]] = {}
        for group in _by_width(nets):
            moving = torch.stack([_moving(net, net in newest_only) for net in group])
            found = self._train_stack(group, moving)
            curves.update({id(net): curve for net, curve in zip(group, found, strict=True)})
        return [curves[id(net)] for net in nets]

    def _train_stack(self, nets: Sequence[nn.Module], moving: Tensor) -> list[list[float]]:
        parameters = _stacked([dict(net.named_parameters()) for net in nets])
        stack = parameters | _stacked([dict(net.named_buffers()) for net in nets])
        optimizer = self.optimizer(list(parameters.values()))
        kept = {round(i * self.iterations / self.points) for i in range(self.points)}
        curve = []
        for iteration in range(self.iterations):
            losses, gradients = self.slope(stack)
            if iteration in kept:
                curve.append(losses.tolist())
            for name, parameter in parameters.items():
                parameter.grad = gradients[name] * moving
            optimizer.step()
        _write_back(nets, parameters)
        curve.append(self.slope(stack)[0].tolist())
        _check(curve)
        return [list(losses) for losses in zip(*curve, strict=True)]


def _by_width(nets: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """A net that could not grow is narrower than the others, and makes a stack of its own."""
    groups: dict[int, list[nn.Module]] = {}
    for net in nets:
        groups.setdefault(_width(net), []).append(net)
    return list(groups.values())


def _width(net: nn.Module) -> int:
    return len(next(net.parameters()))


def _moving(net: nn.Module, newest_only: bool) -> Tensor:  # noqa: FBT001  (private)
    """(width,) 1 for neurons that are trained."""
    moving = torch.full((_width(net),), 0.0 if newest_only else 1.0, dtype=torch.float64)
    moving[-1] = 1.0
    return moving


def _stacked(tensors: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([t[name].detach() for t in tensors]) for name in tensors[0]}


def _write_back(nets: Sequence[nn.Module], parameters: Stack) -> None:
    for i, net in enumerate(nets):
        for name, parameter in net.named_parameters():
            parameter.data.copy_(parameters[name][i])


def _check(curve: Sequence[Sequence[float]]) -> None:
    if not all(isfinite(loss) for losses in curve for loss in losses):
        raise LossError(
            "paper: the loss of a net overflowed while it was trained. The learning rate is too "
            "large for this seed: lower it in the settings."
        )
