"""The model as a graph of ATen operations, by ``torch.export``.

The graph is read, and run for scoring; the model itself is never touched. Parameters and buffers
are known by their names in the model and looked up there each time the graph runs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import io
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from splitgrow.errors import CaptureError, InputError
from splitgrow.functional import functional
from splitgrow.patterns import restore
from splitgrow.state import eval_mode, seeded

ExampleInputs = Sequence[Any] | Mapping[str, Any] | Tensor


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def from_example(cls, example_inputs: ExampleInputs | Call) -> Call:
        """A tuple of positional inputs, a dict of keyword inputs, or a single tensor."""
        if isinstance(example_inputs, Call):
            return example_inputs
        if isinstance(example_inputs, Tensor):
            return cls((example_inputs,), {})
        if isinstance(example_inputs, Mapping):
            return cls((), _keywords(example_inputs))
        if isinstance(example_inputs, list | tuple):
            return cls(tuple(example_inputs), {})
        raise InputError(
            "example_inputs: expected a tuple of positional inputs, a dict of keyword inputs or a "
            f"tensor, got {type(example_inputs).__name__}."
        )

    def bound_to(self, model: nn.Module) -> Call:
        """The same call with every argument by name, so that ``f(x)`` and ``f(x=x)`` agree.

        Arguments that were left out have their defaults.
        """
        try:
            bound = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return self  # let the model itself complain, or accept
        kinds = {p.kind for p in bound.signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
            return self
        bound.apply_defaults()
        return Call((), _by_name(bound))

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, nested ones included."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def samples(self) -> int:
        """The batch size: the leading dimension of the first tensor that has one."""
        return next((t.shape[0] for t in self.tensors() if t.ndim), 1)

    def with_batch_of_two(self) -> Call:
        """A single sample twice, because ``torch.export`` would freeze a size of 1.

        With more samples than one, a leading 1 is left alone: it is there to be broadcast.
        """
        if self.samples != 1:
            return self

        def double(tensor: Tensor) -> Tensor:
            return torch.cat([tensor] * 2) if tensor.ndim and tensor.shape[0] == 1 else tensor

        return self.with_tensors([double(tensor) for tensor in self.tensors()])

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """The same call with other values in the places of its tensors."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        fresh = iter(tensors)
        filled = [next(fresh) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Call(*pytree.tree_unflatten(filled, spec))

    def describe(self) -> str:
        """The arguments in short, tensors by their shapes."""

        def short(leaf: Any) -> Any:
            return _Shape(leaf) if isinstance(leaf, Tensor) else leaf

        args, kwargs = pytree.tree_map(short, (self.args, self.kwargs))
        return ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])

    def to(self, device: torch.device | None) -> Call:
        """The same call with copies of its tensors, which a model may change in place."""
        return self.with_tensors([t.detach().to(device, copy=True) for t in self.tensors()])

    def like(self, other: Call) -> bool:
        """Do two calls differ in nothing but the tensors?"""
        mine, spec = pytree.tree_flatten((self.args, self.kwargs))
        theirs, other_spec = pytree.tree_flatten((other.args, other.kwargs))
        return spec == other_spec and all(map(_alike, mine, theirs))


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A tensor in a message."""

    tensor: Tensor

    def __repr__(self) -> str:
        return f"tensor{tuple(self.tensor.shape)}"


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor)
    if a is b:
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # an array does not say yes or no
        return False


def _keywords(example_inputs: Mapping[Any, Any]) -> dict[str, Any]:
    for key in example_inputs:
        if not isinstance(key, str):
            raise InputError(
                f"example_inputs: the keys of a dict are names of arguments, got {key!r}. To pass "
                "the dict itself as the first argument, put it into a tuple: (inputs,)."
            )
    return dict(example_inputs)


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

    Dataclasses and dicts that pytree does not know are taken apart here, so that nobody has to
    register their output class before its model can be grown.
    """

    skeleton: Any = None

    def flatten(self, output: Any) -> list[Any]:
        """The tensors of an output, in order (and numbers that depend on the batch size)."""
        found: list[Any] = []
        self.skeleton = self._strip(output, found)
        return found

    def _strip(self, value: Any, found: list[Any]) -> Any:
        if isinstance(value, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
            found.append(value)
            return _Slot(len(found) - 1)
        return _rebuild(value, lambda child: self._strip(child, found))

    def unflatten(self, found: Sequence[Any]) -> Any:
        """The output again, with other tensors."""
        return self._fill(self.skeleton, found)

    def _fill(self, value: Any, found: Sequence[Any]) -> Any:
        if isinstance(value, _Slot):
            return found[value.index]
        return _rebuild(value, lambda child: self._fill(child, found))


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of tensor ``index`` in a structure."""

    index: int


def _rebuild(value: Any, visit: Callable[[Any], Any]) -> Any:
    """A container of the same type with every child visited; leaves come back as they are."""
    if isinstance(value, _Slot | type):
        return value
    if isinstance(value, dict):
        return _rebuild_dict(value, visit)
    if dataclasses.is_dataclass(value):
        children = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _with_attributes(copy.copy(value), {n: visit(c) for n, c in children.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(visit(child) for child in value))
    if isinstance(value, list | tuple):
        return type(value)(visit(child) for child in value)
    return value


def _rebuild_dict(value: dict[Any, Any], visit: Callable[[Any], Any]) -> dict[Any, Any]:
    """A dict, or a class made of one that shows its items as attributes too."""
    visited = {key: visit(child) for key, child in value.items()}
    fresh = copy.copy(value)
    for key, child in visited.items():
        dict.__setitem__(fresh, key, child)
    shown = {n: visited[n] for n, child in getattr(value, "__dict__", {}).items()
             if n in visited and child is value[n]}  # fmt: skip
    return _with_attributes(fresh, shown)


def _with_attributes(fresh: Any, attributes: dict[str, Any]) -> Any:
    for name, attribute in attributes.items():
        object.__setattr__(fresh, name, attribute)
    return fresh


class _Traced(nn.Module):
    """What is handed to ``torch.export``: the model as a function of a list of tensors."""

    def __init__(self, model: nn.Module, call: Call, structure: _Structure) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.structure = structure

    def forward(self, tensors: list[Tensor]) -> list[Any]:
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
        inputs: placeholders of the model's input tensors, in the order of ``bound.tensors()``.
        outputs: nodes that the model returns, in flattened order.
        structure: how the model's output is built from those.
        example: the call that the graph was captured with, as it was given.
        bound: the same call with every argument by name.
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
    bound: Call
    batch: int

    def flatten_call(self, call: Call) -> list[Tensor]:
        """The tensors of a bound call in the order of :attr:`inputs`, checked with the example."""
        if not self.bound.like(call):
            raise InputError(
                "loss_fn called the model with other arguments than example_inputs had.\n"
                f"  example_inputs: {self.bound.describe()}\n  loss_fn: {call.describe()}\n"
                "Give find_units an example as loss_fn calls it."
            )
        tensors = call.tensors()
        for node, tensor in zip(self.inputs, tensors, strict=True):
            _check_shape(node, tensor)
        return tensors


def _check_shape(node: fx.Node, tensor: Tensor) -> None:
    """Raise where a batch differs from the example in a size that is fixed in the graph."""
    traced = node.meta["val"]
    expected = tuple(_fixed(size) for size in traced.shape)
    pairs = zip(expected, tensor.shape, strict=False)
    if traced.ndim != tensor.ndim or any(want not in ("any", got) for want, got in pairs):
        raise InputError(
            f"loss_fn called the model with an input of shape {tuple(tensor.shape)}, but it was "
            f"captured for {str(expected).replace(repr('any'), 'any')}. Give find_units an "
            "example with the shape of the batches. Where the batch size is fixed too, forward "
            "makes it so (a reshape to a number, a loop over samples): give batches of that size."
        )
    if traced.dtype != tensor.dtype:
        raise InputError(
            f"loss_fn called the model with an input of {tensor.dtype}, but example_inputs had "
            f"{traced.dtype}. Give find_units an example as loss_fn calls it."
        )


def _fixed(size: Any) -> int | str:
    number = size if isinstance(size, int) else size.node.maybe_as_int()
    return "any" if number is None else number


def capture(model: nn.Module, example: Call) -> Graph:
    """Export the model in eval mode, with a batch size that may vary where the model allows it."""
    lazy = [name for name, t in named_tensors(model).items() if is_lazy(t)]
    if lazy:
        raise CaptureError(
            f"{lazy[0]} has no shape yet: it belongs to a lazy module. Run the model on one batch "
            "before find_units."
        )
    example = example.to(None)
    with eval_mode(model):
        program, structure, batch = _export(model, example)
    restore(program.graph)
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
    tensors = _with_first_names(model, tensors)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    returned = zip(output.args[0], signature.output_specs, strict=True)
    graph = Graph(
        nodes=tuple(n for n in program.graph.nodes if n.op not in ("placeholder", "output")),
        tensors=tensors,
        parameters=tuple(parameters),
        constants=constants,
        inputs=tuple(inputs[i] for i in _order_by_name(model, example)),
        outputs=tuple(node for node, spec in returned if spec.kind is OutputKind.USER_OUTPUT),
        structure=structure,
        example=example,
        bound=example.bound_to(model),
        batch=batch,
    )
    _check_sizes(graph)
    return graph


def _order_by_name(model: nn.Module, example: Call) -> list[int]:
    """For each tensor of the bound call, its place among the tensors of the call as given."""
    numbered = example.with_tensors([_Slot(i) for i in range(len(example.tensors()))])
    bound = numbered.bound_to(model)
    leaves = pytree.tree_leaves((bound.args, bound.kwargs))
    return [leaf.index for leaf in leaves if isinstance(leaf, _Slot)]


def _check_sizes(graph: Graph) -> None:
    """Raise where the size of a tensor depends on the data (a mask, ``nonzero``)."""
    for node in graph.nodes:
        if is_tensor_valued(node) and _has_unknown_size(node.meta["val"]):
            raise CaptureError(
                f"{place_of(node)}: the size of a tensor depends on the data ({node.target}"
                f"{_line_of(node)}), so its neurons cannot be followed. Keep the size fixed: "
                "torch.where in place of a boolean mask, zeros in place of what is left out."
            )


def _has_unknown_size(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_unknown_size(each) for each in value)
    sizes = getattr(value, "shape", ())
    return any(not isinstance(size, int) and not size.node.has_hint() for size in sizes)


def _line_of(node: fx.Node) -> str:
    """The user's line that a node was traced from."""
    frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in frames if line.startswith("File ") and not _is_internal(line)]
    return f", {places[-1][0].lower()}{places[-1][1:]}" if places else ""


