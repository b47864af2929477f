"""Attributes in which modules repeat the sizes of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from splitgrow.state import Undo

Sizes = Callable[[Any], dict[str, Any]]
SIZES: dict[type[nn.Module], Sizes] = {}
_F = TypeVar("_F", bound=Sizes)


def sizes_of(kind: type[nn.Module]) -> Callable[[_F], _F]:
    """Register how a module class's attributes follow from its tensors.

    The function gets the module with its new tensors and its old attributes, and returns the
    attributes to set::

        @splitgrow.sizes_of(MyLayer)
        def my_layer(layer):
            return {"width": layer.weight.shape[0]}
    """

    def register(function: _F) -> _F:
        SIZES[kind] = function
        return function

    return register


def fix_attributes(model: nn.Module, tensors: Iterable[str], undo: Undo) -> None:
    """Bring the attributes of the modules that hold these tensors up to date."""
    for path in dict.fromkeys(above for name in tensors for above in _paths_above(name)):
        module = model.get_submodule(path)
        function = next((SIZES[kind] for kind in type(module).__mro__ if kind in SIZES), None)
        for name, value in function(module).items() if function is not None else ():
            set_size(module, name, value, undo)


def set_size(module: nn.Module, name: str, value: Any, undo: Undo) -> None:
    """Set one attribute, if the module has it and it says otherwise."""
    if getattr(module, name, value) != value:
        undo.set_attribute(module, name, value)


def _paths_above(tensor: str) -> Iterator[str]:
    """The modules around a tensor, the nearest first: a parametrized weight lies three deep."""
    path = tensor
    while path:
        path = path.rpartition(".")[0]
        yield path


@sizes_of(nn.Linear)
def _linear(layer: nn.Linear) -> dict[str, Any]:
    rows, columns = layer.weight.shape
    return {"in_features": columns, "out_features": rows}


@sizes_of(_ConvNd)
def _convolution(layer: _ConvNd) -> dict[str, Any]:
    rows, columns = layer.weight.shape[:2]
    if layer.groups == 1:
        return {"in_channels": columns, "out_channels": rows}
    channels = rows * layer.in_channels // layer.out_channels
    per_group = layer.in_channels // layer.groups
    return {"out_channels": rows, "in_channels": channels, "groups": channels // per_group}


@sizes_of(_ConvTransposeNd)
def _transposed(layer: _ConvTransposeNd) -> dict[str, Any]:
    columns, rows = layer.weight.shape[:2]
    if layer.groups == 1:
        return {"in_channels": columns, "out_channels": rows}
    groups = columns * layer.groups // layer.in_channels
    return {"in_channels": columns, "groups": groups, "out_channels": rows * groups}


@sizes_of(_NormBase)
def _norm(layer: Any) -> dict[str, Any]:
    tensor = layer.weight if layer.weight is not None else layer.running_mean
    return {} if tensor is None else {"num_features": tensor.shape[0]}


@sizes_of(nn.PReLU)
def _prelu(layer: nn.PReLU) -> dict[str, Any]:
    return {"num_parameters": layer.weight.shape[0]}


@sizes_of(nn.Embedding)
def _embedding(layer: nn.Embedding) -> dict[str, Any]:
    return {"embedding_dim": layer.weight.shape[1]}


@sizes_of(nn.Bilinear)
def _bilinear(layer: nn.Bilinear) -> dict[str, Any]:
    rows, first, second = layer.weight.shape
    return {"out_features": rows, "in1_features": first, "in2_features": second}
