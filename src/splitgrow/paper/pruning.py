"""The paper's two pruning baselines: by the L1 norm of filters, by the scale of batch norms.

Torch-Pruning's dependency graph says which tensors hold a channel and cuts them together. The
ranking is done here, because that of its pruners (1.6) divides scores by their layer's mean, cuts
ties on top of the number asked for, and leaves a layer whole that would lose all its channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from splitgrow.capture import Call, ExampleInputs
from splitgrow.errors import InputError
from splitgrow.state import eval_mode

How = Literal["l1", "bn"]
Model = TypeVar("Model", bound=nn.Module)
KNOWN = (_ConvNd, _BatchNorm, nn.Linear, nn.PReLU)  # layers with parameters, cut as they should be


@dataclass(frozen=True, eq=False)
class _Channels:
    """Channels that are cut together in all the tensors that hold them."""

    name: str  # of the first layer whose parameters give the scores
    group: Any  # Torch-Pruning's: (layer, which of its sides, indices) of all channels
    scores: Tensor  # (width,)  on the CPU; the smallest go first


def prune(
    model: Model,
    example_inputs: ExampleInputs,
    how: How,
    keep: float,
    *,
    least: int = 2,
    floor: float = 0.0,
) -> Model:
    """A smaller copy of a trained model without its least important channels.

    - ``"l1"`` (Li et al. 2016): channel j of a convolution W scores sum_ikl |W_jikl|, and every
      layer keeps the same share: the highest round(keep * width). A depthwise filter does not
      count: its channels stay with the filters of the convolution that makes them.
    - ``"bn"`` (network slimming, Liu et al. 2017): a channel scores |gamma| of its batch norm, and
      the highest round(keep * total) of all layers together stay.

    Where channels are tied, as those of a pointwise convolution and of the depthwise one behind it,
    or of layers that are added, they are one channel whose score is the mean: of |gamma| over its
    batch norms, or of the L1 norm over its filters. Channels of the model's inputs and outputs
    are never cut, nor are those without a score (linear layers; for "bn", without batch norm).

    Args:
        model: left as it was; an optimizer of it does not fit the copy.
        example_inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        how: the ranking.
        keep: share of the channels of this model that stay, 0 < keep <= 1. Prune again, and it is a
            share of what was left.
        least: channels that each layer keeps at least, its highest ones, so that none is emptied;
            they count as part of what stays.
        floor: the share of its channels that each layer keeps at least, likewise. Scales of whole
            layers may be small early in training: a ranking of all layers together would cut
            such a layer to ``least`` at once, and no training makes up for that.
    """
    _check(model, how, keep, least, floor)
    call = Call.from_example(example_inputs)
    small = copy.deepcopy(model)
    channels = _channels(small, call, how)
    scores = [found.scores for found in channels]
    leasts = [max(least, ceil(floor * len(s))) for s in scores]
    kept = _shares(scores, keep, leasts) if how == "l1" else _highest(scores, keep, leasts)
    for found, mask in zip(channels, kept, strict=True):
        if not mask.all():
            found.group.prune(idxs=(~mask).nonzero().flatten().tolist())
    _copy_requires_grad(model, small)
    _check_outputs(model, small, call)
    return small


def prune_to(
    model: Model,
    example_inputs: ExampleInputs,
    how: How,
    most: int,
    *,
    least: int = 2,
    floor: float = 0.0,
) -> Model:
    """``prune`` with the largest ``keep`` that leaves at most so many parameters.

    It is a whole number of the channels that can be cut.
    """
    _check(model, how, 1.0, least, floor)
    layers = _channels(copy.deepcopy(model), Call.from_example(example_inputs), how)
    total = sum(len(layer.scores) for layer in layers)

    def small(channels: int) -> Model:
        return prune(model, example_inputs, how, channels / total, least=least, floor=floor)

    def fits(channels: int) -> bool:
        return sum(p.numel() for p in small(channels).parameters()) <= most

    low, high = max(1, ceil(floor * total)), total + 1
    if not fits(low):
        raise InputError(
            f"prune_to: with least={least} and floor={floor}, more than {most:,} parameters stay. "
            "Lower them, or cut in several steps."
        )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return small(low)


def add_sparsity_gradient(model: nn.Module, sparsity: float = 1e-4) -> None:
    """Add the gradient of sparsity * sum |gamma| over all batch norms, sparsity * sign(gamma).

    Call it between ``backward`` and ``step`` (network slimming trains with it; 1e-4 is theirs).
    Gradients must not be scaled: with a ``GradScaler``, unscale them first. It reads no value, so
    it can be captured in a CUDA graph.
    """
    scales = _scales(model)
    if not scales:
        raise InputError(
            "add_sparsity_gradient: expected batch norms with trainable scales, got a model "
            f"({type(model).__name__}) with none. Leave the call out."
        )
    if missing := [name for name, scale in scales.items() if scale.grad is None]:
        raise InputError(
            f"add_sparsity_gradient: expected gradients, got none for {', '.join(missing)}. "
            "Call it between backward() and step()."
        )
    gradients = [scale.grad for scale in scales.values() if scale.grad is not None]
    with torch.no_grad():
        signs = torch._foreach_sign(list(scales.values()))
        torch._foreach_add_(gradients, signs, alpha=sparsity)


def _scales(model: nn.Module) -> dict[str, Tensor]:
    """gamma of every batch norm that trains it, by the norm's path."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: m.weight for name, m in norms.items() if m.affine and m.weight.requires_grad}


