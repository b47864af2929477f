"""Follow every index through the graph: apply the rules, node by node.

The result says, for each dimension of each parameter and buffer, which units it carries or
consumes. It is the ground that units, surgery and cost counting stand on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from splitgrow.capture import Graph, place_of, shape_of
from splitgrow.layout import (
    Axis,
    Block,
    Dims,
    Layout,
    block,
    chain,
    leaves,
    position,
    raw_leaves,
)
from splitgrow.rules import Op, Trait, find_rule

OUTPUT = Block("", "its neurons are the model's output")
INPUT = Block("", "its index is that of the model's input")
SHARED = Block("", "its weights are used in more than one place")
CONSTANT = Block("", "it meets a tensor that forward makes itself, which cannot grow along")


@dataclass(frozen=True, eq=False)
class Consumption:
    """``node`` contracts the units in ``columns`` of a weight with the tensor ``data``."""

    node: fx.Node
    data: fx.Node
    columns: Layout


@dataclass(eq=False)
class Analysis:
    """The layouts of every tensor of a graph, and where indices are contracted."""

    graph: Graph
    dims: dict[fx.Node, Dims] = field(default_factory=dict)
    several: dict[fx.Node, list[Dims]] = field(default_factory=dict)
    weights: set[fx.Node] = field(default_factory=set)  # linear in parameters, no data in them
    consumptions: list[Consumption] = field(default_factory=list)
    consumed: set[tuple[fx.Node, int]] = field(default_factory=set)  # (parameter, dimension)
    affine: set[fx.Node] = field(default_factory=set)
    macs: list[tuple[fx.Node, tuple[Layout | int, ...]]] = field(default_factory=list)
    channels: list[tuple[str, Layout]] = field(default_factory=list)  # of each normalising module
    unknown: dict[str, str] = field(default_factory=dict)  # operation without rule -> place

    # ---- what rules ask and say -----------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The example's shape of a tensor of the graph."""
        return shape_of(node.meta["val"])

    def is_weight(self, node: fx.Node) -> bool:
        """Is this a parameter or buffer, perhaps transposed, reshaped or scaled?"""
        return node in self.weights

    def consume(self, node: fx.Node, data: fx.Node, weight: fx.Node, columns: Layout) -> None:
        """Record that a unit ends at ``node``."""
        if node.all_input_nodes.count(data) > 1 or data is weight:
            block(columns, Block(place_of(node), "enters the same operation twice"))
        self.consumptions.append(Consumption(node, data, columns))
        self.consumed |= self._dims_of(columns)

    def _dims_of(self, columns: Layout) -> set[tuple[fx.Node, int]]:
        """The parameters' own dimensions that a weight's layout is written in."""
        written = set(raw_leaves(columns))
        own = {(p, d): raw_leaves(axis)[0] for p in self.graph.tensors
               for d, axis in enumerate(self.dims[p])}  # fmt: skip
        exact = {at for at, axis in own.items() if axis in written}
        return exact or {at for at, axis in own.items() if chain(axis) & written}

    def mark_affine(self, node: fx.Node) -> None:
        """Record a normalisation's scale or shift."""
        self.affine.add(node)

    # ---- what the rest of the package asks ------------------------------------------------

    def edges_of(self, axis: Axis) -> set[tuple[fx.Node, fx.Node]]:
        """The consumer edges ``(node, data)`` of a unit."""
        return {(c.node, c.data) for c in self.consumptions if axis in leaves(c.columns)}


def analyse(graph: Graph, model: nn.Module) -> Analysis:
    """Apply the rules to the whole graph."""
    analysis = Analysis(graph)
    _enter_tensors(analysis, model)
    for node in graph.nodes:
        if node.op == "call_function":
            _enter(analysis, node)
    for node in graph.outputs:
        if isinstance(node, fx.Node) and node in analysis.dims:
            for layout in analysis.dims[node]:
                block(layout, OUTPUT)
    return analysis


def _enter_tensors(analysis: Analysis, model: nn.Module) -> None:
    graph = analysis.graph
    for node in graph.tensors:
        analysis.dims[node] = tuple(Axis(size) for size in shape_of(node.meta["val"]))
        analysis.weights.add(node)
    for node in _shared(graph, model):
        for layout in analysis.dims[node]:
            block(layout, SHARED)
    for nodes, reason in ((graph.inputs, INPUT), (graph.constants, CONSTANT)):
        for node in nodes:
            if hasattr(node.meta.get("val"), "shape"):
                shape = shape_of(node.meta["val"])
                analysis.dims[node] = tuple(
                    Axis(size, [reason]) if size > 1 else position(1) for size in shape
                )


def _shared(graph: Graph, model: nn.Module) -> list[fx.Node]:
    """Parameters with several uses, under one name or under several."""
    named = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    users: dict[int, set[fx.Node]] = {}
    for node, name in graph.tensors.items():
        reads = {user for user in node.users if hasattr(user.meta.get("val"), "shape")
                 or isinstance(user.meta.get("val"), list | tuple)}  # fmt: skip
        users.setdefault(id(named[name]), set()).update(reads)
    return [node for node, name in graph.tensors.items() if len(users[id(named[name])]) > 1]


def _enter(analysis: Analysis, node: fx.Node) -> None:
    value = node.meta.get("val")
    if not hasattr(value, "shape") and not isinstance(value, list | tuple):
        return  # a size or another number
    op = Op(node, analysis)
    found = find_rule(node)
    if found is None:
        result = _without_rule(op, value)
    else:
        result = found.propagate(op)
        if _is_weight(op, found.traits, found.name):
            analysis.weights.add(node)
    if isinstance(result, list):
        analysis.several[node] = result
    elif isinstance(value, list | tuple):  # an operation whose rule describes its first result
        analysis.several[node] = [result]
    else:
        analysis.dims[node] = result


def _without_rule(op: Op, value: object) -> Dims | list[Dims]:
    """Never guess: whatever enters cannot be split, and what leaves is new."""
    if op.inputs:
        op.analysis.unknown.setdefault(op.name, op.place)
    for node in op.inputs:
        op.block(list(op.dims(node)), f"enters {op.name}, which has no rule")
    if isinstance(value, list | tuple):
        return [_opaque(op, v) for v in value]
    return _opaque(op, value)


def _opaque(op: Op, value: object) -> Dims:
    if not hasattr(value, "shape"):
        return ()
    reason = Block(op.place, f"comes out of {op.name}, which has no rule")
    return tuple(Axis(s, [reason]) if s > 1 else position(1) for s in shape_of(value))


def _is_weight(op: Op, traits: Trait, name: str) -> bool:
    """Linear and without constant term in parameters alone."""
    if not op.inputs or not all(node in op.analysis.weights for node in op.inputs):
        return False
    if traits & Trait.HOMOGENEOUS:
        return True
    scaled = bool(traits & Trait.PRODUCT) or name == "aten::div"
    return scaled and len(op.inputs) == 1
