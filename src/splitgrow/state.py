"""Leave the user's world as it was found: module modes and random states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own mode again outside, frozen ones included."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """A fixed random state inside (torch, numpy, random), the caller's own again outside.

    A shuffling loader or a random augmentation then gives the same batches on every pass.
    """
    python, legacy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


class Undo:
    """Changes that can be taken back: all of them on an error, none once committed."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rollback()

    def rollback(self) -> None:
        """Take back every change, the last one first."""
        while self._steps:
            self._steps.pop()()

    def later(self, step: Callable[[], None]) -> None:
        """Remember how to take a change back."""
        self._steps.append(step)

    def set_attribute(self, owner: object, name: str, value: Any) -> None:
        """``owner.name = value``."""
        old = getattr(owner, name)
        self.later(lambda: setattr(owner, name, old))
        setattr(owner, name, value)

    def set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Give a parameter or buffer other data, perhaps of another shape; its grad is dropped."""
        old, grad = tensor.data, tensor.grad
        self.later(lambda: _restore(tensor, old, grad))
        _swap(tensor, data)


def _restore(tensor: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    _swap(tensor, data)
    tensor.grad = grad


def _swap(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``, so that autograd notices the new shape.

    A graph that is still alive (last step's loss) keeps the parameter's gradient accumulator, and
    with it the old shape. Passing through another dtype makes PyTorch drop it.
    """
    tensor.grad = None
    other = torch.float16 if data.dtype is not torch.float16 else torch.float32
    if tensor.requires_grad:
        tensor.data = torch.empty(0, dtype=other, device=data.device)
    tensor.data = data