def widths(model: nn.Module) -> dict[str, int]:
    """The output channels of every convolution, depthwise ones too, by its path."""
    return {n: m.out_channels for n, m in model.named_modules() if isinstance(m, _ConvNd)}


# --- which channels stay ------------------------------------------------------------------------


def _shares(scores: Sequence[Tensor], keep: float, leasts: Sequence[int]) -> list[Tensor]:
    """For each layer, which channels stay: the same share of each."""
    pairs = zip(scores, leasts, strict=True)
    return [_top(s, max(round(keep * len(s)), least)) for s, least in pairs]


def _highest(scores: Sequence[Tensor], keep: float, leasts: Sequence[int]) -> Sequence[Tensor]:
    """For each layer, which channels stay: the highest of all, after the least of each."""
    safe = torch.cat([_top(s, least) for s, least in zip(scores, leasts, strict=True)])
    ranked = torch.cat(list(scores)).masked_fill(safe, inf)
    count = max(round(keep * len(ranked)), int(safe.sum()))
    return _top(ranked, count).split([len(s) for s in scores])


def _top(scores: Tensor, count: int) -> Tensor:
    """A mask of the ``count`` highest; of equal ones, the first."""
    mask = torch.zeros(len(scores), dtype=torch.bool)
    mask[scores.argsort(descending=True, stable=True)[:count]] = True
    return mask


# --- Torch-Pruning's groups ---------------------------------------------------------------------


def _channels(model: nn.Module, call: Call, how: How) -> list[_Channels]:
    """What can be pruned, in the order of the model's modules; the model is traced as it is."""
    graph = _trace(model, call)
    # The list of items, not the group, is scored: it would count the layers that read the
    # channels, and with its reduction "first" whichever layer the trace met first.
    scorer = _torch_pruning().importance.GroupMagnitudeImportance(
        p=1, group_reduction="mean", normalizer=None
    )
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    found = []
    for group in graph.get_all_groups():
        items = [item for item in group if _has_score(item, how)]
        if items and not _at_a_border(graph, group):
            name = min((_name(item) for item in items), key=order.__getitem__)
            found.append(_Channels(name, group, scorer(items).cpu()))
    _check_channels(found, how)
    return sorted(found, key=lambda channels: order[channels.name])


def _trace(model: nn.Module, call: Call) -> Any:
    """Torch-Pruning's dependency graph.

    It follows autograd's graph, in which what is frozen would be missing; and it guesses how the
    inputs are passed unless told.
    """
    model.requires_grad_(True)
    with eval_mode(model), torch.enable_grad():
        return (
            _torch_pruning()
            .DependencyGraph()
            .build_dependency(
                model, call.to(None), forward_fn=lambda net, c: net(*c.args, **c.kwargs)
            )
        )


def _torch_pruning() -> ModuleType:
    try:
        import torch_pruning
    except ImportError as error:
        raise InputError(
            "prune: pruning uses Torch-Pruning, which is not installed. "
            'Install it with: pip install "splitgrow[pruning]"'
        ) from error
    return torch_pruning


def _name(item: Any) -> str:
    return item.dep.target._name  # its property adds the class


