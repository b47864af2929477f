"""Checkpoints of optimizers: state and settings, to the last bit, in sealed safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from splitgrow.checkpoint import MISTAKES, Path, dtype_name, refuse, unusable
from splitgrow.errors import CheckpointError, InputError
from splitgrow.files import read_sealed, write_sealed
from splitgrow.show import count
from splitgrow.state import Undo
from splitgrow.surgery import _like

OPTIMIZER_FORMAT = "splitgrow-optimizer-1"


def save_optimizer(optimizer: Optimizer, path: Path) -> None:
    """Write an optimizer's state and settings as one safetensors file, whole or not at all.

    Raises:
        CheckpointError: a setting is neither a number, a text, a tensor, nor made of these, or
            the file cannot be written. All such settings are listed.
    """
    _check_optimizer(optimizer)
    writer = _Writer()
    groups = [writer.group(i, group) for i, group in enumerate(optimizer.param_groups)]
    state = writer.state(optimizer)
    refuse(f"{type(optimizer).__name__} cannot be saved", writer.problems)
    described = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    metadata = {"format": OPTIMIZER_FORMAT, "optimizer": json.dumps(described, allow_nan=False)}
    write_sealed(path, writer.tensors, metadata)


def load_optimizer(optimizer: Optimizer, path: Path) -> None:
    """Give an optimizer the state and settings that were saved, to the last bit.

    It must be of the same class and own parameters of the same shapes and types in the same
    order, so load the model first. State of its own that is not in the file is dropped.

    Raises:
        CheckpointError: the file cannot be read, is not as it was written, or does not fit; all
            that does not fit is listed. The optimizer is then exactly as before.
    """
    _check_optimizer(optimizer)
    kept, tensors = _read_optimizer(path)
    title = f"{path} does not fit this {type(optimizer).__name__}, which was left as it was"
    refuse(title, _optimizer_differences(kept, optimizer))
    with torch.inference_mode(False), torch.no_grad():
        settings = [_settings(*pair, tensors) for pair in _paired(kept, optimizer)]
        state = _state(kept, optimizer, settings, tensors)
    with Undo() as undo:
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            _refill(group, {**group, **values}, undo)
        _refill(optimizer.state, state, undo)


class _Writer:
    """Turns settings and state into JSON and named tensors, and notes what it cannot turn."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[str] = []

    def group(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """One of ``param_groups``: its settings, and what its parameters look like."""
        place = f"param_groups[{number}]"
        settings = {name: value for name, value in group.items() if name != "params"}
        return {
            "params": [_look(parameter) for parameter in group["params"]],
            "settings": self._encode_all(place, settings),
        }

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of each parameter, by its number over all groups."""
        parameters = list(_parameters(optimizer))
        strange = optimizer.state.keys() - set(parameters)
        if strange:
            things = count(len(strange), "thing")
            self.problems.append(f"state is kept for {things} that it does not train.")
        return {
            str(i): self._encode_all(f"state[{i}]", optimizer.state[p], p.device)
            for i, p in enumerate(parameters)
            if p in optimizer.state
        }

    def _encode_all(
        self, place: str, values: Mapping[Any, Any], home: torch.device | None = None
    ) -> dict[str, Any]:
        encoded: dict[str, Any] = {}
        for name, value in values.items():
            if type(name) is not str:
                self.problems.append(f"{place}: expected names that are text, got {name!r}.")
            else:
                encoded[name] = self._encode(f"{place}[{name!r}]", value, home)
        return encoded

    def _encode(self, place: str, value: Any, home: torch.device | None) -> Any:
        if isinstance(value, Tensor):
            return self._encode_tensor(place, value, home)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if type(value) is list or type(value) is tuple:
            items = [self._encode(f"{place}[{i}]", v, home) for i, v in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if type(value) is dict:
            return {"dict": self._encode_all(place, value, home)}
        if value is not None and type(value) not in (bool, int, str):
            self.problems.append(
                f"{place} is of type {type(value).__name__}, which JSON cannot hold: use plain "
                "numbers, texts, lists, or a tensor."
            )
            return None
        return value

    def _encode_tensor(self, place: str, tensor: Tensor, home: torch.device | None) -> Any:
        if why := unusable(tensor):
            self.problems.append(f"{place} {why}")
            return None
        name = f"{len(self.tensors)} {place}"
        self.tensors[name] = tensor
        stays = home is not None and tensor.device.type == "cpu" != home.type
        return {"tensor": name, "stays": stays}


Place = Callable[[Tensor, bool], Tensor]  # a tensor and whether it was apart from its parameter


def _decode(value: Any, tensors: Mapping[str, Tensor], place: Place) -> Any:
    """What ``_Writer`` encoded; each tensor is put where it belongs."""
    if isinstance(value, list):
        return [_decode(entry, tensors, place) for entry in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return place(tensors[value["tensor"]], value["stays"])
    if "float" in value:
        return float(value["float"])
    if "tuple" in value:
        return tuple(_decode(value["tuple"], tensors, place))
    return {name: _decode(entry, tensors, place) for name, entry in value["dict"].items()}


def _settings(
    kept: Mapping[str, Any], group: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The saved settings of one group."""

    def beside(name: str) -> Place:
        own = group.get(name)
        device = own.device if isinstance(own, Tensor) else torch.device("cpu")
        return lambda tensor, _: tensor.to(device, copy=True)

    return {name: _decode(v, tensors, beside(name)) for name, v in kept["settings"].items()}


def _state(
    kept: Mapping[str, Any],
    optimizer: Optimizer,
    settings: list[dict[str, Any]],
    tensors: Mapping[str, Tensor],
) -> dict[Tensor, dict[str, Any]]:
    """The saved state of every parameter."""
    groups = zip(optimizer.param_groups, settings, strict=True)
    owners = [(p, {**group, **values}) for group, values in groups for p in group["params"]]
    state = {}
    for number, (parameter, group) in enumerate(owners):
        if (saved := kept["state"].get(str(number))) is not None:
            state[parameter] = {
                name: _decode(value, tensors, _beside(parameter, name, group))
                for name, value in saved.items()
            }
    return state


def _beside(parameter: Tensor, name: str, group: Mapping[str, Any]) -> Place:
    """Puts state on its parameter's device; a step count only where the optimizer wants it so."""
    counts = name == "step" and not (group.get("capturable") or group.get("fused"))

    def place(tensor: Tensor, stays: bool) -> Tensor:  # noqa: FBT001  (as the file says)
        if not (stays or counts):
            tensor = tensor.to(parameter.device)
        return _like(tensor, parameter) if tensor.shape == parameter.shape else tensor.clone()

    return place


def _refill(held: dict[Any, Any], values: Mapping[Any, Any], undo: Undo) -> None:
    """Give a dict other contents; it stays the same object."""
    undo.later(partial(_replace_contents, held, dict(held)))
    _replace_contents(held, values)


def _replace_contents(held: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    held.clear()
    held.update(values)


def _read_optimizer(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata, tensors = read_sealed(path, OPTIMIZER_FORMAT)
    try:
        kept = json.loads(metadata["optimizer"])
        _check_record(kept, tensors)
    except (*MISTAKES, RecursionError) as error:
        raise CheckpointError(f"{path}: its description of the optimizer is not valid.") from error
    return kept, tensors


def _check_record(kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise one of ``MISTAKES`` unless all that is read later is there."""
    if not isinstance(kept["class"], str):
        raise TypeError
    for group in kept["groups"]:
        if "params" in group["settings"]:
            raise ValueError
        for look in group["params"]:
            _ = look["dtype"], tuple(look["shape"])
    for values in (*(group["settings"] for group in kept["groups"]), *kept["state"].values()):
        for value in values.values():
            _decode(value, tensors, lambda tensor, _: tensor)


def _optimizer_differences(kept: Mapping[str, Any], optimizer: Optimizer) -> Iterator[str]:
    if kept["class"] != type(optimizer).__name__:
        yield f"the file is of {kept['class']}."
    if len(kept["groups"]) != len(optimizer.param_groups):
        groups = count(len(optimizer.param_groups), "parameter group")
        yield f"expected {groups}, got {len(kept['groups'])} in the file."
    for number, (saved, group) in enumerate(_paired(kept, optimizer)):
        for problem in _group_differences(saved, group):
            yield f"param_groups[{number}]: {problem}"


def _group_differences(saved: Mapping[str, Any], group: Mapping[str, Any]) -> Iterator[str]:
    looks = [_look(parameter) for parameter in group["params"]]
    if len(looks) != len(saved["params"]):
        parameters = count(len(looks), "parameter")
        yield f"expected {parameters}, got {len(saved['params'])} in the file."
        return
    names = group.get("param_names", [f"parameter {i}" for i in range(len(looks))])
    for name, theirs, ours in zip(names, saved["params"], looks, strict=True):
        if theirs != ours:
            words = [f"{look['dtype']} {tuple(look['shape'])}" for look in (theirs, ours)]
            yield f"{name} was {words[0]} when saved, and is {words[1]}."
    if saved["settings"].get("param_names", names) != names and "param_names" in group:
        yield "its parameters have other names, or another order, in the file."


def _paired(
    kept: Mapping[str, Any], optimizer: Optimizer
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return zip(kept["groups"], optimizer.param_groups, strict=False)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _look(parameter: Tensor) -> dict[str, Any]:
    return {"shape": list(parameter.shape), "dtype": dtype_name(parameter.dtype)}


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}."
        )
