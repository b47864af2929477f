"""Models inside of DistributedDataParallel: the model itself, and a new wrapper after a split."""

from __future__ import annotations

import inspect

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from splitgrow.errors import InputError

# What DistributedDataParallel was told when it was made, as far as it remembers.
SETTINGS = (
    "device_ids",
    "output_device",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "mixed_precision",
    "skip_all_reduce_unused_params",
)


def bare(model: nn.Module) -> nn.Module:
    """The model itself, inside of DistributedDataParallel."""
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    kinds = {kind.__name__ for module in inner.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise InputError(
            "model: FullyShardedDataParallel flattens its parameters, so that neurons cannot be "
            "told apart. Shard it with torch.distributed.fsdp.fully_shard."
        )
    if "FSDPModule" in kinds:
        raise InputError(
            "model: its parameters are sharded over processes (fully_shard). Gather them into a "
            "plain model, whole = splitgrow.gather(model, build, optimizer), split that one, and "
            "shard it again: model = splitgrow.scatter(whole, shard, optimizer)."
        )
    return inner


def check_bare(model: nn.Module) -> None:
    """Raise where a model is wrapped that has to be its own self."""
    if bare(model) is not model:
        raise InputError(
            "model: it is wrapped in DistributedDataParallel, and the wrapper would not follow as "
            "the model grows. Give model.module, and wrap it within train(): each phase anew."
        )


def rewrap(model: DistributedDataParallel) -> DistributedDataParallel:
    """A new DistributedDataParallel, with the old one's settings, around a model that was split.

    The old one is of no use any more: it would not reduce the gradients of parameters that were
    resized. Parameters stay the same objects, so the optimizer and its schedulers stay valid.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InputError(
            f"model: expected a DistributedDataParallel, got {type(model).__name__}. A plain model "
            "needs no new wrapper."
        )
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # From torch 2.13 on, the second name is that of the first, of which it warns.
    buffers = "broadcast_buffers" if "forward_sync_buffers" not in known else "forward_sync_buffers"
    names = [name for name in (*SETTINGS, buffers) if name in known and hasattr(model, name)]
    settings = {name: getattr(model, name) for name in names}
    mesh = getattr(model, "device_mesh", None)
    where = {"process_group": model.process_group} if mesh is None else {"device_mesh": mesh}
    if not getattr(model, "bucket_bytes_cap_default", False):
        settings["bucket_cap_mb"] = model.bucket_bytes_cap / 2**20
    fresh = DistributedDataParallel(model.module, **settings, **where)
    fresh.training = model.training
    for hook, state in getattr(model, "_comm_hooks", ()):
        fresh.register_comm_hook(state, hook)
    return fresh


def retire(model: nn.Module) -> None:
    """Make a wrapper whose model was split say so, in place of training ranks apart."""
    if isinstance(model, DistributedDataParallel):
        model.register_forward_pre_hook(_refuse)


def _refuse(*_: object) -> None:
    raise InputError(
        "this DistributedDataParallel was made before its model was split, and would not reduce "
        "the gradients of what was resized. Wrap the model again: model = splitgrow.rewrap(model)."
    )
