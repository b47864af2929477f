"""Follow every index through the graph: apply the rules, node by node.

The result says, for each dimension of each parameter and buffer, which units it carries or
consumes. It is the ground that units, surgery and cost counting stand on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from splitgrow.capture import Graph, is_tensor_valued, named_tensors, place_of, shape_of
from splitgrow.layout import (
    Axis,
    Block,
    Dims,
    Layout,
    block,
    leaves,
    position,
    repeated,
    size_of,
)
from splitgrow.rules import Op, Result, Rule, Trait, find_rule, operands

OUTPUT = Block("", "its neurons are the model's output")
INPUT = Block("", "its index is that of the model's input", position=True)


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
    parametric: set[fx.Node] = field(default_factory=set)  # parameters enter, and no data
    weights: set[fx.Node] = field(default_factory=set)  # ... of those, what is linear in them
    consumptions: list[Consumption] = field(default_factory=list)
    consumed: set[tuple[fx.Node, int]] = field(default_factory=set)  # (parameter, dimension)
    affine: set[fx.Node] = field(default_factory=set)
    macs: list[tuple[fx.Node, tuple[Layout | int, ...]]] = field(default_factory=list)
    channels: list[tuple[str, Layout]] = field(default_factory=list)  # of each normalising module

    # ---- what rules ask and say -----------------------------------------------------------

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The example's shape of a tensor of the graph."""
        return shape_of(node.meta["val"])

    def is_weight(self, node: fx.Node) -> bool:
        """Is this a parameter or buffer, perhaps transposed, reshaped or scaled?"""
        return node in self.weights

    def consume(self, node: fx.Node, data: fx.Node, weight: fx.Node, columns: Layout) -> None:
        """Record that a unit ends at ``node``."""
        if operands(node).count(data) > 1:
            block(columns, Block(place_of(node), "enters the same operation twice"))
        self.consumptions.append(Consumption(node, data, columns))
        self.consumed |= self._dims_of(weight, columns)

    def _dims_of(self, weight: fx.Node, columns: Layout) -> set[tuple[fx.Node, int]]:
        """The parameters' own dimensions that a weight's columns are made of."""
        found = set(leaves(columns))
        return {
            (placeholder, dim)
            for placeholder in self.parameters_of(weight)
            for dim, layout in enumerate(self.dims[placeholder])
            if found & set(leaves(layout))
        }

    def parameters_of(self, weight: fx.Node) -> list[fx.Node]:
        """The parameters and buffers that a weight is computed from."""
        if weight in self.graph.tensors:
            return [weight]
        sources = [n for n in weight.all_input_nodes if n in self.weights]
        return [p for source in sources for p in self.parameters_of(source)]

    def mark_affine(self, node: fx.Node) -> None:
        """Record a normalisation's scale or shift."""
        self.affine.add(node)

    # ---- what the rest of the package asks ------------------------------------------------

    def edges_of(self, axis: Axis) -> set[tuple[fx.Node, fx.Node]]:
        """The consumer edges ``(node, data)`` of a unit."""
        return {(c.node, c.data) for c in self.consumptions if axis in leaves(c.columns)}

    def results(self, node: fx.Node) -> list[Dims]:
        """The layouts of each tensor that a node computes."""
        return [self.dims[node]] if node in self.dims else self.several.get(node, [])


def analyse(graph: Graph, model: nn.Module) -> Analysis:
    """Apply the rules to the whole graph."""
    analysis = Analysis(graph)
    _enter_tensors(analysis)
    _block_shared(analysis, named_tensors(model))
    for node in graph.nodes:
        if node.op == "call_function" and is_tensor_valued(node):
            _enter(analysis, node)
    _block_shared_weights(analysis)
    _block_repeated(analysis)
    for node in graph.outputs:
        if isinstance(node, fx.Node):
            for layout in analysis.dims.get(node, ()):
                block(layout, OUTPUT)
    return analysis


def _enter_tensors(analysis: Analysis) -> None:
    graph = analysis.graph
    for node in graph.tensors:
        analysis.dims[node] = tuple(Axis(size) for size in analysis.shape(node))
        analysis.weights.add(node)
        analysis.parametric.add(node)
    for node in graph.inputs:
        analysis.dims[node] = _blocked(analysis.shape(node), INPUT)
    for node in graph.constants:
        if is_tensor_valued(node):
            cause = f"meets {node.name}, a constant in forward's code, which cannot grow along"
            analysis.dims[node] = _blocked(analysis.shape(node), Block("", cause))


def _blocked(shape: Iterable[int], reason: Block) -> Dims:
    return tuple(position(1) if size == 1 else Axis(size, [reason]) for size in shape)


# ---- weights with several uses ---------------------------------------------------------------


