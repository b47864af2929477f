"""Optimizer state follows its neuron.

At step 0 of a split a number p of the parent becomes a p, and its gradient g becomes b g:

    =====================================================  =====  =====
    what                                                     a      b
    =====================================================  =====  =====
    an offspring's own parameters, normalisation affines     1     1/2
    the columns that read it                                1/2     1
    both: rows of one split layer, columns of another       1/2    1/2
    everything else                                          1      1
    =====================================================  =====  =====

A state tensor that scales as the n-th power of the gradient is duplicated and multiplied by b^n.
What then happens in training is, to rounding, what would have happened without the split, if the
settings of the parameters concerned are corrected like this:

    ============================================  =======  ==========  ==================
    optimizer                                        lr       eps        weight decay
    ============================================  =======  ==========  ==================
    SGD (momentum, Nesterov, dampening)            x a/b       -          x b/a
    ASGD (lambd x b/a, and ``eta`` as lr)          x a/b       -          x b/a
    Adam, AdamW, NAdam, RAdam from its 6th step     x a      x b         x b/a, or
    on, Adamax, RMSprop, Adagrad                                         decoupled x 1/a
    Adadelta                                        x a      -> 0         x b/a
    Rprop (``step_size`` and its limits x a)         -         -            -
    ============================================  =======  ==========  ==================

So with the settings left alone, SGD moves a split neuron half as fast and the columns that read
it twice as fast as before, relative to their size; optimizers that divide by the gradient's size
move the neuron as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from splitgrow.errors import OptimizerError
from splitgrow.state import Undo
from splitgrow.surgery import Regrowth

# The power of the gradient that a state tensor scales with: a momentum 1, a running square 2, a
# normalised step or a step size of its own 0. "value" is an average of the parameter itself.
Degree = float | Literal["value"]

DEGREES: dict[type[Optimizer], dict[str, Degree]] = {
    torch.optim.Adadelta: {"square_avg": 2, "acc_delta": 0},
    torch.optim.Adafactor: {"variance": 2},
    torch.optim.Adagrad: {"sum": 2},
    torch.optim.Adam: {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2},
    torch.optim.Adamax: {"exp_avg": 1, "exp_inf": 1},
    torch.optim.ASGD: {"ax": "value"},
    torch.optim.NAdam: {"exp_avg": 1, "exp_avg_sq": 2},
    torch.optim.RAdam: {"exp_avg": 1, "exp_avg_sq": 2},
    torch.optim.RMSprop: {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0},
    torch.optim.Rprop: {"prev": 1, "step_size": 0},
    torch.optim.SGD: {"momentum_buffer": 1},
    torch.optim.SparseAdam: {"exp_avg": 1, "exp_avg_sq": 2},
}
# For optimizers from elsewhere: names that mean the same nearly everywhere.
CUSTOMARY: dict[str, Degree] = {
    "exp_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "momentum_buffer": 1,
    "square_avg": 2,
}
# State that counts steps, one number whatever the parameter's shape.
COUNTERS = ("step",)


def state_of(kind: type[Optimizer], **degrees: Degree) -> None:
    """Say how the state tensors of an optimizer class scale with the gradient.

    A momentum has degree 1, a running square 2, a normalised step 0; an average of the parameter
    itself is ``"value"``::

        splitgrow.state_of(Lion, exp_avg=1)
    """
    DEGREES[kind] = {**DEGREES.get(kind, {}), **degrees}


def degree_of(optimizer: Optimizer, key: str) -> Degree:
    """The power of the gradient that a state tensor scales with."""
    for kind in type(optimizer).__mro__:
        if key in DEGREES.get(kind, {}):
            return DEGREES[kind][key]
    if key in CUSTOMARY:
        return CUSTOMARY[key]
    name = type(optimizer).__name__
    warnings.warn(
        f"{name} keeps {key!r}, which splitgrow does not know and takes for a running mean of the "
        f"gradient. Say how it scales: splitgrow.optimizer.state_of({name}, {key}=...).",
        stacklevel=2,
    )
    return 1


def check_optimizer(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], plans: Mapping[str, Regrowth]
) -> None:
    """Raise unless the optimizer owns what will be resized, and its state can follow."""
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [n for n in plans if n in parameters and parameters[n].requires_grad
               and id(parameters[n]) not in owned]  # fmt: skip
    if missing:
        raise OptimizerError(
            f"the optimizer does not own {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}, which the split resizes. Give the "
            "optimizer that trains this model, or none if there is none yet."
        )
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise OptimizerError(
            "LBFGS keeps the history of all parameters in one vector, which cannot be resized. "
            "Split with optimizer=None and make a new optimizer."
        )
    for name in plans:
        if name in parameters and parameters[name] in optimizer.state:
            for key, value in optimizer.state[parameters[name]].items():
                _check_state(optimizer, name, key, value, parameters[name].shape)


def _check_state(optimizer: Optimizer, name: str, key: str, value: Any, shape: torch.Size) -> None:
    if _is_plain(key, value, shape) or (isinstance(value, Tensor) and value.shape == shape):
        return
    kind = f"with shape {tuple(value.shape)}" if isinstance(value, Tensor) else (
        f"as a {type(value).__name__} of tensors")  # fmt: skip
    raise OptimizerError(
        f"{type(optimizer).__name__} keeps {key!r} of {name} {kind}, not as a tensor of the "
        f"parameter's shape {tuple(shape)}, so it cannot be resized. Split with optimizer=None "
        "and make a new optimizer."
    )


def _is_plain(key: str, value: Any, shape: torch.Size) -> bool:
    """Is this one number for the whole parameter, or no tensor at all? Then it stays as it is."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and (key in COUNTERS or value.shape != shape)
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def carry_state(
    optimizer: Optimizer,
    shapes: Mapping[str, torch.Size],
    parameters: Mapping[str, nn.Parameter],
    plans: Mapping[str, Regrowth],
    undo: Undo,
) -> None:
    """Give every resized parameter a new state; ``shapes`` are the old ones."""
    for name, plan in plans.items():
        if name not in parameters or parameters[name] not in optimizer.state:
            continue
        parameter = parameters[name]
        old: dict[str, Any] = optimizer.state[parameter]
        new = {key: _carry(optimizer, key, value, shapes[name], plan)
               for key, value in old.items()}  # fmt: skip
        undo.later(partial(optimizer.state.__setitem__, parameter, old))
        optimizer.state[parameter] = new


def _carry(optimizer: Optimizer, key: str, value: Any, shape: torch.Size, plan: Regrowth) -> Any:
    if _is_plain(key, value, shape):
        return value
    degree = degree_of(optimizer, key)
    return plan.value(value) if degree == "value" else plan.gradient_like(value, degree)