def _export(
    model: nn.Module, example: Call
) -> tuple[torch.export.ExportedProgram, _Structure, int]:
    """Try a varying batch first, then the example exactly as it is."""
    failure: Exception | None = None
    for call, dynamic in ((example.with_batch_of_two(), True), (example, False)):
        structure = _Structure()
        traced = _Traced(model, call, structure)
        traced.training = False  # not by eval(), which would call the model's own train()
        tensors = call.tensors()
        shapes = [{0: torch.export.Dim.AUTO} if t.ndim else None for t in tensors]
        try:
            with warnings.catch_warnings(), _quiet(), torch.no_grad():
                warnings.simplefilter("ignore")
                program = torch.export.export(
                    traced,
                    (tensors,),
                    dynamic_shapes={"tensors": shapes} if dynamic else None,
                    strict=False,
                )
                return functional(program), structure, call.samples
        except Exception as error:  # noqa: BLE001  (export raises whatever the model's code raises)
            failure = error  # of the example as it was given, if it comes to that
    assert failure is not None
    raise CaptureError(_explain(model, example, failure)) from failure


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs its own retries; our messages say what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's loggers have levels of their own
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # where it prints graphs that failed
            yield
    finally:
        logging.disable(before)


def _explain(model: nn.Module, example: Call, error: Exception) -> str:
    """Where in the user's code the export stopped, and what to do about it."""
    try:
        with eval_mode(model), seeded(), torch.no_grad():
            own = example.to(None)
            model(*own.args, **own.kwargs)
    except Exception as failure:  # noqa: BLE001  (the model's code may raise anything)
        return (
            f"The model does not run on example_inputs ({example.describe()}){_where(failure)}\n"
            f"  {_first_line(failure)}\n"
            "Give find_units an example that model(*example_inputs) accepts (keyword inputs as a "
            "dict), on the model's own device."
        )
    named = [path for path, _ in model.named_modules() if any(map(iskeyword, path.split(".")))]
    if isinstance(error, SyntaxError) and named:
        return (
            f"The model runs, but torch.export cannot capture it: the name of {named[0]} is a word "
            "of Python's own. Rename that submodule."
        )
    return (
        f"The model runs, but torch.export cannot capture it{_where(error)}\n"
        f"  {_first_line(error)}\n"
        "A branch or a loop that depends on a tensor's values cannot be traced: rewrite an `if` "
        "with torch.where, keep .item(), .tolist() and .numpy() out of forward."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _where(error: Exception) -> str:
    """The last of the user's own lines on the way to an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_internal(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f' at "{last.filename}", line {last.lineno}, in {last.name}: `{last.line}`'


def _is_internal(path: str) -> bool:
    """Is this a file of PyTorch's or of this package's, and not the user's?"""
    names = ("capture.py", "functional.py", "units.py", "state.py")
    ours = (str(Path(__file__).parent / name) for name in names)
    return "<" in path or str(Path(torch.__file__).parent) in path or any(o in path for o in ours)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a traced tensor, with the example's sizes in place of symbols."""
    return tuple(as_int(size) for size in value.shape)


def as_int(size: Any) -> int:
    """A size of the graph as the number it had in the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def is_tensor_valued(node: fx.Node) -> bool:
    """Does a node compute a tensor or several, and not a size or nothing at all?"""
    value = node.meta.get("val")
    listed = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, Tensor) for each in listed)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, under each of its names."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


def _with_first_names(model: nn.Module, tensors: dict[fx.Node, str]) -> dict[fx.Node, str]:
    """The same, but of a tensor's several names the first goes to the placeholder in use."""
    named = named_tensors(model)
    names = dict(tensors)
    aliases: dict[int, list[fx.Node]] = {}
    for node, name in tensors.items():
        aliases.setdefault(id(named[name]), []).append(node)
    for nodes in aliases.values():
        by_use = sorted(nodes, key=lambda node: not node.users)
        names |= zip(by_use, (tensors[node] for node in nodes), strict=True)
    return names


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors in a model's output, in a fixed order."""
    found: list[Tensor] = _Structure().flatten(output)
    return found


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
