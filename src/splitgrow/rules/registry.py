"""How a rule is written and found.

A rule says what an ATen operation does to the layouts of its inputs: which indices it carries,
which it contracts with a parameter, and which it mixes so that no neuron of them can be split
alone. An operation without a rule is never guessed: everything that enters it is blocked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx

from splitgrow.capture import as_int, place_of, shape_of
from splitgrow.layout import (
    ONE,
    Axis,
    Block,
    Dims,
    Layout,
    MismatchError,
    block,
    is_one,
    position,
    size_of,
    unify,
)

if TYPE_CHECKING:
    from splitgrow.analysis import Analysis


class Trait(Flag):
    """What is known of an operation as a function of its tensor inputs."""

    NONE = 0
    POINTWISE = auto()  # entry i of the result depends on the inputs' entries i alone
    LINEAR = auto()  # affine in all its tensor inputs together
    PRODUCT = auto()  # linear in each tensor input while the others are held
    HOMOGENEOUS = auto()  # no constant term: halving all inputs halves the result
    CONSTANT = auto()  # takes shape or dtype from its inputs, but no values
    CUTS = auto()  # leaves entries out: an index that is not carried does not enter the result


Result = Dims | list[Dims]  # one tensor, or several; of several the first ones may do
Propagate = Callable[["Op"], Result]


@dataclass(frozen=True)
class Rule:
    """One row of the table of supported operations."""

    name: str
    propagate: Propagate
    traits: Trait

    @property
    def family(self) -> str:
        """The kind of operation: the name of the file that the rule is in."""
        return self.propagate.__module__.rpartition(".")[2]

    @property
    def summary(self) -> str:
        """The first line of the rule's docstring."""
        return (self.propagate.__doc__ or "").strip().partition("\n")[0]


RULES: dict[str, Rule] = {}


_P = TypeVar("_P", bound=Propagate)


def rule(*names: str, traits: Trait = Trait.NONE) -> Callable[[_P], _P]:
    """Register a function as the rule of the ATen operations ``names`` (all overloads).

    An operation of another library is named with its namespace::

        @splitgrow.rule("mylib::my_activation", traits=splitgrow.Trait.POINTWISE)
        def my_activation(op):
            return op.dims("x")
    """

    def register(propagate: _P) -> _P:
        for name in names:
            key = name if "::" in name else f"aten::{name}"
            if key in RULES:
                raise ValueError(f"{key} has a rule already: {RULES[key].propagate.__name__}")
            RULES[key] = Rule(key, propagate, traits)
        return propagate

    return register


