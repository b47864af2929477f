"""One forward and backward pass that collects h and g of many units.

h: what enters a unit's sub-graph. g: the derivative of the loss by each consumer edge. An edge is
tapped by handing the consumer an alias of its input: the derivative by the alias is that of this
edge alone, even where the tensor (a residual stream) flows on past its consumer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitgrow.capture import Call, Graph
from splitgrow.errors import InputError, LossError
from splitgrow.execute import run_node
from splitgrow.state import eval_mode
from splitgrow.units import Unit, Units, named_tensors
from splitgrow.view import ModelView, check_differentiable, check_loss, passes

LossFn = Callable[[Any, Any], Tensor]
Edge = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Group:
    """Samples that standard errors take as one: a batch, or a piece of one.

    Attributes:
        piece: which one of its batch. None: all that is said of the batch is one group, because
            the model is called several times for the same samples.
        rows: of dimension 0, that are here.
        samples: how many these count for; 0 in a further call.
    """

    batch: int
    piece: int | None
    rows: int
    samples: int

    @property
    def key(self) -> tuple[int, int | None]:
        """What belongs together has the same one."""
        return self.batch, self.piece

    def part(self, start: int, end: int) -> Group:
        """Some of its rows."""
        rows = end - start
        piece = None if self.piece is None else start
        return Group(self.batch, piece, rows, rows if self.samples else 0)


@dataclass(frozen=True)
class Evidence:
    """What some samples say about one unit: constants of its sub-graph and g at its edges."""

    inputs: dict[fx.Node, Any]
    gradients: tuple[Tensor | None, ...]  # one per edge; None where the loss does not see it
    samples: int  # whose mean loss g is the derivative of
    groups: tuple[Group, ...]  # what is here, of each batch that was put into it

    def tensors(self) -> list[Tensor]:
        """The activations and gradients."""
        held = [*self.inputs.values(), *self.gradients]
        return [t for t in held if isinstance(t, Tensor)]


def bytes_of(evidence: Iterable[Evidence]) -> int:
    """Of all activations and gradients."""
    return sum(tensor.nbytes for one in evidence for tensor in one.tensors())


@dataclass
class _Record:
    """One call of the model: values to keep, and the tapped aliases."""

    kept: dict[fx.Node, Any]
    taps: dict[Edge, Tensor]


class TappedModel(ModelView):
    """Behaves like the model it stands for; running it records what scoring needs."""

    def __init__(self, model: nn.Module, graph: Graph, units: Sequence[Unit]) -> None:
        super().__init__(model)
        self._graph = graph
        self._edges = {edge for unit in units for edge in unit.subgraph.edges}
        self._keep = {n for u in units for n in u.subgraph.inputs if n not in graph.tensors}
        self._last_use = _last_uses(graph)
        self.records: list[_Record] = []

    def run(self, call: Call) -> Any:
        """The captured graph on the call's tensors."""
        if any(tensor.requires_grad for tensor in call.tensors()):
            raise LossError(
                "loss_fn differentiates the model by its inputs (an input requires grad), as a "
                "gradient penalty does. The splitting index of such a loss is not available: "
                "leave that term out for scoring, or detach the inputs."
            )
        env = placeholder_values(self._model, self._graph, call.bound_to(self._model))
        record = _Record({}, {})
        for node in self._graph.nodes:
            value = _run_captured(node, partial(self._read, env, record, node))
            env[node] = value
            if node in self._keep:
                record.kept[node] = value.detach() if isinstance(value, Tensor) else value
            for done in self._last_use.get(node, ()):
                del env[done]
        record.kept |= {n: env[n] for n in self._keep if n in env and n not in record.kept}
        self.records.append(record)
        outputs = [env[n] if isinstance(n, fx.Node) else n for n in self._graph.outputs]
        return self._graph.structure.unflatten(outputs)

    def _read(self, env: dict[fx.Node, Any], record: _Record, node: fx.Node, n: fx.Node) -> Any:
        value = env[n]
        if (node, n) not in self._edges:
            return value
        alias = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
        record.taps[node, n] = alias
        return alias


