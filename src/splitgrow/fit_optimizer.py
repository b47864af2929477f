"""The optimizer of a training: chosen, made or carried on, and its learning rate scheduled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.errors import InputError, OptimizerError
from splitgrow.phase import Phase

NewOptimizer = Literal["sgd", "adamw"] | Callable[[list[nn.Parameter]], Optimizer]
OptimizerChoice = NewOptimizer | Optimizer
Schedule = Callable[[float], float]
ScheduleChoice = Literal["constant", "cosine", "step"] | Schedule

# By name: the class, and the settings that differ from its own defaults.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
}


def problems(choice: Any, given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a choice of optimizer and what is given for it: they may be anything."""
    if not isinstance(choice, Optimizer) and not callable(choice) and choice not in OPTIMIZERS:
        yield (
            f"optimizer: expected {names(OPTIMIZERS)}, a torch.optim.Optimizer or a function "
            f"that makes one from the parameters, got {choice!r}."
        )
    for name, value in given.items():
        if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
            yield f"{name}: expected a number of 0 or more, got {value!r}."
    if choice == "adamw" and "momentum" in given:
        yield "momentum: AdamW has none. Leave it out, or take optimizer='sgd'."
    if given and not isinstance(choice, str | type):
        made = "is made already" if isinstance(choice, Optimizer) else "is made by your function"
        yield f"{', '.join(given)}: the optimizer {made}. Set it there."


def names(table: Iterable[str]) -> str:
    """What there is to choose from, for an error."""
    return ", ".join(repr(name) for name in table)


def optimizer_for(
    model: nn.Module, choice: OptimizerChoice, given: Mapping[str, Any], phase: Phase | None
) -> Optimizer:
    """The optimizer of the phase, or a new one, which the phase then has."""
    carried = phase.optimizer if phase is not None else None
    if isinstance(choice, Optimizer) or carried is None:
        optimizer = choice if isinstance(choice, Optimizer) else _made(model, choice, given)
    else:
        optimizer = carried
    _check_optimizer(optimizer, model)
    if phase is not None:
        phase.optimizer = optimizer
    _follow(optimizer)
    return optimizer


def _made(model: nn.Module, choice: NewOptimizer, given: Mapping[str, Any]) -> Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(choice, str):
        kind, defaults = OPTIMIZERS[choice]
        return kind(parameters, **{**defaults, **given})
    return choice(parameters, **given)


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            "optimizer: the function must return a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "optimizer: LBFGS computes the loss several times in a step, which fit does not do. "
            "Take optimizer='adamw', or train with a loop of your own."
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not any(id(p) in owned for p in model.parameters() if p.requires_grad):
        raise OptimizerError(
            "optimizer: it owns none of the model's trainable parameters. It was made for another "
            "model: make it from this one's model.parameters()."
        )


def _follow(optimizer: Optimizer) -> None:
    """Bring the optimizer's state to where its parameters have been moved."""
    if any(
        isinstance(value, Tensor) and key != "step" and value.device != parameter.device
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    ):
        optimizer.load_state_dict(optimizer.state_dict())  # knows which state belongs where


# --- its learning rate --------------------------------------------------------------------


@dataclass(frozen=True)
class Cosine:
    """The learning rate falls along half a cosine from its full value to ``final`` times it."""

    final: float = 0.0

    def __call__(self, at: float) -> float:
        """The factor when the fraction ``at`` of the training is done."""
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * at)) / 2


@dataclass(frozen=True)
class Step:
    """The learning rate is multiplied by ``factor`` at each of these fractions of the training."""

    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __call__(self, at: float) -> float:
        """The factor when the fraction ``at`` of the training is done."""
        return self.factor ** sum(at >= mark for mark in self.at)


SCHEDULES: dict[str, Schedule] = {"constant": lambda _: 1.0, "cosine": Cosine(), "step": Step()}


class Rates:
    """The learning rates of an optimizer's groups; outside, they are as they were."""

    def __init__(self, optimizer: Optimizer, schedule: ScheduleChoice) -> None:
        self._groups = [group for group in optimizer.param_groups if "lr" in group]
        self._full = [float(group["lr"]) for group in self._groups]
        self._schedule = schedule if callable(schedule) else SCHEDULES[schedule]

    def __enter__(self) -> Rates:
        return self

    def __exit__(self, *_: object) -> None:
        self._scale(1.0)

    def set(self, at: float) -> None:
        """The rates when the fraction ``at`` of the training is done."""
        factor = float(self._schedule(at))
        if not (math.isfinite(factor) and factor >= 0):
            raise InputError(
                f"schedule: it gives {factor} where the fraction {at:.3g} of the training is done. "
                "It must give a factor of the learning rate, 0 or more."
            )
        self._scale(factor)

    def _scale(self, factor: float) -> None:
        for group, full in zip(self._groups, self._full, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(full * factor)
            else:
                group["lr"] = full * factor
