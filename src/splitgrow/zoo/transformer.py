"""Pre-norm transformer encoder, plain or gated MLP (Vaswani et al., 2017; Shazeer, 2020)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Scaled dot-product attention of a sequence to itself with `heads` heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, dim / heads)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.activation = activation()
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to the same shape."""
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); SwiGLU where the activation is SiLU."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.activation = activation()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to the same shape."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class FusedGatedFeedForward(nn.Module):
    """The gated MLP with gate and up as the two halves of one linear layer."""

    def __init__(self, dim: int, hidden: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden)
        self.activation = activation()
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to the same shape."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activation(gate) * up)


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, dim) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Encoder for sequences of `length` vectors: embed, blocks, norm, average, linear layer.

    `mlp` is the class of the MLP in each block: `FeedForward`, `GatedFeedForward` or
    `FusedGatedFeedForward`, with `hidden` neurons.
    """

    def __init__(
        self,
        in_features: int,
        length: int,
        dim: int = 64,
        heads: int = 4,
        hidden: int = 128,
        depth: int = 2,
        num_classes: int = 10,
        activation: Callable[[], nn.Module] = nn.GELU,
        mlp: Callable[[int, int, Callable[[], nn.Module]], nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(in_features, dim)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.Sequential(
            *(EncoderBlock(dim, heads, mlp(dim, hidden, activation)) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences (B, length, in_features) to logits (B, num_classes)."""
        y = self.blocks(self.embed(x) + self.position)
        return self.classifier(self.norm(y).mean(1))
