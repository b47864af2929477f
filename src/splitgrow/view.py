"""What loss functions are called with: something that behaves like the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from splitgrow.capture import Call
from splitgrow.distributed import source_of, team_of
from splitgrow.errors import InputError, LossError
from splitgrow.state import eval_mode, seeded


class ModelView:
    """Calls the model and remembers its arguments; attributes are the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __getitem__(self, key: Any) -> Any:
        """A part of the model, where that is a container: ``model[0]``."""
        return self._model[key]  # type: ignore[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, as ``model(*args, **kwargs)``."""
        self.calls.append(Call(args, kwargs))
        return self.run(Call(args, kwargs))

    def run(self, call: Call) -> Any:
        """The model's output."""
        return self._model(*call.args, **call.kwargs)

    @property
    def samples(self) -> int:
        """The batch size of the first call."""
        if not self.calls:
            raise LossError(
                "loss_fn did not call the model it was given. It must compute the loss with its "
                "first argument: loss_fn(model, batch) -> scalar tensor."
            )
        if not self.calls[0].samples:
            raise InputError("batches: one of them has no samples in it. Leave it out.")
        return self.calls[0].samples


def passes(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches once more, in the same order as every other time; never none of them."""
    check_batches(batches)
    empty = True
    with seeded(generators=generators(batches)):
        for batch in batches:
            empty = False
            yield batch
    if empty:
        raise InputError(
            "batches: there are none. Give at least one batch, in something that can be read "
            "several times: a list or a DataLoader."
        )


def generators(batches: Iterable[Any]) -> list[torch.Generator]:
    """The random generators that a loader shuffles with, where it has its own."""
    batches = source_of(batches)
    sampler, batch_sampler = getattr(batches, "sampler", None), getattr(batches, "batch_sampler", 0)
    owners = (batches, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    return [g for g in found.values() if isinstance(g, torch.Generator)]


def check_batches(batches: Iterable[Any]) -> None:
    """A list or a loader, not something that can be read only once."""
    batches = source_of(batches)
    if isinstance(batches, Tensor):
        raise InputError("batches: got a single tensor. Give a list of batches: [tensor].")
    if isinstance(batches, tuple) and batches and all(isinstance(b, Tensor) for b in batches):
        raise InputError(
            "batches: got a tuple of tensors, which looks like one batch. Put it into a list: "
            "[(inputs, targets)]."
        )
    if isinstance(batches, Mapping | str | bytes) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches: expected a list of batches or a DataLoader, got {type(batches).__name__}. "
            "One batch alone goes into a list: [batch]."
        )
    if isinstance(batches, Iterator):
        raise InputError(
            "batches: a generator can be read only once, and these are read several times. Give a "
            "list, batches=list(batches), or a DataLoader."
        )


def check_loss_fn(loss_fn: Any) -> None:
    """A function of the model and a batch, not of outputs and targets."""
    if not callable(loss_fn):
        raise InputError(
            f"loss_fn: expected a function, got {type(loss_fn).__name__}: loss_fn(model, batch) -> "
            "mean loss."
        )
    module = getattr(loss_fn, "__module__", "") or ""
    if isinstance(loss_fn, _Loss) or module == "torch.nn.functional":
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise InputError(
            f"loss_fn: {name} takes outputs and targets, but loss_fn is called with the model and "
            f"a batch. Wrap it: lambda model, batch: {name}(model(batch[0]), batch[1])."
        )
    check_call("loss_fn", loss_fn, "model, batch")


def check_call(name: str, function: Any, arguments: str) -> None:
    """Can a function be called with these arguments, as far as its signature tells?"""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise InputError(
            f"{name}: it is called as {name}({arguments}), and takes {signature} ({error})."
        ) from None


def check_scalar(loss: Any, place: str = "") -> Tensor:
    """What a loss_fn returned, if it is one number; ``place`` goes before the message."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(
            loss).__name__  # fmt: skip
        raise LossError(
            f"{place}loss_fn must return the mean loss of a batch as a scalar tensor, got {got}. "
            "Average it: loss.mean()."
        )
    return loss


def check_differentiable(loss: Tensor) -> None:
    """Raise where there is nothing to differentiate."""
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on the model's outputs (is it detached, or computed under "
            "no_grad?). Return a differentiable loss."
        )


def check_loss(loss: Any, index: int) -> Tensor:
    """The loss of batch ``index`` as a finite scalar tensor."""
    if not torch.isfinite(check_scalar(loss)):
        raise LossError(
            f"the loss of batches[{index}] is {loss.item()}. Scores of such a model mean nothing: "
            "look for such numbers in the data, a division by zero or too high a learning rate."
        )
    return loss


def mean_loss(model: nn.Module, loss_fn: Any, batches: Iterable[Any]) -> float:
    """The loss per sample over all batches (of all ranks), in eval mode and without gradients."""
    total, samples, team = 0.0, 0, team_of(batches)
    with team.guard("the loss"), eval_mode(model), torch.no_grad():
        for index, batch in enumerate(passes(batches)):
            view = ModelView(model)
            loss = check_loss(loss_fn(view, batch), index)
            total, samples = total + loss.item() * view.samples, samples + view.samples
        return team.sum(total, "the loss") / team.sum(samples, "the number of samples")


def first_call(model: nn.Module, loss_fn: Any, batches: Iterable[Any]) -> Call:
    """The arguments that loss_fn calls the model with on the first batch."""
    view = ModelView(model)
    with team_of(batches).guard("the first batch"), eval_mode(model), torch.no_grad():
        for batch in passes(batches):
            check_loss(loss_fn(view, batch), 0)
            break
        assert view.samples
    return view.calls[0]
