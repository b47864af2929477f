"""Directions: the splitting gradients of a model's neurons, and what becomes of them in a split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn.functional import normalize

from splitgrow.errors import InputError
from splitgrow.plan import SplitPlan
from splitgrow.surgery import plan_regrowth, rows_of
from splitgrow.units import Unit, Units


class Directions:
    """A direction for every neuron, laid out as the model's parameters are.

    They turn slowly while a net is trained and grown, so that ``score(start=directions)`` needs
    half as many products to find the next ones.

    Attributes:
        tensors: by the name of a parameter, a tensor of its shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @classmethod
    def of_units(cls, units: Units, vectors: Mapping[str, Tensor]) -> Directions:
        """From (width, size) of each unit by name."""
        placed: dict[str, Tensor] = {}
        for unit in units:
            for slot in unit.theta:
                rows = rows_of(unit, slot, vectors[unit.name])
                whole = slot.place(rows, units.shapes[slot.name])
                placed[slot.name] = placed[slot.name] + whole if slot.name in placed else whole
        return cls(placed)

    def of(self, unit: Unit) -> Tensor:
        """(width, size) of a unit, each of length 1."""
        return normalize(unit.vectors(self.tensors), dim=1)

    def after(self, plan: SplitPlan) -> Directions:
        """Those of the grown model: what a split does to the weights, it does to them.

        Offspring have their parent's; of an input that has become two, each has half, so that a
        step along them changes the neuron's response as it did before.
        """
        return self.grown(plan.units, plan.chosen)

    def grown(self, units: Units, chosen: Mapping[str, Sequence[int]]) -> Directions:
        """The same, for the neurons of each unit that have become two."""
        self.check(units)
        plans = plan_regrowth(units, chosen)
        return Directions(
            {n: plans[n].value(t) if n in plans else t for n, t in self.tensors.items()}
        )

    def check(self, units: Units) -> None:
        """Raise unless they are those of a model with these units."""
        if wrong := self.misfit(units):
            raise InputError(
                f"start: {wrong} in what is given to start from. Give scores of this model, after "
                "a split scores.directions.after(plan), or leave it out."
            )

    def misfit(self, units: Units) -> str | None:
        """What keeps them from being those of a model with these units."""
        for name in dict.fromkeys(slot.name for unit in units for slot in unit.theta):
            here, there = units.shapes[name], self.tensors.get(name)
            if there is None or tuple(there.shape) != here:
                got = "is missing" if there is None else f"the shape {tuple(there.shape)}"
                return f"{name} has the shape {here} in this model, and {got}"
        return None
