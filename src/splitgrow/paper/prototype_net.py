"""The interpretable network of Li et al. 2018, with a prototype layer that can be split.

A code e(x) of 40 numbers is compared with prototypes in the same space; a linear layer classifies
by the distances; a decoder turns codes, and so prototypes, back into pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CODE = 40  # 10 maps of 2 x 2
MAPS = (1, 32, 32, 32, 10)
# ||theta - e|| has a kink at 0, where its second derivative is infinite: sqrt(d^2 + this) has not.
SMALLEST_SQUARE = 1e-4


class Prototypes(nn.Module):
    """`count` points theta_k in the space of codes."""

    def __init__(self, count: int = 1, size: int = CODE) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.empty(count, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in [0, 1], as published; the library's "new" method draws from here."""
        nn.init.uniform_(self.theta)

    def forward(self, codes: Tensor) -> Tensor:
        """Squared distances of codes (B, D) to each prototype, (B, count)."""
        return (self.theta - codes.unsqueeze(-2)).square().sum(-1)


class Reading(NamedTuple):
    """What the network says of a batch.

    Attributes:
        logits: (B, classes).
        pictures: (B, 1, 28, 28), the images as reconstructed from their codes.
        near: the first interpretability term, sum_k m_k min_i ||theta_k - e_i||^2.
        cover: (B,) the second, -tau log sum_k m_k exp(-||theta_k - e_i||^2 / tau), smooth.
    """

    logits: Tensor
    pictures: Tensor
    near: Tensor
    cover: Tensor


class PrototypeClassifier(nn.Module):
    """Encoder, decoder, prototypes and a linear layer on the distances, as published.

    Two things are ours. The distances are not squared, as in the splitting paper: of a squared
    distance every splitting matrix is a multiple of the identity, 2 E[g] I, which knows no
    direction. And each prototype has a mass m_k, its share in the interpretability terms: 1 / count
    as published, and halved by a split, so that dividing a prototype changes none of the terms.

    `temperature`, in units of squared distance, makes the minimum over prototypes smooth in
    `cover`; the published term is its limit at 0.
    """

    def __init__(self, count: int = 1, classes: int = 10, temperature: float = 1.0) -> None:
        super().__init__()
        self.encoder = encoder()
        self.prototypes = Prototypes(count)
        self.classifier = nn.Linear(count, classes, bias=False)
        self.decoder = decoder()
        self.near_mass: Tensor
        self.cover_mass: Tensor
        self.temperature: Tensor
        self.register_buffer("near_mass", torch.full((count,), 1 / count))
        self.register_buffer("cover_mass", torch.full((count,), 1 / count))
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, images: Tensor) -> Reading:
        """Map images (B, 1, 28, 28) in [0, 1] to a reading."""
        codes = self.encoder(images)
        squares = self.prototypes(codes)
        density = torch.exp(-squares / self.temperature) @ self.cover_mass
        return Reading(
            logits=self.classifier(torch.sqrt(squares + SMALLEST_SQUARE)),
            pictures=self.decoder(codes),
            near=squares.amin(0) @ self.near_mass,
            cover=-self.temperature * density.clamp_min(torch.finfo(density.dtype).tiny).log(),
        )

    def share_evenly(self) -> None:
        """Every prototype the same mass, as published."""
        for mass in (self.near_mass, self.cover_mass):
            mass.fill_(1 / len(mass))

    @torch.no_grad()
    def decoded(self) -> Tensor:
        """(count, 28, 28), the prototypes as pictures."""
        pictures: Tensor = self.decoder(self.prototypes.theta)
        return pictures.squeeze(1)


def encoder() -> nn.Sequential:
    """Four strided convolutions, (B, 1, 28, 28) to codes (B, 40)."""
    layers: list[nn.Module] = []
    for before, after in pairwise(MAPS):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())


def decoder() -> nn.Sequential:
    """Four transposed convolutions, codes (B, 40) to pictures (B, 1, 28, 28) in [0, 1]."""
    layers: list[nn.Module] = [nn.Unflatten(1, (MAPS[-1], 2, 2))]
    extra = (1, 0, 1, 1)  # 2, 4, 7, 14, 28 pixels
    for before, after, more in zip(MAPS[:0:-1], MAPS[-2::-1], extra, strict=True):
        conv = nn.ConvTranspose2d(before, after, 3, stride=2, padding=1, output_padding=more)
        layers += [conv, nn.Sigmoid() if after == 1 else nn.ReLU()]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Objective:
    """The weights of the four terms, as published, and which of them a loss sums.

    Every method is a loss_fn of a network and a batch of (images, labels).
    """

    classification: float = 20.0
    reconstruction: float = 1.0
    near: float = 1.0
    cover: float = 1.0

    def published(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss that is trained: all four terms, with the minimum over the prototypes."""
        images, labels = batch
        net = cast("PrototypeClassifier", net)
        codes = net.encoder(images)
        squares = net.prototypes(codes)
        logits = net.classifier(torch.sqrt(squares + SMALLEST_SQUARE))
        return (
            self.classification * F.cross_entropy(logits, labels)
            + self.reconstruction * squared_error(net.decoder(codes), images)
            + self.near * squares.amin(0).mean()
            + self.cover * squares.amin(1).mean()
        )

    def classifying(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Classification alone: the loss of the paper's splitting matrix."""
        return self.classification * F.cross_entropy(net(batch[0]).logits, batch[1])

    def full(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """All four terms, with a smooth minimum over the prototypes."""
        images, labels = batch
        found: Reading = net(images)
        return (
            self.classification * F.cross_entropy(found.logits, labels)
            + self.reconstruction * squared_error(found.pictures, images)
            + self.near * found.near
            + self.cover * found.cover.mean()
        )


def squared_error(pictures: Tensor, images: Tensor) -> Tensor:
    """Summed over the pixels, averaged over the images."""
    return (pictures - images).square().sum((1, 2, 3)).mean()
