"""The splitting matrix from its definition alone: real extra neurons and autograd.

Splitting neuron k into m offspring with parameters theta_1 .. theta_m and weights w_1 .. w_m
(positive, of sum 1) gives the *augmented network*: the slice of neuron k of every tensor that
carries it is replaced by those of the offspring, and every tensor that reads the neuron reads
offspring i with w_i times what it had for k. Its loss is an ordinary differentiable function of the
offspring, so that

    S_k = Hessian over delta, at delta = 0, of  L(theta_k + delta, theta_k - delta; 1/2, 1/2)

needs no theory at all. Where a neuron's slices lie is not found here but stated, by hand, in a
`UnitSpec`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

LossFn = Callable[[Callable[..., Any], Any], Tensor]


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the model meets the unit."""

    name: str  # as in state_dict
    dim: int
    positions: Callable[[int], Sequence[int]] = lambda k: [k]  # entries of that dim for neuron k


@dataclass(frozen=True)
class UnitSpec:
    """A unit, stated by hand: everything that changes when one of its neurons is split."""

    name: str  # module of the first theta parameter, or that parameter where the root owns it
    width: int
    theta: tuple[Slot, ...]  # in the order of the forward pass; weight before bias
    copies: tuple[Slot, ...]  # affines and running statistics of normalisations
    consumers: tuple[Slot, ...]
    depthwise: tuple[str, ...] = ()  # convolutions with one group per neuron
    flat: bool = False  # affine from theta to the consumers, so that S = 0


@dataclass(frozen=True)
class _Entry:
    """One entry of a resized dimension: where it comes from, and for whom."""

    source: int  # index in the old dimension
    offspring: int | None = None  # None: of another neuron
    rank: int = 0  # position among the entries of its neuron


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Cut into maximal runs of consecutive numbers."""
    runs: list[list[int]] = []
    for p in positions:
        if runs and p == runs[-1][-1] + 1:
            runs[-1].append(p)
        else:
            runs.append([p])
    return runs


def _resized(slot: Slot, size: int, width: int, k: int, count: int) -> list[_Entry]:
    """Entries of the dimension when neuron k has `count` offspring.

    The first offspring takes the place of k, the others come behind the last neuron of the unit: at
    the end of its block, which is not the end of the dimension where blocks are concatenated.
    """
    rank = {p: r for r, p in enumerate(slot.positions(k))}
    own = _runs(slot.positions(k))
    ends = {run[-1]: i for i, run in enumerate(_runs(slot.positions(width - 1)))}
    entries = []
    for p in range(size):
        entries.append(_Entry(p, 0, rank[p]) if p in rank else _Entry(p))
        if p in ends:
            new = [_Entry(q, i, rank[q]) for i in range(1, count) for q in own[ends[p]]]
            entries.extend(new)
    return entries


def _front(tensor: Tensor, slot: Slot, k: int) -> Tensor:
    """Slice of neuron k, (positions, *the other dimensions)."""
    return tensor.movedim(slot.dim, 0)[list(slot.positions(k))]


def theta(model: nn.Module, spec: UnitSpec, k: int) -> Tensor:
    """Parameters of neuron k as a vector (d,): slot after slot, each slice row-major."""
    state = model.state_dict()
    return torch.cat([_front(state[slot.name], slot, k).flatten() for slot in spec.theta])


def _moved(tensor: Tensor, slot: Slot, spec: UnitSpec, k: int, slices: Tensor) -> Tensor:
    """Give each offspring its own slice; `slices` is (offspring, size of the slice)."""
    shape = _front(tensor, slot, k).shape
    bank = torch.cat([tensor.movedim(slot.dim, 0), slices.reshape(-1, *shape[1:])])
    size = tensor.shape[slot.dim]
    index = [
        e.source if e.offspring is None else size + e.offspring * shape[0] + e.rank
        for e in _resized(slot, size, spec.width, k, len(slices))
    ]
    return bank[index].movedim(0, slot.dim)


def _copied(tensor: Tensor, slot: Slot, spec: UnitSpec, k: int, count: int) -> Tensor:
    """Give each offspring what neuron k has."""
    entries = _resized(slot, tensor.shape[slot.dim], spec.width, k, count)
    return tensor.movedim(slot.dim, 0)[[e.source for e in entries]].movedim(0, slot.dim)


def _weighted(tensor: Tensor, slot: Slot, spec: UnitSpec, k: int, weights: Tensor) -> Tensor:
    """Read offspring i with weights[i] times what neuron k is read with."""
    entries = _resized(slot, tensor.shape[slot.dim], spec.width, k, len(weights))
    one = weights.new_ones(())
    factors = torch.stack([one if e.offspring is None else weights[e.offspring] for e in entries])
    copied = _copied(tensor, slot, spec, k, len(weights)).movedim(slot.dim, -1)
    return (copied * factors).movedim(-1, slot.dim)


def _skeleton(model: nn.Module, spec: UnitSpec, extra: int) -> nn.Module:
    """Copy of the model, in eval mode, whose depthwise convolutions expect `extra` more neurons."""
    model = copy.deepcopy(model).eval()
    for name in spec.depthwise:
        conv = model.get_submodule(name)
        multiplier = conv.out_channels // conv.groups
        conv.groups += extra
        conv.in_channels += extra
        conv.out_channels += extra * multiplier
    return model


def augmented_state(
    model: nn.Module,
    spec: UnitSpec,
    k: int,
    offspring: Tensor,  # (m, d)  parameters of each offspring
    weights: Tensor,  # (m,)  of sum 1
) -> dict[str, Tensor]:
    """Tensors of the augmented network by name, differentiable in `offspring` and `weights`.

    Rows move before columns are copied: where a tensor both carries and reads the unit, the new
    columns of an offspring's row are those of its moved row.
    """
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    sizes = [_front(state[slot.name], slot, k).numel() for slot in spec.theta]
    for slot, slices in zip(spec.theta, offspring.split(sizes, 1), strict=True):
        state[slot.name] = _moved(state[slot.name], slot, spec, k, slices)
    for slot in spec.copies:
        state[slot.name] = _copied(state[slot.name], slot, spec, k, len(offspring))
    for slot in spec.consumers:
        state[slot.name] = _weighted(state[slot.name], slot, spec, k, weights)
    return state


def augmented_model(
    model: nn.Module, spec: UnitSpec, k: int, offspring: Tensor, weights: Tensor
) -> Callable[..., Any]:
    """The augmented network as a callable that takes what the model takes."""
    skeleton = _skeleton(model, spec, len(offspring) - 1)
    state = augmented_state(model, spec, k, offspring, weights)
    return lambda *args, **kwargs: functional_call(skeleton, state, args, kwargs)


def augmented_loss(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    spec: UnitSpec,
    k: int,
    offspring: Tensor,  # (m, d)
    weights: Tensor,  # (m,)
) -> Tensor:  # ()
    """Loss of the network with neuron k replaced by the offspring."""
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        return loss_fn(augmented_model(model, spec, k, offspring, weights), batch)


def splitting_matrix(
    model: nn.Module, loss_fn: LossFn, batch: Any, spec: UnitSpec, k: int
) -> Tensor:  # (d, d)
    """S_k: Hessian of the augmented loss over delta, offspring theta_k +- delta."""
    parent = theta(model, spec, k)
    halves = parent.new_full((2,), 0.5)

    def loss(delta: Tensor) -> Tensor:
        offspring = torch.stack([parent + delta, parent - delta])
        return augmented_loss(model, loss_fn, batch, spec, k, offspring, halves)

    return torch.autograd.functional.hessian(loss, torch.zeros_like(parent))