def _run_captured(node: fx.Node, lookup: Callable[[fx.Node], Any]) -> Any:
    try:
        return run_node(node, lookup)
    except RuntimeError as error:
        raise InputError(
            f"the captured model does not run on this batch ({node.name}: {error}). Give "
            "find_units an example with the shapes of the batches; only the batch size may vary."
        ) from error


def placeholder_values(model: nn.Module, graph: Graph, call: Call) -> dict[fx.Node, Any]:
    """The model's own tensors, looked up by name, and the inputs of a call."""
    tensors = named_tensors(model)
    env: dict[fx.Node, Any] = {n: tensors[name].detach() for n, name in graph.tensors.items()}
    env |= dict(zip(graph.inputs, graph.flatten_call(call), strict=True))
    device = next((t.device for t in env.values() if isinstance(t, Tensor)), None)
    for node, value in graph.constants.items():
        env[node] = value.to(device) if isinstance(value, Tensor) else value
    return env


def _last_uses(graph: Graph) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value can be dropped."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in (node, *node.all_input_nodes):
            last[used] = node
    drop: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        if used.op != "placeholder" and used not in graph.outputs:
            drop.setdefault(node, []).append(used)
    return drop


def collect(
    model: nn.Module, units: Units, wanted: Sequence[Unit], loss_fn: LossFn, batches: Iterable[Any]
) -> Generator[tuple[float, int, dict[str, list[Evidence]]], None, None]:
    """For each batch: its loss, its number of samples, and the evidence of each wanted unit."""
    with eval_mode(model):
        for index, batch in enumerate(passes(batches)):
            # No name for it here: what the receiver drops is gone before the next batch.
            yield _on_batch(model, units, wanted, loss_fn, batch, index)


def _on_batch(
    model: nn.Module, units: Units, wanted: Sequence[Unit], loss_fn: LossFn, batch: Any, index: int
) -> tuple[float, int, dict[str, list[Evidence]]]:
    tapped = TappedModel(model, units.graph, wanted)
    with torch.enable_grad():
        loss = check_loss(loss_fn(tapped, batch), index)
        samples = tapped.samples
        gradients = _backward(model, loss, tapped.records, index)
    calls = list(zip(tapped.records, gradients, strict=True))
    return loss.item(), samples, {u.name: _evidence(u, calls, samples, index) for u in wanted}


@dataclass(frozen=True)
class Source:
    """A model, and the batches that its units are scored on."""

    model: nn.Module
    units: Units
    loss_fn: LossFn
    batches: Iterable[Any]

    def collect(
        self, wanted: Sequence[Unit]
    ) -> Generator[tuple[float, int, dict[str, list[Evidence]]], None, None]:
        """One pass: see :func:`collect`."""
        return collect(self.model, self.units, wanted, self.loss_fn, self.batches)


def _backward(
    model: nn.Module, loss: Tensor, records: list[_Record], index: int
) -> list[dict[Edge, Tensor | None]]:
    taps = [tap for record in records for tap in record.taps.values()]
    if not taps:
        return [{} for _ in records]  # nothing in the model can be split
    check_differentiable(loss)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found: Sequence[Tensor | None] = torch.autograd.grad(
        loss, [*taps, *own.values()], allow_unused=True
    )
    used = [n for n, g in zip(own, found[len(taps) :], strict=True) if g is not None]
    _warn_of_direct_use(index, used)
    gradients = iter(found)
    return [{edge: next(gradients) for edge in record.taps} for record in records]


def _warn_of_direct_use(index: int, names: list[str]) -> None:
    if names and index == 0:
        warnings.warn(
            f"loss_fn uses parameters of the model directly ({', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}). The splitting index covers what reaches the "
            "loss through the model's outputs; penalties on the parameters are left out of it.",
            stacklevel=2,
        )


def _evidence(
    unit: Unit,
    calls: list[tuple[_Record, dict[Edge, Tensor | None]]],
    samples: int,
    batch: int,
) -> list[Evidence]:
    piece = 0 if len(calls) == 1 else None
    return [
        Evidence(
            inputs={n: record.kept[n] for n in unit.subgraph.inputs if n in record.kept},
            gradients=tuple(gradients.get(edge) for edge in unit.subgraph.edges),
            samples=samples,
            groups=(Group(batch, piece, samples, 0 if call else samples),),
        )
        for call, (record, gradients) in enumerate(calls)
    ]