def _block_shared(analysis: Analysis, tensors: dict[str, Tensor]) -> None:
    """Parameters with several uses, under one name or under several."""
    order = {name: i for i, name in enumerate(tensors)}
    for tied in _tied(analysis.graph, tensors):
        names = sorted(tied, key=order.__getitem__)
        nodes = [node for node, name in analysis.graph.tensors.items() if name in names]
        readers = [reader for node in nodes for reader in _readers(node)]
        if len(readers) > 1:
            cause = f"{' = '.join(names)} is shared: {_list_places(readers)}"
            for node in nodes:
                _block_all(analysis, node, Block("", cause))


def _readers(node: fx.Node) -> list[fx.Node]:
    """The operations that read a tensor, once for each time they do."""
    return [u for u in node.users if is_tensor_valued(u) for n in operands(u) if n is node]


def _list_places(readers: list[fx.Node]) -> str:
    places = list(dict.fromkeys(place_of(reader) for reader in readers))
    if len(places) == 1:
        return f"{places[0]} uses it {len(readers)} times"
    listed = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
    return f"it is used in {listed}"


def _tied(graph: Graph, tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names of the graph's tensors, those that share memory together."""
    storages: dict[int, list[list[str]]] = {}
    for name in graph.tensors.values():
        groups = storages.setdefault(tensors[name].untyped_storage().data_ptr(), [])
        group = next((g for g in groups if _overlap(tensors[g[0]], tensors[name])), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return [group for groups in storages.values() for group in groups]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Do two tensors in one storage have entries in common?"""
    (start, end), (other_start, other_end) = _extent(a), _extent(b)
    return a is b or (start < other_end and other_start < end)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where the tensor begins and ends in its storage, in bytes."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    last = first + sum((int(size) - 1) * stride for size, stride in pairs)
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _block_shared_weights(analysis: Analysis) -> None:
    """A transposed or scaled parameter that is used twice is a shared parameter."""
    for node in analysis.weights:
        if node in analysis.graph.tensors or node in analysis.several:
            continue
        readers = _readers(node)
        if len(readers) > 1:
            names = [analysis.graph.tensors[p] for p in analysis.parameters_of(node)]
            reason = Block("", f"{' = '.join(names)} is shared: {_list_places(readers)}")
            for placeholder in analysis.parameters_of(node):
                _block_all(analysis, placeholder, reason)


def _block_all(analysis: Analysis, node: fx.Node, reason: Block) -> None:
    for layout in analysis.dims[node]:
        block(layout, reason)


def _block_repeated(analysis: Analysis) -> None:
    """Neurons that meet each other in one tensor are not separate."""
    for node in analysis.graph.nodes:
        if node in analysis.weights:
            continue
        for dims in analysis.results(node):
            for axis in repeated(dims):
                block(axis, Block(place_of(node), "is paired with itself, as in an outer product"))


# ---- one operation ---------------------------------------------------------------------------


def _enter(analysis: Analysis, node: fx.Node) -> None:
    op = Op(node, analysis)
    found = find_rule(node)
    read = [n for n in operands(node) if analysis.results(n)]
    if found is None:
        result: Result = _without_rule(op, "which has no rule")
    else:
        result = _completed(op, found.propagate(op))
        if read and analysis.weights.issuperset(read) and _keeps_linear(found, len(read)):
            analysis.weights.add(node)
    if read and analysis.parametric.issuperset(read):
        analysis.parametric.add(node)
    if isinstance(result, list):
        analysis.several[node] = result
    else:
        analysis.dims[node] = result


def _keeps_linear(found: Rule, count: int) -> bool:
    """Is an operation on ``count`` weights linear in them, without constant term?"""
    if found.traits & Trait.HOMOGENEOUS or found.name == "aten::getitem":
        return True
    return count == 1 and (bool(found.traits & Trait.PRODUCT) or found.name == "aten::div")


def _completed(op: Op, result: Result) -> Result:
    """A rule's result, checked against the shapes that were traced.

    A rule may describe only the first of several results; nothing is known of the others.
    """
    several = list(_shapes(op.node.meta["val"]))
    listed = result if isinstance(result, list) else [result]
    listed += [op.opaque(shape) for shape in several[len(listed) :]]
    described = [tuple(size_of(layout) for layout in dims) for dims in listed]
    if described != several:
        return _without_rule(op, f"whose rule expects results of shape {described}, not {several}")
    return listed if isinstance(op.node.meta["val"], list | tuple) else listed[0]


def _shapes(value: object) -> Iterator[tuple[int, ...]]:
    for each in value if isinstance(value, list | tuple) else (value,):
        yield shape_of(each) if hasattr(each, "shape") else ()


def _without_rule(op: Op, why: str) -> Result:
    """Never guess: whatever enters cannot be split, and what leaves is new."""
    for node in op.inputs:
        op.block(list(op.dims(node)), f"enters {op.name}, {why}")
    results = [op.opaque(shape) for shape in _shapes(op.node.meta["val"])]
    return results if isinstance(op.node.meta["val"], list | tuple) else results[0]
