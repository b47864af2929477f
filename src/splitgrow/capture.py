"""The model as a graph of ATen operations, by ``torch.export``.

The graph is read, and run for scoring; the model itself is never touched. Parameters and buffers
are known by their names in the model and looked up there each time the graph runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from splitgrow.errors import CaptureError, InputError
from splitgrow.state import eval_mode

ExampleInputs = Sequence[Any] | Mapping[str, Any] | Tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def from_example(cls, example_inputs: ExampleInputs) -> Call:
        """A tuple of positional inputs, a dict of keyword inputs, or a single tensor."""
        if isinstance(example_inputs, Tensor):
            return cls((example_inputs,), {})
        if isinstance(example_inputs, Mapping):
            return cls((), dict(example_inputs))
        if isinstance(example_inputs, list | tuple):
            return cls(tuple(example_inputs), {})
        raise InputError(
            "example_inputs: expected a tuple of positional inputs, a dict of keyword inputs or a "
            f"tensor, got {type(example_inputs).__name__}."
        )

    def bound_to(self, model: nn.Module) -> Call:
        """The same call with every argument by name, so that ``f(x)`` and ``f(x=x)`` agree."""
        try:
            bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return self  # let the model itself complain, or accept
        kinds = {p.kind for p in bound.signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
            return self
        return Call((), {**bound.kwargs, **_by_name(bound)})

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, nested ones included."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def samples(self) -> int:
        """The batch size: the leading dimension of the first tensor that has one."""
        return next((t.shape[0] for t in self.tensors() if t.ndim), 1)

    def with_batch_of_two(self) -> Call:
        """Every leading dimension of size 1 doubled: ``torch.export`` would freeze a 1."""

        def double(tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * 2) if tensor.ndim and tensor.shape[0] == 1 else tensor

        return self.with_tensors([double(tensor) for tensor in self.tensors()])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other tensors in the places of its own."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        fresh = iter(tensors)
        filled = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Call(*pytree.tree_unflatten(filled, spec))

    def describe(self) -> str:
        """The arguments in short, tensors by their shapes."""
        def short(leaf: Any) -> Any:
            return f"tensor{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(short, (self.args, self.kwargs))
        return ", ".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())])

    def to(self, device: torch.device) -> Call:
        """The same call with its tensors on a device."""
        return self.with_tensors([tensor.to(device) for tensor in self.tensors()])

    def like(self, other: Call) -> bool:
        """Do two calls differ in nothing but the tensors?"""
        mine, spec = pytree.tree_flatten((self.args, self.kwargs))
        theirs, other_spec = pytree.tree_flatten((other.args, other.kwargs))
        return spec == other_spec and all(
            isinstance(b, Tensor) if isinstance(a, Tensor) else a == b
            for a, b in zip(mine, theirs, strict=True)
        )


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    named = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


@dataclasses.dataclass
class _Structure:
    """How the model's output is built from tensors, remembered while it is traced.

    Dataclasses that pytree does not know are taken apart here, so that nobody has to register
    their output class before its model can be grown.
    """

    skeleton: Any = None

    def flatten(self, output: Any) -> list[Tensor]:
        tensors: list[Tensor] = []
        self.skeleton = self._strip(output, tensors)
        return tensors

    def _strip(self, value: Any, tensors: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return _Slot(len(tensors) - 1)
        return _rebuild(value, lambda child: self._strip(child, tensors))

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        return self._fill(self.skeleton, tensors)

    def _fill(self, value: Any, tensors: Sequence[Tensor]) -> Any:
        if isinstance(value, _Slot):
            return tensors[value.index]
        return _rebuild(value, lambda child: self._fill(child, tensors))


@dataclasses.dataclass(frozen=True)
class _Slot:
    index: int


def _rebuild(value: Any, visit: Any) -> Any:
    """A container of the same type with every child visited; leaves come back as they are."""
    if isinstance(value, _Slot):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type | dict):
        fields = {f.name: visit(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return _shallow_copy(value, fields)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(visit(child) for child in value))
    if isinstance(value, list | tuple):
        return type(value)(visit(child) for child in value)
    if isinstance(value, dict):
        children, spec = pytree.tree_flatten(value, is_leaf=lambda v: v is not value)
        return pytree.tree_unflatten([visit(child) for child in children], spec)
    return value


def _shallow_copy(value: Any, fields: dict[str, Any]) -> Any:
    fresh = object.__new__(type(value))
    for name, field in {**vars(value), **fields}.items():
        object.__setattr__(fresh, name, field)
    return fresh


class _Traced(nn.Module):
    """What is handed to ``torch.export``: the model as a function of a list of tensors."""

    def __init__(self, model: nn.Module, call: Call, structure: _Structure) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.structure = structure

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        call = self.call.with_tensors(tensors)
        return self.structure.flatten(self.model(*call.args, **call.kwargs))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A functional ATen graph of the model in eval mode.

    Attributes:
        nodes: operations in order of execution, without inputs and output.
        tensors: placeholder -> name of the parameter or buffer in the model.
        parameters: names of those tensors that are parameters.
        constants: placeholder -> tensor that the forward pass makes itself.
        inputs: placeholders of the model's input tensors, in flattened order.
        outputs: nodes that the model returns, in flattened order.
        example: the call that the graph was captured with.
        batch: number of samples that the shapes in the graph stand for.
    """

    nodes: tuple[fx.Node, ...]
    tensors: dict[fx.Node, str]
    parameters: tuple[str, ...]
    constants: dict[fx.Node, Any]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[Any, ...]
    structure: _Structure
    example: Call
    batch: int

    def flatten_call(self, call: Call) -> list[Tensor]:
        """The call's tensors in the order of :attr:`inputs`, checked against the example."""
        if not self.example.like(call):
            raise InputError(
                "loss_fn called the model with other arguments than example_inputs had.\n"
                f"  example_inputs: {self.example.describe()}\n  loss_fn: {call.describe()}\n"
                "Give find_units an example as loss_fn calls it."
            )
        return call.tensors()


