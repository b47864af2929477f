"""Multilayer perceptron."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """A perceptron with `sizes` (inputs, hidden widths ..., outputs).

    The activation stands between the linear layers and not behind the last one; inputs of any shape
    are flattened to (B, inputs) first.
    """

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), activation()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to (B, outputs)."""
        return self.layers(x.flatten(1))
