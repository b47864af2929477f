"""Checkpoints of grown models: sealed safetensors files, and no code.

A grown model is its seed with other sizes. Its file holds every parameter and buffer by name, the
class of every module and the sizes that modules repeat in their attributes; ``load`` gives the
tensors of a seed model those sizes and values.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from splitgrow.attributes import SIZES, fix_attributes, set_size
from splitgrow.errors import CheckpointError, InputError
from splitgrow.files import is_storable, read_sealed, write_sealed
from splitgrow.state import Undo
from splitgrow.surgery import _announce, _like
from splitgrow.units import named_tensors
from splitgrow.wrapped import bare

Path = str | os.PathLike[str]
Model = TypeVar("Model", bound=nn.Module)

MODEL_FORMAT = "splitgrow-model-1"
RESERVED = ("format", "model", "sha256")  # the metadata that is ours
SHOWN = 12  # problems listed in one error
# What a user's own code may raise when it is given tensors that do not fit together.
MISTAKES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# Modules that keep their sizes in attributes, and whose neurons cannot be split.
UNGROWN = (
    nn.EmbeddingBag,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MultiheadAttention,
    nn.RMSNorm,
    nn.RNNBase,
    nn.RNNCellBase,
)


# --- models -------------------------------------------------------------------------------


def save(model: nn.Module, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a model's parameters and buffers as one safetensors file, whole or not at all.

    The file also holds the class of every module, and a checksum of everything in it. Modes,
    gradients and hooks are not kept. The model is not changed.

    Args:
        model: any model; the one inside, if it comes from ``torch.compile``.
        path: the file to write or replace. Its folder must exist.
        metadata: texts of your own to keep in the file; ``sg.read_metadata`` gives them back.

    Raises:
        CheckpointError: the model holds what a file cannot, or the file cannot be written.
    """
    model = _unwrapped(model)
    own = _own_metadata(metadata)
    found = _describe(model)
    refuse(f"{type(model).__name__} cannot be saved", _unkept(model))
    stored = {name: t for name, t in found.tensors.items() if name not in found.aliases}
    with _not_training(model), torch.no_grad():
        sizes = _sizes(model)
    described = {
        "aliases": found.aliases,
        "transient": sorted(found.transient),
        "modules": found.modules,
        "sizes": sizes,
    }
    write_sealed(path, stored, {"format": MODEL_FORMAT, "model": json.dumps(described), **own})


def load(seed_model: Model, path: Path) -> Model:
    """Give a seed model the sizes and values of the grown one that was saved.

    The model is changed in place, and its parameters stay the same objects, without gradients. It
    must be built by the same code as the saved one: the same modules, of the same classes, with
    the same names. Its sizes may differ, and be smaller or larger than in the file, as long as
    they agree with each other within every module. Values are converted to the seed's floating
    type and device, and laid out in memory as the seed's are. A non-persistent buffer is taken
    from the file only where its size has changed.

    Raises:
        CheckpointError: the file cannot be read, is not as it was written, or does not fit; all
            that does not fit is listed. The model is then exactly as before.
    """
    _become(_unwrapped(seed_model), path, _read_model(path))
    return seed_model


def _become(model: nn.Module, path: Path, kept: _Description) -> None:
    """Give a model the sizes and values of what is kept."""
    with torch.inference_mode(False), torch.no_grad(), _not_training(model):
        seed = _describe(model)
        title = f"{path} does not fit {type(model).__name__}, which was left as it was"
        refuse(title, _differences(kept, seed))
        with Undo() as undo:
            resized = _fill(model, kept, seed, undo)
            _fix_sizes(model, path, kept, resized, undo)
            refuse(title, _contradictions(model, kept, resized))


def read_metadata(path: Path) -> dict[str, str]:
    """The texts that were given to ``save`` as metadata; the file is checked as by ``load``."""
    metadata, _ = read_sealed(path, MODEL_FORMAT)
    return {name: text for name, text in metadata.items() if name not in RESERVED}


