"""Prototype net: classify by the distances to learnt points."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from splitgrow.zoo.mlp import MLP


def squared_distances(points: Tensor, prototypes: Tensor) -> Tensor:
    """||p_k - e||^2 of each point to each prototype, (B, D) and (K, D) to (B, K)."""
    return (prototypes - points.unsqueeze(-2)).square().sum(-1)


def euclidean_distances(points: Tensor, prototypes: Tensor) -> Tensor:
    """||p_k - e|| of each point to each prototype, (B, D) and (K, D) to (B, K)."""
    return squared_distances(points, prototypes).sqrt()


class PrototypeNet(nn.Module):
    """An encoder, its distances to `count` prototypes, a linear layer on the distances.

    `sizes` are those of the encoder, an `MLP` that ends in the prototypes' D dimensions. A
    prototype is a neuron whose parameters meet the data by broadcasting, not through a layer.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        count: int,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.ReLU,
        distances: Callable[[Tensor, Tensor], Tensor] = euclidean_distances,
    ) -> None:
        super().__init__()
        self.encoder = MLP(sizes, activation)
        self.distances = distances
        self.prototypes = nn.Parameter(torch.randn(count, sizes[-1]))
        self.classifier = nn.Linear(count, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to logits (B, num_classes)."""
        return self.classifier(self.distances(self.encoder(x), self.prototypes))
