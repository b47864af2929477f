"""SplitPlan: which neurons to split, and along which direction."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from splitgrow.errors import PlanError
from splitgrow.units import Units

FORMAT = "splitgrow-plan-1"


@dataclass(frozen=True, eq=False)
class Entry:
    """One neuron to split.

    Attributes:
        unit: name of its unit.
        neuron: its number in the unit.
        lambda_: its splitting index.
        direction: (size,) its splitting gradient, of length 1.
        scale: the length of its parameter vector.
    """

    unit: str
    neuron: int
    lambda_: float
    direction: Tensor
    scale: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entry):
            return NotImplemented
        mine = (self.unit, self.neuron, self.lambda_, self.scale)
        theirs = (other.unit, other.neuron, other.lambda_, other.scale)
        return mine == theirs and torch.equal(self.direction.cpu(), other.direction.cpu())

    __hash__ = None  # type: ignore[assignment]  # holds a tensor


class SplitPlan(Sequence[Entry]):
    """Neurons to split in one step, most promising first. A value: equal plans do the same."""

    def __init__(self, entries: Sequence[Entry], units: Units) -> None:
        self._entries = tuple(entries)
        self.units = units

    @overload
    def __getitem__(self, key: int) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Entry]: ...
    def __getitem__(self, key: int | slice) -> Entry | Sequence[Entry]:
        return self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SplitPlan):
            return NotImplemented
        return self.units.shapes == other.units.shapes and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]  # holds tensors

    @property
    def chosen(self) -> dict[str, list[int]]:
        """The neurons of each unit, in rising order."""
        found: dict[str, list[int]] = {}
        for entry in sorted(self._entries, key=lambda e: e.neuron):
            found.setdefault(entry.unit, []).append(entry.neuron)
        order = [unit.name for unit in self.units]
        return {name: found[name] for name in sorted(found, key=order.index)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one safetensors file, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        for name in self.chosen:
            rows = [e.direction.cpu() for e in self._entries if e.unit == name]
            tensors[name] = torch.stack(rows).contiguous()
        listed = [[e.unit, e.neuron, e.lambda_, e.scale] for e in self._entries]
        metadata = {
            "format": FORMAT,
            "entries": json.dumps(listed),
            "shapes": json.dumps(self.units.shapes),
        }
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent or ".", prefix=f".{target.name}.")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], units: Units) -> SplitPlan:
        """Read a plan for the model that ``units`` were found in."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise PlanError(f"{path} cannot be read as a plan: {error}") from error
        if metadata.get("format") != FORMAT:
            raise PlanError(f"{path} is not a splitgrow plan (or one of another version).")
        shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
        if shapes != units.shapes:
            raise PlanError(
                f"{path} was made for a model of other shapes than the given units: for another "
                "model, or for this one before it was split."
            )
        rows = {name: iter(tensor) for name, tensor in tensors.items()}
        listed = json.loads(metadata["entries"])
        return cls([Entry(u, k, value, next(rows[u]), s) for u, k, value, s in listed], units)

    def __str__(self) -> str:
        from splitgrow.show import plan_table

        return plan_table(self)

    __repr__ = __str__