def capture(model: nn.Module, example: Call) -> Graph:
    """Export the model in eval mode, with a batch size that may vary where the model allows it."""
    example = example.bound_to(model)
    with eval_mode(model):
        program, structure, batch = _export(model, example)
    signature = program.graph_signature
    tensors: dict[fx.Node, str] = {}
    constants: dict[fx.Node, Any] = {}
    inputs: list[fx.Node] = []
    parameters: list[str] = []
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensors[node] = spec.target.removeprefix("model.")
            parameters += [tensors[node]] if spec.kind is InputKind.PARAMETER else []
        else:
            constants[node] = program.constants.get(spec.target)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    returned = zip(output.args[0], signature.output_specs, strict=True)
    return Graph(
        nodes=tuple(n for n in program.graph.nodes if n.op not in ("placeholder", "output")),
        tensors=tensors,
        parameters=tuple(parameters),
        constants=constants,
        inputs=tuple(inputs),
        outputs=tuple(node for node, spec in returned if spec.kind is OutputKind.USER_OUTPUT),
        structure=structure,
        example=example,
        batch=batch,
    )


def _export(model: nn.Module, example: Call) -> tuple[torch.export.ExportedProgram, _Structure, int]:
    """Try a varying batch first, then the example exactly as it is."""
    failure: Exception | None = None
    for call, dynamic in ((example.with_batch_of_two(), True), (example, False)):
        structure = _Structure()
        traced = _Traced(model, call, structure).train(model.training)
        tensors = call.tensors()
        batch = [{0: torch.export.Dim.AUTO} if t.ndim else None for t in tensors]
        shapes = {"tensors": batch} if dynamic else None
        try:
            with warnings.catch_warnings(), _quiet(), torch.no_grad():
                warnings.simplefilter("ignore")
                program = torch.export.export(
                    traced, (tensors,), dynamic_shapes=shapes, strict=False
                )
                # No decomposition: this only makes in-place operations functional.
                return program.run_decompositions({}), structure, call.samples
        except Exception as error:  # export raises whatever the model's own code raises
            failure = failure or error
    assert failure is not None
    raise CaptureError(_explain(failure)) from failure


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs its own retries; our messages say what matters."""
    import logging

    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _explain(error: Exception) -> str:
    """Where in the user's code the export stopped, and what to do about it."""
    torch_home = os.path.dirname(torch.__file__)
    ours = os.path.dirname(__file__)
    frames = [
        f for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((torch_home, ours)) and "<" not in f.filename
    ]  # fmt: skip
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    cause = f"{type(error).__name__}: {first_line}"
    where = ""
    if frames:
        last = frames[-1]
        where = f' at "{last.filename}", line {last.lineno}, in {last.name}: `{last.line}`'
    return (
        f"The model cannot be captured by torch.export{where}\n  {cause}\n"
        "Check first that model(*example_inputs) runs. A data-dependent branch (an `if` on a "
        "tensor's value) cannot be traced: rewrite it with torch.where, or move it out of forward."
    )


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a traced tensor, with the example's sizes in place of symbols."""
    return tuple(as_int(size) for size in value.shape)


def as_int(size: Any) -> int:
    """A size of the graph as the number it had in the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors in a model's output, in a fixed order."""
    return _Structure().flatten(output)


def path_of(node: fx.Node) -> str:
    """The path of the module that a node was traced in."""
    place = place_of(node).split(" (")[0]
    return "" if place == "the model" else place


def place_of(node: fx.Node) -> str:
    """The path of the module that a node was traced in, with its class."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [(path, kind) for path, kind in stack.values() if isinstance(path, str)]
    for path, kind in reversed(paths):
        if path.startswith("_empty"):
            continue
        name = path.removeprefix("model").removeprefix(".")
        label = kind.rsplit(".", 1)[-1] if isinstance(kind, str) else kind.__name__
        return f"{name} ({label})" if name else f"the model ({label})"
    return "the model"
