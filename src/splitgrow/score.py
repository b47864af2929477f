"""Score: the splitting index and splitting gradient of every neuron (step 2 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitgrow import stream
from splitgrow.curvature import Softplus
from splitgrow.directions import Directions
from splitgrow.distributed import team_of
from splitgrow.errors import InputError
from splitgrow.keep import keep
from splitgrow.products import Setup
from splitgrow.scores import Scores, UnitScores
from splitgrow.settle import Settle, settled
from splitgrow.solve import Effort, Solving
from splitgrow.state import Undo
from splitgrow.tap import LossFn, Source
from splitgrow.team import APART, Team, digest
from splitgrow.units import Unit, Units, find_units, named_tensors
from splitgrow.view import check_batches, check_loss_fn, first_call
from splitgrow.wrapped import bare


def score(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    *,
    units: Units | None = None,
    steps: int | None = None,
    stand_in: Softplus | None = Softplus(),  # noqa: B008  (frozen)
    memory: int | None = None,
    settle: Settle | None = None,
    start: Scores | Directions | None = None,
) -> Scores:
    """Compute lambda_min and v_min of every neuron.

    S of a neuron is the mean over the samples of the batches. The model is run in eval mode and
    with a fixed random state, so two calls give the same answer.

    Args:
        model: the model that ``units`` were found in; left as it was.
        loss_fn: ``loss_fn(model, batch)`` gives the mean loss of a batch. It is called with a
            stand-in that behaves like the model.
        batches: a list or a loader; it may be read several times. On several processes, this
            one's part of the data: ``splitgrow.Shard(batches)``.
        units: what ``find_units`` returned. Left out, they are found from the first batch.
        steps: Lanczos steps for every unit with more parameters per neuron than that. By default
            units are solved exactly where that is cheap, and with 8 steps elsewhere: close to
            exact for the neurons worth splitting.
        stand_in: curvature for ReLU and other activations with kinks; ``None`` for none at all.
        memory: bytes of activations that may be kept while a unit is solved; by default as much
            as one batch needs, or 256 MiB. With less, the batches are run again more often; where
            that would cost more, all units are solved together with a pass over the batches for
            each Lanczos step, and nothing is kept at all.
        settle: score no more of the batches than the choice of neurons needs; ``Scores.samples``
            says how many that were.
        start: scores of the same neurons on other samples, or before they were trained on; across a
            split, ``scores.directions.after(plan)``. Lanczos begins with their vectors, and takes 4
            steps where it would take 8.
    """
    team = team_of(batches)
    with team.guard("score"):
        _check(model, loss_fn, units, steps, settle, start)
        model = bare(model)
        check_batches(batches)
        if units is None:
            call = first_call(model, loss_fn, batches)
            units = find_units(model, call.args or call.bound_to(model).kwargs)
        units.check(model)
        known = start.directions if isinstance(start, Scores) else start
        if known is not None:
            known.check(units)
        with (
            torch.inference_mode(False),
            _one_model(model, units, known, (steps, stand_in, settle), team),
        ):
            setup = Setup(units.analysis, _constants(model, units), stand_in, team)

            def score_on(some: Iterable[Any], start: Directions | None) -> Scores:
                source, effort = Source(model, units, loss_fn, some), Effort(steps, start)
                return _score_all(source, setup, effort, memory)

            if settle is None:
                return score_on(batches, known)
            return settled(score_on, batches, settle, known)


def _constants(model: nn.Module, units: Units) -> dict[fx.Node, Tensor]:
    """The model's own tensors where the graph reads them."""
    tensors = named_tensors(model)
    return {node: tensors[name].detach() for node, name in units.graph.tensors.items()}


def _check(
    model: Any, loss_fn: Any, units: Any, steps: int | None, settle: Any, start: Any
) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    check_loss_fn(loss_fn)
    if units is not None and not isinstance(units, Units):
        raise InputError(f"units: expected what find_units() returned, got {type(units).__name__}.")
    if steps is not None and steps < 1:
        raise InputError(f"steps: expected at least 1, got {steps}.")
    if settle is not None and not isinstance(settle, Settle):
        raise InputError(
            f"settle: expected splitgrow.Settle(0.9, fraction=0.3) or the like, got {settle!r}."
        )
    if start is not None and not isinstance(start, Scores | Directions):
        raise InputError(f"start: expected what score() returned, got {type(start).__name__}.")


@contextmanager
def _one_model(
    model: nn.Module, units: Units, start: Directions | None, settings: object, team: Team
) -> Iterator[None]:
    """Inside, all ranks have the same model: rank 0's buffers, and parameters that are checked."""
    if team.size == 1:
        yield
        return
    with Undo() as undo:
        try:
            found = {unit.name: f"{unit.width} x {unit.size}" for unit in units}
            same_call = "Call it with the same units and settings on every rank."
            given = {"start": _digest(start), "settings": repr(settings)}
            team.same("score", found | given, same_call)
            team.share_buffers(model, undo)
            team.same_model("model", model, APART)
            yield
        finally:
            undo.rollback()


def _digest(start: Directions | None) -> str:
    """Tells what is started from apart."""
    if start is None:
        return "none"
    # Sorted: those that were read from a file come in any order.
    return " ".join(digest(tensor) for _, tensor in sorted(start.tensors.items()))


def _score_all(source: Source, setup: Setup, effort: Effort, memory: int | None) -> Scores:
    """Pass over the batches until every unit has been solved."""
    tensors = named_tensors(source.model)
    found: dict[str, UnitScores] = {}
    waiting: list[Unit] = list(source.units)
    loss, samples = 0.0, 0
    while True:
        kept = keep(
            source, waiting, memory, setup.team, too_many=partial(stream.pays, effort=effort)
        )
        if kept is None:
            thetas = {unit.name: unit.vectors(tensors).detach() for unit in waiting}
            streamed, loss, samples = stream.Stream(source, setup).scores(thetas, effort)
            found |= streamed
        else:
            loss, samples = kept.loss, kept.samples
            # From the last unit to the first: early layers have the largest images, and are solved
            # when the activations of the others are gone.
            solving = Solving(setup, samples, effort)
            for unit in reversed(waiting[: len(kept.evidence)]):
                theta = unit.vectors(tensors).detach()
                solving.take(unit, theta, kept.evidence.pop(unit.name))
            found |= {scores.unit.name: scores for scores in solving.scores()}
        waiting = [unit for unit in waiting if unit.name not in found]
        if not waiting:
            in_order = {unit.name: found[unit.name] for unit in source.units}
            return Scores(source.units, in_order, loss, samples)
