"""Radial basis function nets, the paper's toy model in any number of dimensions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Gaussian(nn.Module):
    """exp(-r / 2) of a squared radius r."""

    def forward(self, squared_radius: Tensor) -> Tensor:
        """Map any shape to the same shape."""
        return torch.exp(-0.5 * squared_radius)


class RBFNet(nn.Module):
    """f(x) = sum_i w_i phi(||a_i * x + b_i||^2) + c, the sum over i a linear layer.

    `scale` a and `shift` b are (neurons, in_features) and meet x by broadcasting; `activation`
    makes the radial function phi. In one dimension with the Gaussian this is the paper's toy net.
    """

    def __init__(
        self,
        in_features: int,
        neurons: int,
        out_features: int = 1,
        activation: Callable[[], nn.Module] = Gaussian,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(neurons, in_features))
        self.shift = nn.Parameter(torch.randn(neurons, in_features))
        self.activation = activation()
        self.head = nn.Linear(neurons, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_features) to (B, out_features)."""
        z = self.scale * x.unsqueeze(-2) + self.shift  # (B, neurons, in_features)
        return self.head(self.activation(z.square().sum(-1)))


class RBFSumNet(nn.Module):
    """f(x) = sum_i w_i phi(||a_i * x + b_i||^2), written as a product and a sum over i.

    The same function as `RBFNet` without the constant c; `weight` w is (out_features, neurons).
    """

    def __init__(
        self,
        in_features: int,
        neurons: int,
        out_features: int = 1,
        activation: Callable[[], nn.Module] = Gaussian,
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(neurons, in_features))
        self.shift = nn.Parameter(torch.randn(neurons, in_features))
        self.activation = activation()
        self.weight = nn.Parameter(torch.randn(out_features, neurons) / neurons**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, in_features) to (B, out_features)."""
        z = self.scale * x.unsqueeze(-2) + self.shift  # (B, neurons, in_features)
        phi = self.activation(z.square().sum(-1))
        return (self.weight * phi.unsqueeze(-2)).sum(-1)
