"""The statistics of TINY growth (Verbockhaven et al. 2024) as `gromo` computes them.

gromo proposes new neurons, not splits: it has no lambda to compare. What can be compared is its
cost (statistics of every growable layer in one pass, and the proposals made from them) and the loss
for each neuron added. Its layers are classes of its own; here the plain convolutions and linear
layers of a zoo net are replaced by them, with the same weights. Two layers that feed each other
cannot grow in one step: of two such, the one with the larger promised improvement does.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from peers_bench import Batch, Bench, loss_fn
from peers_methods import DoesNotFit, Outcome
from peers_quality import SHARE
from torch import Tensor, nn

from splitgrow import zoo
from splitgrow.split import FIRST, LARGEST, SMALLEST
from splitgrow.zoo.resnet import Bottleneck


def tiny(bench: Bench) -> Outcome:
    """Statistics on every batch, proposals for every growable layer, and the best step of them."""
    model, growable = growing(bench.model)
    before = _statistics(bench, model, growable)
    bench.wait()
    start = time.perf_counter()
    chosen = _propose(growable)
    bench.wait()
    fixed = time.perf_counter() - start
    added = sum(len(layer.eigenvalues_extension) for layer in chosen)
    return Outcome(None, fixed, 1, {"grown": (model, chosen), "added": added, "loss": before})


def growing(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    """A copy in gromo's layers, and those of them whose input can grow; says why if it cannot."""
    if find_spec("gromo") is None:
        raise DoesNotFit("not installed")
    if any(isinstance(m, nn.Conv2d) and m.groups > 1 for m in model.modules()):
        raise DoesNotFit("cannot be expressed: gromo's convolutions have no groups (depthwise)")
    copied = copy.deepcopy(model)
    growable: list[Any] = []
    for chain in list(_chains(copied)):
        growable += _replace(copied, chain)
    if not growable:
        raise DoesNotFit("cannot be expressed: no two plain layers follow each other")
    return copied.eval(), growable


def _chains(model: nn.Module) -> Iterator[list[list[str]]]:
    """Names of [layer, norm or activation, ...] by link; the links of a chain feed each other."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, zoo.VGG):
            yield from _runs(module, f"{prefix}features")
        elif isinstance(module, Bottleneck):
            yield [[f"{prefix}{part}.{i}" for i in range(3)] for part in ("reduce", "conv")] + [
                [f"{prefix}expand.0"]
            ]
        elif isinstance(module, zoo.FeedForward):
            yield [[f"{prefix}up", f"{prefix}activation"], [f"{prefix}down"]]


def _runs(vgg: nn.Module, name: str) -> Iterator[list[list[str]]]:
    """Convolutions between two poolings."""
    chain: list[list[str]] = []
    for i, layer in enumerate(vgg.get_submodule("features").children()):
        if isinstance(layer, nn.MaxPool2d):
            yield chain
            chain = []
        elif isinstance(layer, nn.Conv2d):
            chain.append([f"{name}.{i}"])
        else:
            chain[-1].append(f"{name}.{i}")


def _replace(model: nn.Module, chain: list[list[str]]) -> list[Any]:
    """Put gromo's layers in place of a chain; what followed a layer becomes a part of it."""
    layers: list[Any] = []
    for first, *rest in chain:
        old = model.get_submodule(first)
        after = [_growing_norm(model.get_submodule(name)) for name in rest]
        after = [layer for layer in after if not isinstance(layer, nn.Identity)]
        layers.append(_growing_layer(old, after, layers[-1] if layers else None, first))
        model.set_submodule(first, layers[-1])
        for name in rest:
            model.set_submodule(name, nn.Identity())
    for one, two in pairwise(layers):
        one.next_module = two
    return layers[1:]


