"""SplitPlan: which neurons to split, and along which direction."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from splitgrow.errors import PlanError
from splitgrow.files import write_file
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
    """Neurons to split in one step, in the order they were chosen. A value: equal plans agree.

    Every entry is a neuron of one of ``units``, listed once, with a direction of its size.
    """

    def __init__(self, entries: Sequence[Entry], units: Units) -> None:
        self._entries = tuple(entries)
        self.units = units
        _check_entries(self._entries, units)

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
        """The neurons of each unit, units in their own order and neurons in rising order."""
        found: dict[str, list[int]] = {unit.name: [] for unit in self.units}
        for entry in sorted(self._entries, key=lambda e: e.neuron):
            found[entry.unit].append(entry.neuron)
        return {name: neurons for name, neurons in found.items() if neurons}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as one safetensors file, whole or not at all."""
        metadata, tensors = self._contents()
        metadata["sha256"] = _digest(metadata, tensors)
        write_file(Path(path), save(tensors, metadata))

    def digest(self) -> str:
        """A checksum of everything in the plan: equal plans have the same."""
        return _digest(*self._contents())

    def _contents(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for name in self.chosen:
            rows = [e.direction.detach().cpu() for e in self._entries if e.unit == name]
            tensors[name] = torch.stack(rows).contiguous()
        listed = [[e.unit, int(e.neuron), float(e.lambda_), float(e.scale)] for e in self._entries]
        metadata = {
            "format": FORMAT,
            "entries": json.dumps(listed),
            "shapes": json.dumps(self.units.shapes),
        }
        return metadata, tensors

    @classmethod
    def load(cls, path: str | os.PathLike[str], units: Units) -> SplitPlan:
        """Read a plan for the model that ``units`` were found in."""
        metadata, tensors = _read(path)
        if metadata.get("format") != FORMAT:
            raise PlanError(f"{path} is not a splitgrow plan, or one of another version.")
        if metadata.pop("sha256", None) != _digest(metadata, tensors):
            raise PlanError(f"{path} has been changed since it was written. Select and save again.")
        shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
        if shapes != units.shapes:
            raise PlanError(
                f"{path} was made for a model of other shapes than the given units: for another "
                "model, or for this one before it was split. Select again on the model as it is."
            )
        rows = {name: iter(tensor) for name, tensor in tensors.items()}
        listed = json.loads(metadata["entries"])
        return cls([Entry(u, k, value, next(rows[u]), s) for u, k, value, s in listed], units)

    def __str__(self) -> str:
        from splitgrow.show import plan_table

        return plan_table(self)

    __repr__ = __str__


def _check_entries(entries: Sequence[Entry], units: Units) -> None:
    known = {unit.name: unit for unit in units}
    seen: set[tuple[str, int]] = set()
    for entry in entries:
        place = f"plan: neuron {entry.neuron} of {entry.unit}"
        if entry.unit not in known:
            raise PlanError(
                f"{place}: there is no such unit; there are {', '.join(known) or 'none'}. "
                "Was the plan made with other units?"
            )
        unit = known[entry.unit]
        if not 0 <= entry.neuron < unit.width:
            raise PlanError(f"{place}: the unit has neurons 0 to {unit.width - 1}.")
        if tuple(entry.direction.shape) != (unit.size,):
            raise PlanError(
                f"{place}: expected a direction of shape ({unit.size},), got "
                f"{tuple(entry.direction.shape)}."
            )
        if not (isfinite(entry.lambda_) and isfinite(entry.scale)
                and entry.direction.isfinite().all()):  # fmt: skip
            raise PlanError(f"{place}: its index, scale or direction is not a finite number.")
        if (entry.unit, entry.neuron) in seen:
            raise PlanError(f"{place} is listed twice. A neuron is split in two at a time.")
        seen.add((entry.unit, entry.neuron))


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise PlanError(f"{path} cannot be read as a plan: {error}") from error


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """A checksum of everything in a plan's file."""
    digest = hashlib.sha256()
    for name in sorted(metadata):
        digest.update(f"{name}={metadata[name]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
