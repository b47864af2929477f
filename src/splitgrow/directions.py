"""Directions: the splitting gradients of a model's neurons, and what becomes of them in a split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from splitgrow.errors import InputError
from splitgrow.plan import SplitPlan
from splitgrow.surgery import plan_regrowth, rows_of
from splitgrow.units import Slot, Unit, Units


class Directions:
    """A direction for every neuron, laid out as the model's parameters are, in main memory.

    They turn slowly while a net is trained and grown, so that ``score(start=directions)`` needs
    half as many products to find the next ones.

    Attributes:
        tensors: by ``name:dimension``, a tensor of the parameter's shape. Two units may share a
            parameter, each along a dimension of its own.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {key: tensor.detach().cpu() for key, tensor in tensors.items()}

    @classmethod
    def of_units(cls, units: Units, vectors: Mapping[str, Tensor]) -> Directions:
        """From (width, size) of each unit by name."""
        placed: dict[str, Tensor] = {}
        for unit in units:
            for slot in unit.theta:
                rows = rows_of(unit, slot, vectors[unit.name])
                whole = slot.place(rows, units.shapes[slot.name])
                # Parts of a concatenation are next to each other in the same dimension.
                placed[_key(slot)] = placed[_key(slot)] + whole if _key(slot) in placed else whole
        return cls(placed)

    def of(self, unit: Unit) -> Tensor:
        """(width, size) of a unit, each of length 1."""
        rows = [slot.rows(self.tensors[_key(slot)]) for slot in unit.theta]
        return normalize(torch.cat(rows, dim=1), dim=1)

    def after(self, plan: SplitPlan) -> Directions:
        """Those of the grown model: what a split does to the weights, it does to them.

        Offspring have their parent's; of an input that has become two, each has half, so that a
        step along them changes the neuron's response as it did before.
        """
        if wrong := self.misfit(plan.units):
            raise InputError(
                f"plan: it is of another model than these directions ({wrong} here). Give the plan "
                "that was selected from the same scores."
            )
        return self.grown(plan.units, plan.chosen)

    def grown(self, units: Units, chosen: Mapping[str, Sequence[int]]) -> Directions:
        """The same, for the neurons of each unit that have become two."""
        plans = plan_regrowth(units, chosen)
        found: dict[str, Tensor] = {}
        for slot in _slots(units):
            whole = self.tensors[_key(slot)]
            found[_key(slot)] = plans[slot.name].value(whole) if slot.name in plans else whole
        return Directions(found)

    def check(self, units: Units) -> None:
        """Raise unless a scoring of these units can start from them."""
        if wrong := self.misfit(units):
            raise InputError(
                f"start: {wrong} in what is given to start from. Give scores of this model, after "
                "a split scores.directions.after(plan), or leave it out."
            )

    def misfit(self, units: Units) -> str | None:
        """What keeps them from being those of a model with these units."""
        for slot in _slots(units):
            here, there = units.shapes[slot.name], self.tensors.get(_key(slot))
            if there is None or tuple(there.shape) != here:
                got = "is missing" if there is None else f"the shape {tuple(there.shape)}"
                return f"{slot.name} has the shape {here} in the model, and {got}"
        return None


def _key(slot: Slot) -> str:
    return f"{slot.name}:{slot.dim}"


def _slots(units: Iterable[Unit]) -> list[Slot]:
    return [slot for unit in units for slot in unit.theta]
