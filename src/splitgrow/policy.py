"""What a growing run is told: how much to split at a time, and when to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, get_args

from splitgrow.cost import Cost
from splitgrow.curvature import Softplus
from splitgrow.errors import InputError
from splitgrow.scores import Rank
from splitgrow.select import Caps, Limits, Per, check_selection, part_of
from splitgrow.settle import Settle, is_share
from splitgrow.split import Columns, Relative, check_columns, check_step

After = Literal["finetune", "retrain"]
Goal = tuple[str, float]  # a metric's name, and the value that is enough


@dataclass(frozen=True)
class Policy:
    """How a net grows in one phase.

    Args:
        fraction: of all neurons, how many to split in a phase (the default is the paper's 30%).
        count: how many to split in a phase: the paper's m*. Give this or ``fraction``.
        threshold: lambda*, at most 0. Only neurons at or below it are split.
        rank: ``"lambda"`` as in the paper, or ``"gain"``, which knows each neuron's scale.
        per: compare gains per ``"neuron"``, per added parameter (``"params"``) or ``"macs"``.
        min_per_unit: take at least this many of each unit, where so many are negative.
        max_per_unit: take at most this many of each unit in a phase.
        max_growth: take at most this fraction of each unit's neurons in a phase.
        round_to: let the width of every unit that grows end at a multiple of this.
        step: the paper's epsilon, the same for every neuron; or ``Relative(0.3)``, a part of each
            neuron's length. By default it is searched.
        columns: ``"halved"`` as in the paper, or ``"parted"``; see :func:`splitgrow.split`.
        lanczos: Lanczos steps of a scoring; see :func:`splitgrow.score`.
        settle: score no more of the batches than it takes to choose this share of the neurons as
            all batches would; see :class:`splitgrow.Settle`. By default all are scored. Neurons are
            compared by ``rank`` alone: what they cost, and limits, are not looked at for that.
        stand_in: curvature for ReLU and other activations with kinks, in scoring alone.
        after: ``"finetune"`` trains the grown net on; ``"retrain"`` gives it fresh weights first.
    """

    fraction: float | None = None
    count: int | None = None
    threshold: float = 0.0
    rank: Rank = "lambda"
    per: Per = "neuron"
    min_per_unit: int = 0
    max_per_unit: int | None = None
    max_growth: float | None = None
    round_to: int = 1
    step: float | Relative | None = None
    columns: Columns = "halved"
    lanczos: int | None = None
    settle: float | None = None
    stand_in: Softplus | None = Softplus()  # noqa: RUF009  (frozen)
    after: After = "finetune"

    def __post_init__(self) -> None:
        if self.fraction is None and self.count is None:
            object.__setattr__(self, "fraction", 0.3)
        check_selection(self.rank, self.per, self.fraction, self.count, self.threshold, self.caps)
        if self.after not in get_args(After):
            raise InputError(f"after: expected one of {get_args(After)}, got {self.after!r}.")
        check_step(self.step)
        check_columns(self.columns)
        if self.settle is not None and not is_share(self.settle):
            raise InputError(f"settle: expected a share in (0, 1), got {self.settle!r}.")
        if self.stand_in is not None and not isinstance(self.stand_in, Softplus):
            raise InputError(
                f"stand_in: expected splitgrow.Softplus(3.0) or the like, got {self.stand_in!r}."
            )
        if self.lanczos is not None and not _is_whole(self.lanczos):
            raise InputError(
                f"lanczos: expected a whole number of at least 1, got {self.lanczos!r}."
            )

    @property
    def caps(self) -> Caps:
        """How gains are compared, and what each unit may take."""
        return Caps(self.per, self.min_per_unit, self.max_per_unit, self.round_to, self.max_growth)

    def settled(self, neurons: int) -> Settle | None:
        """When scoring may stop, of a model with so many neurons."""
        if self.settle is None:
            return None
        return Settle(self.settle, count=self.how_many(neurons), rank=self.rank)

    def how_many(self, neurons: int) -> int:
        """How many of the model's neurons to split in one phase."""
        if self.count is not None:
            return self.count
        assert self.fraction is not None
        return part_of(neurons, self.fraction)


@dataclass(frozen=True)
class Budget:
    """When a run ends: with the first of these that is reached.

    Args:
        params: the grown net has at most this many parameters; the last split is trimmed to fit.
        macs: the same, in multiply-accumulates per sample, of convolutions and matrix products;
            recurrent layers and fused attention, which never grow, are not counted.
        phases: how many times to train.
        metric: ``("accuracy", 0.99)``: end when ``evaluate`` reports at least this. For a metric
            that should fall, give its negative value: ``("-error", -0.01)``.
    """

    params: int | None = None
    macs: int | None = None
    phases: int | None = 10
    metric: Goal | None = None

    def __post_init__(self) -> None:
        for name in ("params", "macs", "phases"):
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise InputError(f"{name}: expected a whole number of at least 1, got {value!r}.")
        if self.metric is not None:
            object.__setattr__(self, "metric", _goal(self.metric))
        if all(getattr(self, name) is None for name in ("params", "macs", "phases", "metric")):
            raise InputError("until: give at least one of params, macs, phases and metric.")

    def check_seed(self, cost: Cost) -> None:
        """A seed that is too large already cannot be grown into the budget."""
        for name, spent in (("params", cost.params), ("macs", cost.macs)):
            limit = getattr(self, name)
            if limit is not None and spent > limit:
                raise InputError(
                    f"until: the model has {spent:,} {name} before it grows, more than the budget "
                    f"of {limit:,}. Start from a narrower model, or raise the budget."
                )

    def reached(self, phase: int, metrics: Mapping[str, float]) -> str | None:
        """What ends the run after this phase, other than the cost: its name, or None."""
        if self.metric is not None and _value(metrics, self.metric[0]) >= self.metric[1]:
            return "metric"
        return "phases" if self.phases is not None and phase + 1 >= self.phases else None

    def left(self, cost: Cost, count: int) -> Limits:
        """What one phase may still add."""
        params = None if self.params is None else self.params - cost.params
        macs = None if self.macs is None else self.macs - cost.macs
        return Limits(count, params, macs)


def _is_whole(value: Any) -> bool:
    """A whole number of at least 1?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _goal(goal: Any) -> Goal:
    try:
        name, value = goal
        if isinstance(name, str) and isfinite(value):
            return name, float(value)
    except (TypeError, ValueError):
        pass
    raise InputError(f'metric: expected a name and a value, ("accuracy", 0.99), got {goal!r}.')


def _value(metrics: Mapping[str, float], name: str) -> float:
    if name in metrics:
        return metrics[name]
    if name.startswith("-") and name[1:] in metrics:
        return -metrics[name[1:]]
    raise InputError(
        f"until: evaluate reports {', '.join(metrics) or 'no metrics'}, but not {name!r}."
    )