@dataclass(frozen=True)
class _Description:
    """What is in a model or in its file.

    Attributes:
        tensors: every parameter and buffer, under each of its names.
        aliases: further name -> first name of a shared tensor.
        transient: names of the buffers that are not persistent.
        modules: path -> name of its class.
        sizes: path -> attributes that repeat sizes; only of a file.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    transient: frozenset[str]
    modules: dict[str, str]
    sizes: dict[str, dict[str, Any]]


def _describe(model: nn.Module) -> _Description:
    tensors = named_tensors(model)
    bad = (f"{name} {why}" for name, t in tensors.items() if (why := unusable(t)))
    refuse(f"{type(model).__name__} cannot be kept in a checkpoint", bad)
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {path: type(module).__name__ for path, module in modules.items()}
    return _Description(tensors, _aliases(tensors), _transient(model), classes, {})


def _transient(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that are not persistent."""
    return frozenset(
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    firsts: dict[Any, str] = {}
    named = {name: firsts.setdefault(_memory(tensor), name) for name, tensor in tensors.items()}
    return {name: first for name, first in named.items() if name != first}


def _memory(tensor: Tensor) -> Any:
    """The same for tensors that are one: one object, or two that look at the same numbers."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def unusable(tensor: Tensor) -> str:
    """Why a tensor's values cannot be kept; empty if they can."""
    if is_lazy(tensor):
        return "is not initialised yet: run one batch through the model first."
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: make it dense with to_dense()."
    if tensor.is_meta:
        return "is on the meta device, where it has no values: build the model on a real one."
    if not is_storable(tensor.dtype):
        return f"is {dtype_name(tensor.dtype)}, which safetensors does not hold."
    return ""


def _unkept(model: nn.Module) -> Iterator[str]:
    """What the model has beside tensors, and names that a file cannot have."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield (
                f"{_place(path, module)} has extra state (get_extra_state), which can be anything: "
                "keep it in buffers."
            )
    if "__metadata__" in named_tensors(model):
        yield "__metadata__ is a name that safetensors needs for itself: rename the tensor."


def _sizes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of modules that repeat sizes of tensors."""
    found = {path: _own_sizes(module) for path, module in model.named_modules()}
    return {path: sizes for path, sizes in found.items() if sizes}


def _own_sizes(module: nn.Module) -> dict[str, Any]:
    function = next((SIZES[kind] for kind in type(module).__mro__ if kind in SIZES), None)
    names = {"num_features"} if isinstance(module, _NormBase) else set()
    with contextlib.suppress(*MISTAKES):  # an odd module without sizes of its own
        names |= set(function(module)) if function is not None else set()
    values = {name: _plain(getattr(module, name, None)) for name in sorted(names)}
    return {name: value for name, value in values.items() if value is not None}


def _plain(size: Any) -> int | list[int] | None:
    """A size as JSON gives it back; None if it is no size."""
    if isinstance(size, list | tuple) and all(type(entry) is int for entry in size):
        return list(size)
    return size if type(size) is int else None


@contextlib.contextmanager
def _not_training(model: nn.Module) -> Iterator[None]:
    """For looking at parametrized weights: in training, some change their buffers when read."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose names do not depend on whether it was compiled or wrapped."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    inner = getattr(model, "_orig_mod", None)
    return bare(inner if isinstance(inner, nn.Module) else model)


def _own_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    own = dict(metadata or {})
    for name, text in own.items():
        if not (_is_text(name) and _is_text(text)):
            raise InputError(f"metadata: expected text under {name!r}, got {text!r}.")
        if name in RESERVED:
            raise InputError(f"metadata: {name!r} is used by the file itself. Choose another name.")
    return own


def _is_text(value: object) -> bool:
    """Is it a string that can be encoded? A file name may hold half of a surrogate pair."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _read_model(path: Path) -> _Description:
    metadata, tensors = read_sealed(path, MODEL_FORMAT)
    try:
        described = json.loads(metadata["model"])
        aliases = dict(described["aliases"])
        return _Description(
            tensors=tensors | {name: tensors[first] for name, first in aliases.items()},
            aliases=aliases,
            transient=frozenset(described["transient"]),
            modules=dict(described["modules"]),
            sizes={place: dict(sizes) for place, sizes in described["sizes"].items()},
        )
    except (*MISTAKES, RecursionError) as error:
        raise CheckpointError(f"{path}: its description of the model is not valid.") from error


# --- does the file fit? -------------------------------------------------------------------


def _differences(kept: _Description, seed: _Description) -> Iterator[str]:
    """What cannot be made the same by resizing tensors."""
    yield from _other_modules(kept.modules, seed.modules)
    yield from _other_names(kept, seed)
    yield from _other_ties(kept, seed)
    for name in _to_load(kept, seed):
        yield from _other_kind(name, kept.tensors[name], seed.tensors[name])


def _other_modules(kept: Mapping[str, str], seed: Mapping[str, str]) -> Iterator[str]:
    for path in dict.fromkeys((*seed, *kept)):
        place = path or "the model"
        if path not in kept:
            yield f"{place} ({seed[path]}) is not in the file."
        elif path not in seed:
            yield f"{place} ({kept[path]}) is in the file, but not in the model."
        elif kept[path] != seed[path]:
            yield f"{place} is {kept[path]} in the file, and {seed[path]} in the model."


def _other_names(kept: _Description, seed: _Description) -> Iterator[str]:
    """Tensors of one side alone, where both sides have the module: others were told already."""
    both = kept.modules.keys() & seed.modules.keys()
    for name, tensor in seed.tensors.items():
        if name not in kept.tensors.keys() | seed.transient and _owner(name) in both:
            yield f"{name} {_shape(tensor)} is not in the file."
    for name, tensor in kept.tensors.items():
        if name not in seed.tensors.keys() | kept.transient and _owner(name) in both:
            yield f"{name} {_shape(tensor)} is in the file, but not in the model."


def _other_ties(kept: _Description, seed: _Description) -> Iterator[str]:
    common = kept.tensors.keys() & seed.tensors.keys()
    ours, theirs = _ties(kept, common), _ties(seed, common)
    for tied in sorted(map(sorted, ours - theirs)):
        yield f"{' and '.join(tied)} are one tensor in the file, but not in the model."
    for tied in sorted(map(sorted, theirs - ours)):
        yield f"{' and '.join(tied)} are one tensor in the model, but not in the file."


def _ties(described: _Description, common: Iterable[str]) -> set[frozenset[str]]:
    groups: dict[str, list[str]] = {}
    for name in common:
        groups.setdefault(described.aliases.get(name, name), []).append(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def _to_load(kept: _Description, seed: _Description) -> list[str]:
    """The names whose values are taken from the file."""
    common = [name for name in seed.tensors if name in kept.tensors]
    return [
        name
        for name in common
        if name not in seed.transient or _has_grown(kept.tensors[name], seed.tensors[name])
    ]


def _has_grown(kept: Tensor, own: Tensor) -> bool:
    """Has a non-persistent buffer another size than the seed gave it, and is it the same else?"""
    return kept.shape != own.shape and kept.ndim == own.ndim and kept.dtype == own.dtype


def _other_kind(name: str, kept: Tensor, own: Tensor) -> Iterator[str]:
    if kept.ndim != own.ndim:
        yield f"{name} is {_shape(kept)} in the file, and {_shape(own)} in the model."
    if kept.dtype == own.dtype:
        return
    if not (kept.is_floating_point() and own.is_floating_point()):
        names = [dtype_name(tensor.dtype) for tensor in (kept, own)]
        yield f"{name} is {names[0]} in the file, and {names[1]} in the model."
    elif (kept.double().isfinite() != kept.to(own.dtype).double().isfinite()).any():
        yield f"{name} has values in the file that are too large for {dtype_name(own.dtype)}."


# --- make the seed like the file ----------------------------------------------------------


def _fill(model: nn.Module, kept: _Description, seed: _Description, undo: Undo) -> list[str]:
    """Give the seed's tensors their new values; returns the names of those of another size."""
    names = _to_load(kept, seed)
    resized = [name for name in names if kept.tensors[name].shape != seed.tensors[name].shape]
    values: dict[str, Tensor] = {}
    done: set[int] = set()
    for name in names:
        own, first = seed.tensors[name], seed.aliases.get(name, name)
        if first not in values:
            values[first] = _like(kept.tensors[name].to(own.device, own.dtype), own)
        if id(own) not in done:
            undo.set_data(own, values[first])
            done.add(id(own))
    _announce(model, names, undo)
    return resized


def _fix_sizes(
    model: nn.Module, path: Path, kept: _Description, resized: list[str], undo: Undo
) -> None:
    """Bring attributes up to date: from the tensors, and where there are none from the file."""
    try:
        fix_attributes(model, resized, undo)
    except MISTAKES as error:
        raise CheckpointError(
            f"{path}: the sizes in it do not fit together ({error}). The model was left as it was."
        ) from error
    for place, module in model.named_modules():
        size = kept.sizes.get(place, {}).get("num_features")
        if isinstance(module, _NormBase) and type(size) is int and not _has_tensors(module):
            set_size(module, "num_features", size, undo)


def _has_tensors(module: nn.Module) -> bool:
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))