def _growing_norm(layer: nn.Module) -> nn.Module:
    from gromo.modules.growing_normalisation import GrowingBatchNorm2d

    if not isinstance(layer, nn.BatchNorm2d):
        return layer
    norm = GrowingBatchNorm2d(layer.num_features, eps=layer.eps)
    norm.load_state_dict(layer.state_dict())
    return norm.to(layer.weight.device)


def _growing_layer(old: nn.Module, after: list[nn.Module], previous: Any, name: str) -> Any:
    from gromo.modules.conv2d_growing_module import RestrictedConv2dGrowingModule
    from gromo.modules.linear_growing_module import LinearGrowingModule

    then = after[0] if len(after) == 1 else nn.Sequential(*after)
    common: dict[str, Any] = {
        "post_layer_function": then if after else nn.Identity(), "previous_module": previous,
        "allow_growing": previous is not None, "device": next(old.parameters()).device,
        "name": name.replace(".", "_"), "use_bias": old.bias is not None,
    }  # fmt: skip
    if isinstance(old, nn.Linear):
        new = LinearGrowingModule(old.in_features, old.out_features, **common)
    else:
        assert isinstance(old, nn.Conv2d)
        new = RestrictedConv2dGrowingModule(
            old.in_channels, old.out_channels, old.kernel_size, stride=old.stride,
            padding=old.padding, dilation=old.dilation, **common,
        )  # fmt: skip
    new.layer.load_state_dict(old.state_dict())
    return new


def _statistics(bench: Bench, model: nn.Module, growable: list[Any]) -> float:
    """As gromo's own `compute_statistics` does: summed losses, one pass; the mean loss."""
    total = 0.0
    for layer in growable:
        layer.init_computation()
    for images, labels in bench.batches:
        model.zero_grad()
        loss = F.cross_entropy(model(images), labels, reduction="sum")
        loss.backward()
        for layer in growable:
            layer.update_computation()
        total += loss.item()
    return total / bench.images


def _propose(growable: list[Any]) -> list[Any]:
    """New neurons for each layer's input, 30% of those it has; the layers to carry that out in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in growable:
            count = max(round(SHARE * layer.in_neurons), 1)
            layer.compute_optimal_updates(maximum_added_neurons=count, compute_delta=False)
    for layer in growable:  # a layer's statistics are used by its neighbour too
        layer.reset_computation()
    chosen: list[Any] = []
    taken: set[int] = set()
    for layer in sorted(growable, key=lambda one: -one.first_order_improvement.item()):
        both = {id(layer), id(layer.previous_module)}
        if not both & taken:
            chosen.append(layer)
            taken |= both
    return chosen


def _let_go(model: nn.Module) -> None:
    """Of activations that layers remember with their graphs, which cannot be copied."""
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                vars(module)[key] = value.detach()


def change(bench: Bench, outcome: Outcome) -> float:
    """The change of the loss at the best scale of the new neurons, searched as `split` does."""
    assert outcome.more is not None
    model, chosen = outcome.more["grown"]
    _let_go(model)
    start = outcome.more["loss"]
    tried: dict[int, float] = {}

    def at(i: int) -> float:
        if i not in tried:
            tried[i] = _loss_at(bench.batches, model, chosen, 10 ** (i / 4)) - start
        return tried[i]

    i = FIRST
    while at(i) > 0 and i > SMALLEST:
        i -= 2
    while i + 2 <= LARGEST + 8 and at(i + 2) < at(i):
        i += 2
    return min(at(i - 1), at(i), at(i + 1), 0.0)


def _loss_at(batches: list[Batch], model: nn.Module, chosen: list[Any], scale: float) -> float:
    """The mean loss with all proposals carried out at one scale, on a copy."""
    names = {id(module): name for name, module in model.named_modules()}
    grown = copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for layer in chosen:
            grown.get_submodule(names[id(layer)]).apply_change(scaling_factor=scale)
        total = sum(loss_fn(grown, batch).item() * len(batch[1]) for batch in batches)
    return total / sum(len(labels) for _, labels in batches)
