"""sigma of a unit: the part of the graph between its own parameters and its consumers.

    theta ──(heads: linear in theta, data h fixed)──▶ z ──(body: per neuron)──▶ consumer edges

A *head* is a layer such as a convolution whose weights belong to the unit and whose input does
not: linear in theta, and where most of the arithmetic is. The *body* is the rest: normalisation,
activation, a depthwise filter, pooling. Splitting the two lets S be applied as
head^T . (Hessian of the body) . head, at the price of the head's forward and weight-gradient
passes alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from splitgrow.analysis import Analysis
from splitgrow.capture import is_tensor_valued, place_of
from splitgrow.layout import Axis, leaves
from splitgrow.rules import Rule, Trait, find_rule, operands

_HEADS = ("aten::linear", "aten::conv", "aten::matmul", "aten::mm", "aten::einsum", "aten::mv",
          "aten::bmm")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Subgraph:
    """The nodes of sigma in order of execution.

    Attributes:
        theta: placeholders of the unit's own parameters, in the order of its vector.
        heads: linear layers from theta to z, with the parameters that each one absorbs.
        prelude: parameter-only nodes (a transpose, a reshape) before heads, by head.
        body: every other node.
        edges: ``(consumer, tensor)``: where sigma ends.
        inputs: nodes outside whose values sigma reads (h, buffers, other parameters).
        diagonal: entry i of z reaches the edges only through a function of entry i followed by
            linear maps, so that the body's Hessian is diagonal.
    """

    theta: tuple[fx.Node, ...]
    heads: tuple[Head, ...]
    body: tuple[fx.Node, ...]
    edges: tuple[tuple[fx.Node, fx.Node], ...]
    inputs: tuple[fx.Node, ...]
    diagonal: bool

    @property
    def direct(self) -> tuple[fx.Node, ...]:
        """Parameters that the body reads itself, such as a depthwise filter."""
        absorbed = {p for head in self.heads for p in head.parameters}
        return tuple(p for p in self.theta if p not in absorbed)


@dataclass(frozen=True, eq=False)
class Head:
    """A layer that is linear in its parameters, with the nodes that prepare those."""

    node: fx.Node
    parameters: tuple[fx.Node, ...]
    prelude: tuple[fx.Node, ...]


def trace_subgraph(analysis: Analysis, axis: Axis, theta: tuple[fx.Node, ...]) -> Subgraph | str:
    """Collect sigma of a unit, or say why the unit cannot be split."""
    edge_set = analysis.edges_of(axis)
    inside: dict[fx.Node, None] = dict.fromkeys(theta)
    edges: list[tuple[fx.Node, fx.Node]] = []
    for node in analysis.graph.nodes:
        if not is_tensor_valued(node) or _has(node, Trait.CONSTANT):
            continue
        read = [n for n in node.all_input_nodes if n in inside]
        edges += [(node, n) for n in read if (node, n) in edge_set]
        if any((node, n) not in edge_set for n in read):
            if _carries(analysis, node, axis):
                inside[node] = None
            elif not _has(node, Trait.CUTS):
                return f"{place_of(node)}: {node.target} depends on it but does not carry it on"
    if not edges:
        return "no weight reads its neurons, so there are no columns to halve"
    nodes = [n for n in inside if n not in theta]
    heads = _find_heads(analysis, nodes, theta, edge_set)
    in_heads = {n for head in heads for n in (head.node, *head.prelude)}
    body = tuple(n for n in nodes if n not in in_heads)
    outside = dict.fromkeys(n for node in nodes for n in node.all_input_nodes
                            if n not in inside or (node, n) in edge_set)  # fmt: skip
    absorbed = {p for head in heads for p in head.parameters}
    single = len(heads) == 1 and absorbed == set(theta)
    diagonal = single and _is_diagonal(analysis, heads[0].node, body, edges)
    return Subgraph(theta, heads, body, tuple(edges), tuple(outside), diagonal)


def _has(node: fx.Node, trait: Trait) -> bool:
    found = find_rule(node)
    return found is not None and bool(found.traits & trait)


def _carries(analysis: Analysis, node: fx.Node, axis: Axis) -> bool:
    dims = (layout for result in analysis.results(node) for layout in result)
    return any(axis in leaves(layout) for layout in dims)


def _find_heads(
    analysis: Analysis,
    nodes: list[fx.Node],
    theta: tuple[fx.Node, ...],
    edge_set: set[tuple[fx.Node, fx.Node]],
) -> tuple[Head, ...]:
    """Layers whose live inputs are (linear functions of) the unit's parameters only."""
    members = set(nodes) | set(theta)
    heads = []
    for node in nodes:
        live = [n for n in node.all_input_nodes if n in members and (node, n) not in edge_set]
        if node in analysis.weights or not all(n in analysis.weights for n in live):
            continue
        found = find_rule(node)
        if found is None or not found.name.startswith(_HEADS) or not _linear_in(node, live):
            continue
        before = _ancestors(live, members)
        parameters = tuple(p for p in theta if p in before)
        heads.append(Head(node, parameters, tuple(n for n in nodes if n in before)))
    uses = Counter(p for head in heads for p in head.parameters)
    # A parameter that was cut into the weights of two layers is left to the body.
    return tuple(head for head in heads if all(uses[p] == 1 for p in head.parameters))


def _linear_in(node: fx.Node, live: list[fx.Node]) -> bool:
    """Is a layer linear, without constant term, in its live inputs together?

    The weight with or without the bias; one factor of a product. Not the bias alone.
    """
    if len(live) > 1 or len(node.args) > 2:
        return node.args[0] not in live and node.args[1] in live
    return True


def _ancestors(nodes: list[fx.Node], members: set[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    queue = list(nodes)
    while queue:
        for source in queue.pop().all_input_nodes:
            if source in members and source not in found:
                found.add(source)
                queue.append(source)
    return found


def _is_diagonal(
    analysis: Analysis,
    z: fx.Node,
    body: tuple[fx.Node, ...],
    edges: list[tuple[fx.Node, fx.Node]],
) -> bool:
    """Pointwise functions of z first, then only linear maps."""
    shape = analysis.shape(z)
    pointwise, linear = {z}, set[fx.Node]()
    for node in body:
        live = [n for n in operands(node) if n in pointwise or n in linear]
        found = _traits_of(node)
        if found is None:
            return False
        same = analysis.dims.get(node) is None or analysis.shape(node) == shape
        if found.traits & Trait.POINTWISE and same and all(n in pointwise for n in live):
            pointwise.add(node)
        elif found.traits & Trait.LINEAR or (found.traits & Trait.PRODUCT and len(live) == 1):
            linear.add(node)
        else:
            return False
    return all(data in pointwise or data in linear for _, data in edges)


def _traits_of(node: fx.Node) -> Rule | None:
    """A node's rule; picking one of several results is a copy."""
    found = find_rule(node)
    if found is not None and found.name == "aten::getitem":
        return Rule(found.name, found.propagate, Trait.POINTWISE | Trait.LINEAR)
    return found
