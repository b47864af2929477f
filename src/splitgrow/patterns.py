"""Activations that ``torch.export`` takes apart, put together again.

A second derivative needs to know where the kinks of an activation are. In the pieces that PyTorch
writes some of them in, kinks appear where the whole has none (the absolute values in softsign and
in power-average pooling cancel), or cannot be seen (the shrinkage functions become a ``where``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def restore(graph: fx.Graph) -> None:
    """Replace each pattern in the graph, in place."""
    for node in list(graph.nodes):
        for pattern in (_hardshrink, _softshrink, _softsign, _same_sign):
            found = pattern(node)
            if found is not None:
                _replace(graph, node, *found)
                break


def _replace(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        fresh = graph.call_function(target, args)
    fresh.meta = dict(node.meta)
    node.replace_all_uses_with(fresh)
    _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a node that nothing reads, and what was there for it alone."""
    if node.users or node.op != "call_function":
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        _erase(graph, source)


def _args(node: Any, target: Any) -> tuple[Any, ...] | None:
    """The arguments of a node, if it is this operation."""
    return node.args if isinstance(node, fx.Node) and node.target is target else None


Found = tuple[Any, tuple[Any, ...]] | None


def _hardshrink(node: fx.Node) -> Found:
    """where(|x| <= l, 0, x)."""
    match _args(node, aten.where.ScalarSelf):
        case (condition, 0 | 0.0, x):
            match _args(condition, aten.le.Scalar):
                case (size, limit) if _args(size, aten.abs.default) == (x,):
                    return aten.hardshrink.default, (x, limit)
    return None


def _softshrink(node: fx.Node) -> Found:
    """where(|x| > l, x - sign(x) l, 0 x)."""
    match _args(node, aten.where.self):
        case (condition, shrunk, nothing):
            x, *_ = _args(nothing, aten.mul.Tensor) or (None,)
            match _args(condition, aten.gt.Scalar):
                case (size, limit) if x is not None and _args(size, aten.abs.default) == (x,):
                    less = _args(shrunk, aten.sub.Tensor)
                    step = _args(less[1], aten.mul.Tensor) if less and less[0] is x else None
                    if step and _args(step[0], aten.sign.default) == (x,) and step[1] == limit:
                        return aten.softshrink.default, (x, limit)
    return None


def _softsign(node: fx.Node) -> Found:
    """x / (1 + |x|): |x| as x sign(x), which has the same slope and no kink of its own."""
    match _args(node, aten.div.Tensor):
        case (x, below):
            match _args(below, aten.add.Tensor):
                case (size, 1 | 1.0) if _args(size, aten.abs.default) == (x,):
                    return aten.div.Tensor, (x, _signed(node.graph, node, x))
    return None


def _signed(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """1 + x sign(x), put in before ``node``."""
    with graph.inserting_before(node):
        sign = graph.call_function(aten.sign.default, (x,))
        size = graph.call_function(aten.mul.Tensor, (x, sign))
        below = graph.call_function(aten.add.Tensor, (size, 1))
    for fresh in (sign, size, below):
        fresh.meta = {**node.meta}
    return below


def _same_sign(node: fx.Node) -> Found:
    """sign(x) relu(|x|), which is x: how ``lp_pool`` guards its power."""
    match _args(node, aten.mul.Tensor):
        case (sign, size):
            x, *_ = _args(sign, aten.sign.default) or (None,)
            inner, *_ = _args(size, aten.relu.default) or (None,)
            if x is not None and _args(inner, aten.abs.default) == (x,):
                return aten.alias.default, (x,)
    return None
