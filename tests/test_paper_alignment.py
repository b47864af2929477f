"""Training in a wider twin, whose new channels are zero for ever."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitgrow.paper.alignment import aligned
from splitgrow.paper.cifar10_nets import build
from splitgrow.zoo import VGG, MobileNetV1

NETS = {
    "vgg": lambda: VGG([5, "M", 7, 11, "M", 3]),
    "mobilenet": lambda: MobileNetV1([(5, 1), (9, 2), (17, 1)], stem=3),
}


def train(net: nn.Module, steps: int = 6) -> None:
    """SGD with momentum and weight decay on fixed random images."""
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    net.train()
    for _ in range(steps):
        x = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("kind", NETS)
def test_the_twin_learns_what_the_net_would(kind: str) -> None:
    net = NETS[kind]().double()
    plain = copy.deepcopy(net)
    before, same = state(net), dict(net.named_parameters())
    train(plain)
    with aligned(net) as twin:
        widths = [m.out_channels for m in twin.modules() if isinstance(m, nn.Conv2d)]
        assert all(width % 8 == 0 for width in widths)
        train(twin)
        beyond = [p for n, p in twin.named_parameters() if p.shape != before[n].shape]
        assert beyond
    for name, expected in state(plain).items():
        torch.testing.assert_close(net.state_dict()[name], expected, rtol=1e-9, atol=1e-11)
        assert name.endswith("num_batches_tracked") or not torch.equal(expected, before[name])
    assert dict(net.named_parameters()) == same  # the same objects
    for name, wide in twin.named_parameters():  # nothing has leaked beyond the corner
        left = wide.detach().clone()
        left[tuple(slice(size) for size in before[name].shape)] = 0
        assert not left.any()


def test_other_activations_are_left_alone() -> None:
    net = build("vgg19", "softplus", "seed", width=3)
    with aligned(net) as twin:
        assert twin is net


def test_a_failing_training_changes_nothing() -> None:
    net = NETS["vgg"]().double()
    before = state(net)

    def fail() -> None:
        with aligned(net) as twin:
            train(twin)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(net).items())
