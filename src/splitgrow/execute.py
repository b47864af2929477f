"""Run nodes of a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

aten = torch.ops.aten


BATCH_NORM = aten._native_batch_norm_legit_no_training.default


def batch_norm_affine(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, _: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Inference batch norm as ``x * scale + shift``, shaped to broadcast."""
    scale = torch.rsqrt(var + eps)
    if w is not None:
        scale = scale * w
    shift = -mean * scale if b is None else b - mean * scale
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return scale.reshape(shape), shift.reshape(shape)


def _batch_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, _: float, eps: float
) -> tuple[Tensor, None, None]:
    return F.batch_norm(x, mean, var, w, b, training=False, eps=eps), None, None


# Operations that are run as something else. Inference batch norm has no derivative of its own in
# ATen. A detach would hide a path from g, which must be the total derivative.
REPLACED: dict[Any, Callable[..., Any]] = {
    BATCH_NORM: _batch_norm,
    aten.detach.default: lambda x: x,
    aten.view.default: torch.reshape,  # a view's strides are those of the example
    aten._unsafe_view.default: torch.reshape,
}


def function_of(node: fx.Node) -> Callable[..., Any]:
    """What a node calls."""
    assert callable(node.target)
    return REPLACED.get(node.target, node.target)


def name_of(node: fx.Node) -> str:
    """The name of a node's operation, such as ``aten::relu``; empty for other functions."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name)


def run_node(node: fx.Node, lookup: Callable[[fx.Node], Any]) -> Any:
    """The value of a node, its arguments found by ``lookup``."""
    args = fx.map_arg(node.args, lookup)
    kwargs = fx.map_arg(node.kwargs, lookup)
    return function_of(node)(*args, **kwargs)


def run_nodes(nodes: tuple[fx.Node, ...], values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """All values of some nodes in order, on top of the given ones."""
    env = dict(values)
    for node in nodes:
        env[node] = run_node(node, env.__getitem__)
    return env
