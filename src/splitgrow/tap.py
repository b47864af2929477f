"""One forward and backward pass that collects h and g of many units.

h: what enters a unit's sub-graph. g: the derivative of the loss by each consumer edge. An edge is
tapped by handing the consumer an alias of its input: the derivative by the alias is that of this
edge alone, even where the tensor (a residual stream) flows on past its consumer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitgrow.capture import Call, Graph
from splitgrow.errors import InputError, LossError
from splitgrow.execute import run_node
from splitgrow.state import eval_mode, seeded
from splitgrow.units import Unit, Units, named_tensors

LossFn = Callable[[Any, Any], Tensor]
Edge = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class Evidence:
    """What one batch says about one unit: constants of its sub-graph and g at its edges."""

    inputs: dict[fx.Node, Any]
    gradients: tuple[Tensor | None, ...]  # one per edge; None where the loss does not see it
    samples: int

    @property
    def bytes(self) -> int:
        """Memory held by the activations and gradients."""
        held = [*self.inputs.values(), *self.gradients]
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))


@dataclass
class _Record:
    """One call of the model: values to keep, and the tapped aliases."""

    kept: dict[fx.Node, Any]
    taps: dict[Edge, Tensor]
    samples: int


class TappedModel:
    """Behaves like the model it stands for; running it records what scoring needs.

    Attributes of the model are passed through, so that a loss function may read them.
    """

    def __init__(self, model: nn.Module, graph: Graph, units: Sequence[Unit]) -> None:
        self._model = model
        self._graph = graph
        self._edges = {edge for unit in units for edge in unit.subgraph.edges}
        self._keep = {node for unit in units for node in unit.subgraph.inputs}
        self._last_use = _last_uses(graph)
        self.records: list[_Record] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(args, kwargs).bound_to(self._model)
        env = placeholder_values(self._model, self._graph, call)
        record = _Record({}, {}, call.samples)
        for node in self._graph.nodes:
            value = _run_captured(node, lambda n, at=node: self._read(env, record, at, n))
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


def passes(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches once more, in the same order as every other time; never none of them."""
    check_batches(batches)
    empty = True
    with seeded():
        for batch in batches:
            empty = False
            yield batch
    if empty:
        raise InputError("batches: there are none. Give at least one batch to score on.")


def check_batches(batches: Iterable[Any]) -> None:
    """A list or a loader, not something that can be read only once."""
    if not isinstance(batches, Iterable):
        raise InputError(
            f"batches: expected a list of batches or a DataLoader, got {type(batches).__name__}."
        )
    if isinstance(batches, Iterator):
        raise InputError(
            "batches: a generator can be read only once, and every split reads the batches "
            "several times. Give a list, batches=list(batches), or a DataLoader."
        )
    if isinstance(batches, Tensor):
        raise InputError("batches: got a single tensor. Give a list of batches: [tensor].")


def collect(
    model: nn.Module, units: Units, wanted: Sequence[Unit], loss_fn: LossFn, batches: Iterable[Any]
) -> Iterator[tuple[float, int, dict[str, list[Evidence]]]]:
    """For each batch: its loss, its number of samples, and the evidence of each wanted unit."""
    with eval_mode(model):
        for index, batch in enumerate(passes(batches)):
            tapped = TappedModel(model, units.graph, wanted)
            with torch.enable_grad():
                loss = check_loss(loss_fn(tapped, batch), index)
                if not tapped.records:
                    raise LossError(
                        "loss_fn did not call the model it was given. It must compute the loss "
                        "with its first argument: loss_fn(model, batch) -> scalar tensor."
                    )
                gradients = _backward(model, loss, tapped.records, index)
            yield (
                loss.item(),
                tapped.records[0].samples,
                {unit.name: _evidence(unit, tapped.records, gradients) for unit in wanted},
            )


def check_loss(loss: Any, index: int) -> Tensor:
    """The loss of batch ``index`` as a finite scalar tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LossError(
            f"loss_fn must return the mean loss of a batch as a scalar tensor, got {got}. "
            "Average it: loss.mean()."
        )
    if not torch.isfinite(loss):
        raise LossError(
            f"the loss of batch {index} is {loss.item()}. Scores of such a model mean nothing: "
            "look for a division by zero or a learning rate that is too high, and train on."
        )
    return loss


def _backward(
    model: nn.Module, loss: Tensor, records: list[_Record], index: int
) -> list[dict[Edge, Tensor | None]]:
    taps = [tap for record in records for tap in record.taps.values()]
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on the model's outputs (is it detached, or computed under "
            "no_grad?). Return a differentiable loss."
        )
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [*taps, *own.values()], allow_unused=True)
    _warn_of_direct_use(index, [n for n, g in zip(own, found[len(taps) :], strict=True)
                                if g is not None])  # fmt: skip
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
    unit: Unit, records: list[_Record], gradients: list[dict[Edge, Tensor | None]]
) -> list[Evidence]:
    return [
        Evidence(
            inputs={n: record.kept[n] for n in unit.subgraph.inputs if n in record.kept},
            gradients=tuple(found.get(edge) for edge in unit.subgraph.edges),
            samples=records[0].samples,
        )
        for record, found in zip(records, gradients, strict=True)
    ]