def _contradictions(
    model: nn.Module, kept: _Description, resized: Iterable[str]
) -> Iterator[str]:  # fmt: skip
    """Sizes that do not agree within a module, after all has been set."""
    above, owners = _above(resized), {_owner(name) for name in resized}
    for path, module in model.named_modules():
        place = _place(path, module)
        if path in owners and isinstance(module, UNGROWN) and not _own_sizes(module):
            yield f"{place} has another size in the file. Build the seed with that size."
        if path in above:
            yield from (f"{place}: {problem}." for problem in _misfits(module))
        for name, size in kept.sizes.get(path, {}).items():
            if _plain(found := getattr(module, name, size)) != size:
                yield (
                    f"{place}: {name} is {size} in the file, but {found} here, as its tensors have "
                    "it. If it should follow them, register the class with splitgrow.sizes_of."
                )


def _misfits(module: nn.Module) -> Iterator[str]:
    if isinstance(module, _NormBase):
        names = ("weight", "bias", "running_mean", "running_var")
        found = {name: getattr(module, name, None) for name in names}
        yield from _unequal({n: len(t) for n, t in found.items() if t is not None})
    if isinstance(module, nn.Linear | nn.Bilinear | _ConvNd) and module.bias is not None:
        rows = module.out_channels if isinstance(module, _ConvNd) else module.out_features
        yield from _unequal({"weight": rows, "bias": len(module.bias)})
    if isinstance(module, _ConvNd):
        yield from _convolution_misfits(module)
    if isinstance(module, ParametrizationList) and _is_weight_norm(module):
        yield from _weight_norm_misfits(module)
    if isinstance(module, nn.Embedding) and len(module.weight) != module.num_embeddings:
        yield f"expected {module.num_embeddings} rows of weight, got {len(module.weight)}"


