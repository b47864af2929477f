"""Optimizer state follows its neuron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.errors import OptimizerError
from splitgrow.state import Undo
from splitgrow.surgery import Regrowth

# How a state tensor scales with the gradient: momentum as the gradient (1), a running square as
# its square (2), a normalised step not at all (0). By optimizer class and by name.
DEGREES: dict[tuple[str, str], float] = {
    ("RMSprop", "momentum_buffer"): 0,
    ("Adadelta", "acc_delta"): 0,
    ("Rprop", "step_size"): 0,
    ("Rprop", "prev"): 1,
    ("Adamax", "exp_inf"): 1,
    ("Adagrad", "sum"): 2,
}
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum_sq", "exp_avg_squared", "v")
PARAMETER_LIKE = {("ASGD", "ax")}


def degree_of(optimizer: Optimizer, name: str) -> float:
    """The power of the gradient that a state tensor is."""
    for kind in type(optimizer).__mro__:
        if (kind.__name__, name) in DEGREES:
            return DEGREES[kind.__name__, name]
    return 2 if name in SQUARES or name.endswith(("_sq", "_square")) else 1


def check_owner(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], plans: Mapping[str, Regrowth]
) -> None:
    """Raise unless the optimizer owns every trainable parameter that will be resized."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n in plans if n in parameters and parameters[n].requires_grad
               and id(parameters[n]) not in owned]  # fmt: skip
    if missing:
        raise OptimizerError(
            f"the optimizer does not own {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}, which the split resizes. Give the "
            "optimizer that trains this model, or none if there is none yet."
        )


def carry_state(
    optimizer: Optimizer,
    shapes: Mapping[str, torch.Size],
    parameters: Mapping[str, nn.Parameter],
    plans: Mapping[str, Regrowth],
    undo: Undo,
) -> None:
    """Resize the state of every resized parameter; ``shapes`` are the old ones."""
    for name, plan in plans.items():
        if name not in parameters or parameters[name] not in optimizer.state:
            continue
        parameter = parameters[name]
        old: dict[str, Any] = optimizer.state[parameter]
        new = {key: _carry(optimizer, name, key, value, shapes[name], plan)
               for key, value in old.items()}  # fmt: skip
        undo.later(lambda p=parameter, state=old: optimizer.state.__setitem__(p, state))
        optimizer.state[parameter] = new


def _carry(
    optimizer: Optimizer, name: str, key: str, value: Any, shape: torch.Size, plan: Regrowth
) -> Any:
    if not isinstance(value, Tensor) or value.numel() <= 1 and value.shape != shape:
        return value
    if value.shape != shape:
        raise OptimizerError(
            f"{type(optimizer).__name__} keeps {key!r} of {name} with shape {tuple(value.shape)}, "
            f"not the parameter's {tuple(shape)}, so it cannot be resized. Split with "
            "optimizer=None and make a new optimizer."
        )
    if (type(optimizer).__name__, key) in PARAMETER_LIKE:
        return plan.value(value).contiguous()
    return plan.gradient_like(value, degree_of(optimizer, key)).contiguous()
