"""Leave the user's world as it was found: modes, buffers, random states, and every tensor."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's mode, attributes and buffers as they were again outside.

    Modes are set module by module, because a model's own ``train()`` may do more than that
    (merge weights, freeze parts). Attributes and buffers are kept, because a forward pass may
    write to them even in eval mode (a counter, a cache), and ``torch.export`` puts copies in the
    place of lists and dicts.
    """
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    buffers = [_KeptBuffer(m._buffers, name) for m, _ in attributes for name in m._buffers]
    try:
        for module, _ in attributes:
            module.training = False
        yield
    finally:
        for module, own in attributes:
            _restore_attributes(module, own)
        for buffer in buffers:
            buffer.restore()


class _KeptBuffer:
    """A buffer as it is now, to be put back in the same tensor."""

    def __init__(self, owner: dict[str, Tensor | None], name: str) -> None:
        self._owner, self._name, self._tensor = owner, name, owner[name]
        self._value = None if self._tensor is None else self._tensor.detach().clone()

    def restore(self) -> None:
        self._owner[self._name] = self._tensor
        if self._tensor is None or self._value is None:
            return
        if self._tensor.shape != self._value.shape:
            self._tensor.data = self._value
        elif not torch.equal(self._tensor, self._value):
            self._tensor.data.copy_(self._value)


@contextlib.contextmanager
def seeded(seed: int = 0, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """A fixed random state inside (torch, numpy, random), the caller's own again outside.

    A shuffling loader or a random augmentation then gives the same batches on every pass.
    ``generators`` are seeded and put back too.
    """
    python, legacy = random.getstate(), np.random.get_state()
    own = [(generator, generator.get_state()) for generator in generators]
    # torch.manual_seed would also queue a seed for a CUDA that is not there yet, for good.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
            random.seed(seed)
            np.random.seed(seed)
            for generator, _ in own:
                generator.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
            for generator, state in own:
                generator.set_state(state)


class Undo:
    """Changes that can be taken back: all of them on an error, none otherwise."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rollback()

    def rollback(self) -> None:
        """Take back every change, the last one first.

        A second Ctrl-C waits until all is done: every step can be repeated, and a model that is
        half restored is of no use to anybody.
        """
        interrupt: KeyboardInterrupt | None = None
        while self._steps:
            try:
                self._steps[-1]()
                self._steps.pop()
            except KeyboardInterrupt as again:
                interrupt = again
        if interrupt is not None:
            raise interrupt

    def later(self, step: Callable[[], None]) -> None:
        """Remember how to take back a change that is about to be made."""
        self._steps.append(step)

    def set_attribute(self, owner: object, name: str, value: Any) -> None:
        """``owner.name = value``."""
        own = dict(vars(owner))
        self.later(lambda: _restore_attributes(owner, own))
        setattr(owner, name, value)

    def set_data(self, tensor: Tensor, data: Tensor) -> None:
        """Give a parameter or buffer other data, perhaps of another shape; its grad is dropped."""
        old, grad = tensor.data, tensor.grad
        self.later(lambda: _restore_data(tensor, old, grad))
        _swap(tensor, data)


def _restore_attributes(owner: object, own: dict[str, Any]) -> None:
    held = vars(owner)
    for name in held.keys() - own.keys():
        del held[name]
    held.update(own)


def _restore_data(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    _swap(tensor, data)
    tensor.grad = grad


def _swap(tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data``, so that autograd notices the new shape.

    A graph that is still alive (last step's loss) keeps the parameter's gradient accumulator, and
    with it the old shape. Passing through another dtype makes PyTorch drop it.
    """
    tensor.grad = None
    other = torch.float16 if data.dtype is not torch.float16 else torch.float32
    tensor.data = torch.empty(0, dtype=other, device=data.device)
    tensor.data = data
