"""What the tests of surgery share: small problems, snapshots, and splits at step 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import splitgrow as sg
from splitgrow.optimizer import carry_state, check_optimizer
from splitgrow.plan import Entry, SplitPlan
from splitgrow.state import Undo
from splitgrow.surgery import plan_regrowth, regrow
from splitgrow.units import Units, named_tensors

Batch = tuple[Tensor, Tensor]


def mse(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    inputs, target = batch
    return F.mse_loss(model(inputs), target)


@dataclass
class Problem:
    """A model, data, and what splitgrow says about them."""

    model: nn.Module
    batches: list[Batch]
    units: Units
    loss_fn: Callable[..., Tensor] = mse

    @property
    def example(self) -> tuple[Tensor]:
        return (self.batches[0][0],)

    def scores(self) -> sg.Scores:
        return sg.score(self.model, self.loss_fn, self.batches, units=self.units)

    def loss(self) -> float:
        """The mean loss in eval mode, computed here and not by the package."""
        modes = [(m, m.training) for m in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            losses = [self.loss_fn(self.model, batch).item() for batch in self.batches]
        for module, training in modes:
            module.training = training
        return sum(losses) / len(losses)


def problem(
    model: nn.Module, shape: Sequence[int], dtype: torch.dtype = torch.float64, batches: int = 2
) -> Problem:
    """Random data for a model, inputs of `shape` and targets as the model's output."""
    model = model.to(dtype)
    inputs = [torch.randn(*shape, dtype=dtype) for _ in range(batches)]
    with torch.no_grad():
        sizes = [model(x).shape for x in inputs]
    data = [(x, torch.randn(s, dtype=dtype)) for x, s in zip(inputs, sizes, strict=True)]
    return Problem(model, data, sg.find_units(model, (inputs[0],)))


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        layers += [activation()] if i else []
        layers += [nn.Linear(fan_in, fan_out)]
    return nn.Sequential(*layers)


class ConvNet(nn.Module):
    """A convolution, batch norm, a depthwise one, a second one, and a linear layer."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.conv2 = nn.Conv2d(4, 5, 1)
        self.norm2 = nn.BatchNorm2d(5)
        self.act = activation()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.depthwise(self.act(self.norm1(self.conv1(x)))))
        return self.head(self.act(self.norm2(self.conv2(x))).mean((2, 3)))


def hand_plan(units: Units, chosen: dict[str, Sequence[int]], lambda_: float = -1.0) -> SplitPlan:
    """A plan along random directions, whatever the neurons' indexes are."""
    entries = []
    for name, neurons in chosen.items():
        for k in neurons:
            direction = F.normalize(torch.randn(units[name].size, dtype=torch.float64), dim=0)
            entries.append(Entry(name, k, lambda_, direction, 1.0))
    return SplitPlan(entries, units)


def split_at_zero(
    model: nn.Module,
    units: Units,
    chosen: dict[str, Sequence[int]],
    optimizer: Optimizer | None = None,
) -> None:
    """A split whose offspring stay where their parent is."""
    plans = plan_regrowth(units, chosen)
    shapes = {name: named_tensors(model)[name].shape for name in plans}
    parameters = dict(model.named_parameters())
    undo = Undo()
    if optimizer is not None:
        check_optimizer(optimizer, parameters, plans)
    regrow(model, units, plans, undo)
    if optimizer is not None:
        carry_state(optimizer, shapes, parameters, plans, undo)


def _tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return (id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype,
            tensor.device, tensor.requires_grad, bits)  # fmt: skip


def _facts(value: Any) -> Any:
    """Something that compares equal exactly when nothing changed, identities included."""
    if isinstance(value, Tensor):
        return _tensor_facts(value)
    if isinstance(value, dict):
        return id(value), {str(_key(k)): _facts(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return id(value), [_facts(v) for v in value]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return value
    return id(value)


def _key(key: Any) -> Any:
    return id(key) if isinstance(key, Tensor) else key


def _module_facts(module: nn.Module) -> dict[str, Any]:
    return {name: _facts(value) for name, value in vars(module).items()}


def random_state() -> list[Any]:
    legacy = np.random.get_state()  # noqa: NPY002  (the one that loaders draw from)
    generators = [torch.get_rng_state().tolist(), random.getstate(), legacy[1].tolist(), legacy[2]]
    if torch.cuda.is_available():
        generators.append([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return generators


def _first_difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
        return f"{names[0]}: {_first_difference(before.get(names[0]), now.get(names[0]))}"
    return f"{before} -> {now}"[:300]


class Snapshot:
    """Every bit of a model, its optimizer and the random generators, with identities."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._before = self._take()

    def _take(self) -> dict[str, Any]:
        taken: dict[str, Any] = {"random": random_state()}
        for path, module in self._model.named_modules():
            taken[f"module {path}"] = _module_facts(module)
        for name, tensor in self._model.named_parameters():
            taken[f"grad {name}"] = _facts(tensor.grad)
            taken[f"hooks {name}"] = _facts(tensor._backward_hooks)
        if self._optimizer is not None:
            taken["state"] = _facts(dict(self._optimizer.state))[1]
            taken["groups"] = _facts(self._optimizer.param_groups)
        return taken

    def differences(self) -> list[str]:
        now = self._take()
        assert now.keys() == self._before.keys()
        return [
            f"{name}: {_first_difference(self._before[name], now[name])}"
            for name in now
            if now[name] != self._before[name]
        ]

    def assert_same(self) -> None:
        found = self.differences()
        assert not found, found
