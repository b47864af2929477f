"""Models whose parameters are sharded over processes (FSDP2), by way of their full state.

``fully_shard`` replaces every parameter by a part of it, in place and for good. To be split, the
model is built anew with full tensors, and sharded again afterwards by the user's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.capture import named_tensors
from splitgrow.checkpoint import _become, _Description, _sizes, _transient
from splitgrow.errors import CheckpointError, InputError


def gather(
    model: nn.Module, build: Callable[[], nn.Module], optimizer: Optimizer | None = None
) -> nn.Module:
    """A plain model with the full tensors of one that was sharded by ``fully_shard``.

    Called on every rank, it gives the same model on each: to be scored and split there. The
    optimizer goes along: it has the plain model's parameters and full state from now on, and
    ``scatter`` takes it back. Full tensors and state have to fit on each rank's device for this
    while.

    Args:
        model: the sharded model; to be thrown away.
        build: makes the model as it was before it was sharded, on the device to score it on. Sizes
            may be those of the seed.
        optimizer: the one that trains it. It stays the same object, as for schedulers.
    """
    if not _is_any_sharded(model):
        raise InputError("model: its parameters are not sharded. It can be split as it is.")
    _reshard(model)
    full = _full_description(model)  # the ranks together, before anything can fail on one of them
    whole = build()
    try:
        _become(whole, "the sharded model", full)
    except CheckpointError as error:
        raise InputError(
            "build: it does not give the model that was sharded. "
            + str(error).replace("the file", "the sharded model")
        ) from error
    _copy_flags(model, whole)
    _move(optimizer, model, whole)
    return whole


def scatter(
    model: nn.Module, shard: Callable[[nn.Module], object], optimizer: Optimizer | None = None
) -> nn.Module:
    """Shard a plain model that is the same on every rank, and its optimizer's state with it.

    Args:
        model: what ``gather`` gave, split or not.
        shard: your own calls of ``fully_shard`` on a model, in place.
        optimizer: the one that was given to ``gather``, with a full state.
    """
    before = dict(model.named_parameters())
    shard(model)
    if not _is_any_sharded(model):
        raise InputError("shard: it left the parameters as they were. Call fully_shard() in it.")
    _move(optimizer, before, model)
    return model


def _copy_flags(model: nn.Module, whole: nn.Module) -> None:
    """Which modules are in training, and which parameters are trained."""
    modes = {path: module.training for path, module in model.named_modules()}
    for path, module in whole.named_modules():
        module.training = modes[path]
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trained[name])


def _is_any_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _reshard(model: nn.Module) -> None:
    """Parts in place of the full parameters that the last forward pass may have left."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_sharded(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _full_description(model: nn.Module) -> _Description:
    """Of a model as it was before it was sharded."""
    found = named_tensors(model)
    full: dict[int, Tensor] = {}  # one tensor may have several names
    for tensor in found.values():
        if id(tensor) not in full:
            full[id(tensor)] = _full(tensor)
    modules = {path: _own_class(m) for path, m in model.named_modules(remove_duplicate=False)}
    tensors = {name: full[id(tensor)] for name, tensor in found.items()}
    return _Description(tensors, _names_of_one(found), _transient(model), modules, _sizes(model))


def _names_of_one(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    firsts: dict[int, str] = {}
    named = {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    return {name: first for name, first in named.items() if name != first}


def _own_class(module: nn.Module) -> str:
    """The user's class; ``fully_shard`` puts one of its own, FSDPLinear, in front of it."""
    kind = type(module)
    made = kind.__name__.startswith("FSDP") and len(kind.__bases__) == 2
    return kind.__bases__[1].__name__ if made else kind.__name__


def _full(value: Any) -> Any:
    """The whole of a tensor of which each rank has a part."""
    return value.detach().full_tensor() if _is_sharded(value) else value


def _move(
    optimizer: Optimizer | None, old: nn.Module | Mapping[str, nn.Parameter], new: nn.Module
) -> None:
    """Give an optimizer the parameters of the same names in another model, and their state."""
    if optimizer is None:
        return
    before = dict(old.named_parameters()) if isinstance(old, nn.Module) else old
    after = dict(new.named_parameters())
    heirs = {id(before[name]): after[name] for name in before}
    unknown = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in heirs]
    if unknown:
        raise InputError(
            f"optimizer: {len(unknown)} of its parameters are not the model's. Give the one that "
            "trains this model."
        )
    moved = {
        heirs[id(p)]: {key: _as(heirs[id(p)], p.shape, value) for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
    for group in optimizer.param_groups:
        group["params"][:] = [heirs[id(p)] for p in group["params"]]
    optimizer.state.clear()
    for parameter, state in moved.items():
        optimizer.state[parameter] = state


def _as(parameter: nn.Parameter, shape: Any, value: Any) -> Any:
    """State as its parameter is: whole, or sharded in the same way."""
    if not isinstance(value, Tensor):
        return value
    if not _is_sharded(parameter):
        return _full(value)
    if value.shape != shape:
        return value  # a counter
    from torch.distributed.tensor import distribute_tensor

    held: Any = parameter
    # Every rank has the whole: nothing need be sent.
    return distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)


__all__ = ["gather", "scatter"]
