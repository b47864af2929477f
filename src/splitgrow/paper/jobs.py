"""Jobs of a study: each gives a row of nets of several sizes, all trained alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from splitgrow.errors import InputError
from splitgrow.paper.pruning import How
from splitgrow.policy import After
from splitgrow.scores import Rank
from splitgrow.select import Per

Point = dict[str, Any]  # one net of a job, as JSON has it
Size = Literal["seed", "full"] | float  # a number: the seed's channels times that

# Each method that grows: the library's own, and what it compares gains by.
GROWN: dict[str, tuple[str, Rank, Per]] = {
    "splitting": ("splitting", "lambda", "neuron"),
    "splitting-gain": ("splitting", "gain", "neuron"),
    "splitting-params": ("splitting", "lambda", "params"),
    "splitting-macs": ("splitting", "lambda", "macs"),
    "random": ("random", "lambda", "neuron"),
}
UNIFORM = ("uniform", "uniform-long")
PRUNED = get_args(How)
FULL = "full"
METHODS = (*GROWN, *UNIFORM, *PRUNED, FULL)
WIDTH = 16  # channels of the seed, as in the paper


@dataclass(frozen=True)
class Job:
    """One row of nets.

    Args:
        arch: one of the study's nets.
        method: ``"splitting"``, by lambda alone, times the neuron's squared norm
            (``"splitting-gain"``), per added parameter (``"splitting-params"``) or operation
            (``"splitting-macs"``); ``"random"`` neurons along random directions;
            ``"uniform"`` widths, each net from scratch for one phase, or for as long as growth
            needs to its size (``"uniform-long"``); ``"l1"`` or ``"bn"`` pruning; or the
            ``"full"`` net alone, from scratch. A study has some of these.
        after: a split or a cut, train on (``"finetune"``) or from fresh weights (``"retrain"``).
        activation: one that the study has.
    """

    arch: str
    method: str
    after: After = "finetune"
    activation: str = "relu"
    seed: int = 0

    # What a study has.
    ARCHS: ClassVar[Sequence[str]] = ()
    METHODS: ClassVar[Sequence[str]] = METHODS
    ACTIVATIONS: ClassVar[Sequence[str]] = ("relu",)

    def __post_init__(self) -> None:
        if wrong := self._problems():
            raise InputError(f"job: {'; '.join(wrong)}.")

    def _problems(self) -> list[str]:
        known = {"arch": self.ARCHS, "method": self.METHODS, "after": get_args(After),
                 "activation": self.ACTIVATIONS}  # fmt: skip
        wrong = [
            f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}"
            for name, values in known.items()
            if getattr(self, name) not in values
        ]
        if self.method in (*UNIFORM, FULL) and self.after == "retrain":
            wrong.append(f'after: "{self.method}" is from scratch anyway; take "finetune"')
        return wrong

    @property
    def name(self) -> str:
        """Its file's name, without the ending."""
        return f"{self.arch}-{self.method}-{self.after}-{self.activation}-{self.seed}"


def channels(full: int, seed: int, size: Size) -> int:
    """Of a layer of a net of some size, from those of the full net and of the seed."""
    if isinstance(size, str):
        if size not in ("seed", "full"):
            raise InputError(f'size: expected "seed", "full" or a number, got {size!r}.')
        return full if size == "full" else seed
    if not round(seed * size) >= 1:
        raise InputError(f"size: {size} times {seed} channels leaves none.")
    return round(seed * size)