def _has_score(item: Any, how: How) -> bool:
    """Do the parameters of this layer, on this side of it, rank the channels?"""
    layer = item.dep.layer
    if how == "bn":
        return isinstance(layer, _BatchNorm) and layer.affine
    outputs = item.dep.handler == _torch_pruning().prune_conv_out_channels  # not the depthwise one
    return isinstance(layer, _ConvNd) and outputs


def _at_a_border(graph: Any, group: Any) -> bool:
    """Are these channels of the model's own inputs or outputs?

    A layer of the model without inputs reads the model's; an operation without inputs does not
    (the transposed weight of a linear layer is one).
    """
    return any(
        (graph.is_out_channel_pruning_fn(dep.handler) and not dep.target.outputs)
        or (
            graph.is_in_channel_pruning_fn(dep.handler)
            and dep.target._name
            and not dep.target.inputs
        )
        for dep, _ in group
    )


def _copy_requires_grad(model: nn.Module, small: nn.Module) -> None:
    """Torch-Pruning's new parameters are all trainable."""
    for old, new in zip(model.parameters(), small.parameters(), strict=True):
        new.requires_grad_(old.requires_grad)


# --- checks -------------------------------------------------------------------------------------


def _check(model: nn.Module, how: How, keep: float, least: int, floor: float) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if how not in get_args(How):
        raise InputError(f'how: expected "l1" or "bn", got {how!r}.')
    if not 0 < keep <= 1:
        raise InputError(f"keep: expected a share with 0 < keep <= 1, got {keep}.")
    if least < 1:
        raise InputError(f"least: expected at least 1, or a layer could be emptied, got {least}.")
    if not 0 <= floor <= keep:
        raise InputError(f"floor: expected a share with 0 <= floor <= keep={keep}, got {floor}.")
    _check_layers(model)


def _check_layers(model: nn.Module) -> None:
    """Torch-Pruning would cut others in the wrong place, or by a guess."""
    problems = [_problem(name, module) for name, module in model.named_modules()]
    if found := [problem for problem in problems if problem]:
        raise InputError(f"prune: {'; '.join(found)}. Give a model without that.")


def _problem(name: str, module: nn.Module) -> str | None:
    place = f"{name or 'the model'} ({type(module).__name__})"
    if isinstance(module, _ConvNd) and _is_grouped(module):
        return (
            f"{place}: groups={module.groups} mix the channels of one group, so they cannot be cut "
            "one by one"
        )
    if not isinstance(module, KNOWN) and next(module.parameters(recurse=False), None) is not None:
        known = ", ".join(kind.__name__.strip("_") for kind in KNOWN)
        return f"{place}: expected parameters in layers of the kinds {known} alone"
    return None


def _is_grouped(layer: _ConvNd) -> bool:
    """More than one group, and not depthwise."""
    return layer.groups > 1 and not layer.groups == layer.in_channels == layer.out_channels


def _check_channels(found: Iterable[_Channels], how: How) -> None:
    found = list(found)
    needed = {"l1": "convolutions", "bn": "batch norms with affine=True"}[how]
    if not found:
        raise InputError(
            f'prune: expected {needed} between the inputs and the outputs for how="{how}", '
            "got none: nothing can be pruned."
        )
    if bad := [channels.name for channels in found if not channels.scores.isfinite().all()]:
        raise InputError(
            f"prune: expected finite scores, got others in {', '.join(bad)}. "
            "Look for NaN or infinite parameters there."
        )


def _check_outputs(model: nn.Module, small: nn.Module, call: Call) -> None:
    """Torch-Pruning takes operations that it does not know for element-wise."""
    expected = _output_shapes(model, call)
    try:
        got = _output_shapes(small, call)
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        raise InputError(
            f"prune: {type(model).__name__} does not run with fewer channels: {error}. "
            "Torch-Pruning did not see how its layers depend on each other, so it cannot be pruned "
            "here."
        ) from error
    if got != expected:
        raise InputError(
            f"prune: expected outputs of the shapes {expected}, got {got} from the pruned "
            f"{type(model).__name__}. Torch-Pruning did not see an output, so this model cannot be "
            "pruned here."
        )


def _output_shapes(model: nn.Module, call: Call) -> list[tuple[int, ...]]:
    given = call.to(None)
    with eval_mode(model), torch.no_grad():
        outputs = model(*given.args, **given.kwargs)
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