def _is_weight_norm(parametrized: ParametrizationList) -> bool:
    return any(type(function).__name__ == "_WeightNorm" for function in parametrized)


def _weight_norm_misfits(parametrized: ParametrizationList) -> Iterator[str]:
    """Lengths that are not of the weight's own vectors; torch does not notice."""
    lengths, weight = (parametrized.get_parameter(f"original{i}").shape for i in range(2))
    if any(size not in (1, full) for size, full in zip(lengths, weight, strict=False)):
        yield f"lengths {tuple(lengths)} do not go with a weight {tuple(weight)}"


def _unequal(lengths: Mapping[str, int]) -> Iterator[str]:
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        yield f"its tensors are for different numbers of neurons: {listed}"


def _convolution_misfits(layer: _ConvNd) -> Iterator[str]:
    shape = tuple(layer.weight.shape)
    if shape[2:] != tuple(layer.kernel_size):
        yield f"expected a kernel of {tuple(layer.kernel_size)}, got {shape[2:]}"
    sides = (layer.in_channels, layer.out_channels)
    inner = sides[1] if isinstance(layer, _ConvTransposeNd) else sides[0]
    if layer.groups < 1 or any(side % layer.groups for side in sides) or (
        shape[1] * layer.groups != inner
    ):  # fmt: skip
        yield f"weight {shape} cannot be divided into groups as in the model"


# --- words --------------------------------------------------------------------------------


def refuse(title: str, problems: Iterable[str]) -> None:
    """Raise one error for all problems, if there are any."""
    found = list(problems)
    if not found:
        return
    rest = [f"and {len(found) - SHOWN} more."] if len(found) > SHOWN else []
    raise CheckpointError("\n- ".join([f"{title}:", *found[:SHOWN], *rest]))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _above(names: Iterable[str]) -> set[str]:
    """The paths of the modules around these tensors."""
    found: set[str] = set()
    for name in names:
        path = name
        while path:
            path = _owner(path)
            found.add(path)
    return found


def _place(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def _shape(tensor: Tensor) -> str:
    return f"of shape {tuple(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written in a file."""
    return str(dtype).removeprefix("torch.")