def find_rule(node: fx.Node) -> Rule | None:
    """The rule of a node's operation, if there is one."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return RULES.get(schema.name)
    return RULES.get(f"aten::{getattr(node.target, '__name__', node.target)}")


class Op:
    """One node of the graph, as a rule sees it: arguments by name, layouts, and verbs."""

    def __init__(self, node: fx.Node, analysis: Analysis) -> None:
        self.node = node
        self.analysis = analysis
        self.arguments = _bind_arguments(node)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the schema, its default where it was left out."""
        return self.arguments[name]

    def number(self, name: str) -> int:
        """An integer argument; the example's value where it depends on the batch size."""
        value = self.arguments[name]
        return as_int(value.meta["val"] if isinstance(value, fx.Node) else value)

    @property
    def place(self) -> str:
        """The module that the operation was traced in, for messages."""
        return place_of(self.node)

    @property
    def name(self) -> str:
        """The operation for messages, such as ``aten.sort``."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is not None:
            return schema.name.replace("::", ".")
        return getattr(self.node.target, "__name__", str(self.node.target))

    @property
    def inputs(self) -> list[fx.Node]:
        """The tensors that enter, in order, each once."""
        return [n for n in self.node.all_input_nodes if n in self.analysis.dims]

    @property
    def operands(self) -> list[fx.Node]:
        """The tensors that enter, in order, as often as they do."""
        return [n for n in operands(self.node) if n in self.analysis.dims]

    def dims(self, argument: Any) -> Dims:
        """The layouts of a tensor argument, given by name or as a node."""
        node = self.arguments[argument] if isinstance(argument, str) else argument
        found = self.analysis.dims[node]
        assert isinstance(found, tuple)
        return found

    def is_tensor(self, argument: Any) -> bool:
        """Is an argument, given by name or as a node, a tensor that was passed?"""
        value = self.arguments.get(argument) if isinstance(argument, str) else argument
        return isinstance(value, fx.Node) and value in self.analysis.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the (first) result."""
        value = self.node.meta["val"]
        return shape_of(value[0] if isinstance(value, list | tuple) else value)

    # ---- verbs --------------------------------------------------------------------------

    def block(self, layouts: Layout | Sequence[Layout], cause: str) -> None:
        """None of these indices can be split: ``cause`` completes 'features.3 (Softmax): ...'."""
        reason = Block(self.place, cause)
        for layout in layouts if isinstance(layouts, list | tuple) else (layouts,):
            block(layout, reason)

    def unify(self, a: Layout, b: Layout) -> Layout:
        """Both index the same neurons; where that cannot be, neither can be split."""
        try:
            unify(a, b)
        except MismatchError:
            self.block([a, b], "takes two groupings of the channels together that do not line up")
        return a

    def broadcast(self, a: Layout, b: Layout) -> Layout:
        """The layout of one dimension of an element-wise result."""
        if is_one(a):
            return b
        if is_one(b):
            return a
        if size_of(a) == size_of(b):
            return self.unify(a, b)
        small, large = (a, b) if size_of(a) == 1 else (b, a)
        self.block(small, "is broadcast, which only a width of 1 allows")
        return large

    def broadcast_dims(self, a: Dims, b: Dims) -> Dims:
        """The layouts of an element-wise result, dimensions aligned at the last."""
        pairs = zip_longest(reversed(a), reversed(b), fillvalue=ONE)
        return tuple(reversed([self.broadcast(x, y) for x, y in pairs]))

    def contract(self, data: fx.Node, index: Layout, weight: fx.Node, columns: Layout) -> None:
        """Sum over ``index`` of the data times ``columns`` of the weight: the units end here."""
        if self.analysis.is_weight(data):
            data, index, weight, columns = weight, columns, data, index
        if self.analysis.is_weight(data):
            self.block([index, columns], "is contracted between two parameters")
        elif self.analysis.is_weight(weight):
            self.analysis.consume(self.node, data, weight, columns)  # before the indices merge
        else:
            self.block([index, columns], self._no_weight(weight))
        self.unify(index, columns)

    def _no_weight(self, node: fx.Node) -> str:
        if node in self.analysis.parametric:
            return (
                f"is read by a weight that forward computes ({node.name}), whose columns cannot "
                "be halved; only a parameter, perhaps transposed, reshaped or scaled, can"
            )
        return "is contracted with another activation, not with a parameter"

    def normalise(self, *weights: str) -> None:
        """These parameters are a normalisation's affine: copied to offspring, not moved."""
        for name in weights:
            if self.is_tensor(name):
                self.analysis.mark_affine(self[name])

    def count(self, *factors: Layout | int) -> None:
        """This operation takes the product of ``factors`` multiply-accumulates."""
        self.analysis.macs.append((self.node, factors))

    # ---- common results -----------------------------------------------------------------

    def fresh(self, shape: Sequence[int] | None = None) -> Dims:
        """Positions only: nothing of the inputs' indices is left in these dimensions."""
        return tuple(position(size) for size in (self.shape if shape is None else shape))

    def opaque(self, shape: Sequence[int]) -> Dims:
        """Nothing is known of these dimensions, so that nothing that meets them can be split."""
        reason = Block(self.place, f"meets the result of {self.name}, which cannot grow along")
        return tuple(position(1) if size == 1 else Axis(size, [reason]) for size in shape)

    def replace(self, dims: Dims, start: int) -> Dims:
        """``dims`` with everything from ``start`` on made fresh; what was there is blocked."""
        start = start % len(dims)
        self.block(list(dims[start:]), f"is mixed by {self.name}")
        return (*dims[:start], *self.fresh(self.shape[start:]))


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, as often as they occur there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _bind_arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by its name in the schema, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {f"arg{i}": arg for i, arg in enumerate(node.args)}
    bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    return bound | dict(node.kwargs)


def normalise_dims(dims: Any, rank: int) -> list[int]:
    """Dimensions as non-negative numbers; ``None`` or an empty list means all."""
    if rank == 0:
        return []
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    listed = dims if isinstance(dims, list | tuple) else [dims]
    return [d % rank for d in listed]


__all__ = [
    "RULES",
    "Op",
    "Result",
    "Rule",
    "Trait",
    "find_rule",
    "normalise_dims",
    "operands",
    "rule",
]
