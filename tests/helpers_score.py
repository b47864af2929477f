"""What the tests of scores, theory and parity share: each case's units, evidence and matrices.

Nothing here is changed by a test: a model to split is a copy (`fresh`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

import oracle
import splitgrow as sg
from cases import (
    LOSSES,
    MLP,
    RBF,
    RESNET,
    TRANSFORMER_FUSED,
    UNET,
    VGG,
    Batch,
    Case,
    make_batch,
)
from oracle import UnitSpec
from splitgrow.eigen import dense
from splitgrow.matrix import SplittingMatrix
from splitgrow.tap import collect
from splitgrow.units import named_tensors

FLOAT32 = (MLP, VGG, RESNET, UNET, TRANSFORMER_FUSED, RBF)  # cases to try in float32 too


@cache
def model_of(case: Case) -> nn.Module:
    return case.build()


def fresh(case: Case) -> nn.Module:
    return copy.deepcopy(model_of(case))


@cache
def units_of(case: Case) -> sg.Units:
    return sg.find_units(model_of(case), case.inputs())


@cache
def float32_units_of(case: Case) -> sg.Units:
    inputs = tuple(x.float() for x in case.inputs())
    return sg.find_units(fresh(case).float(), inputs)


@cache
def batch_of(case: Case, loss: str) -> Batch:
    return make_batch(case, loss)


def parts_of(batch: Batch) -> list[Batch]:
    """One batch as two of unequal sizes."""
    return [tuple(t[:1] for t in batch), tuple(t[1:] for t in batch)]


class Counted(list[Batch]):
    """Batches that count how often they are read."""

    passes = 0

    def __iter__(self) -> Iterator[Batch]:
        self.passes += 1
        return super().__iter__()


@cache
def scores_of(case: Case, loss: str) -> sg.Scores:
    """Scored on the case's one batch, with the model's own curvature only."""
    batches = [batch_of(case, loss)]
    return sg.score(model_of(case), LOSSES[loss], batches, units=units_of(case), stand_in=None)


def only(units: sg.Units, name: str) -> sg.Units:
    """The same analysis with one unit left."""
    return sg.Units([units[name]], (), units.analysis)


# --- splitting matrices -------------------------------------------------------------------


@cache
def oracle_matrices(case: Case, loss: str, spec: UnitSpec) -> Tensor:  # (width, d, d)
    """S of every neuron from the definition."""
    return matrices_by_definition(case, LOSSES[loss], batch_of(case, loss), spec)


def matrices_by_definition(
    case: Case, loss_fn: oracle.LossFn, batch: object, spec: UnitSpec
) -> Tensor:
    found = [
        oracle.splitting_matrix(model_of(case), loss_fn, batch, spec, k) for k in range(spec.width)
    ]
    return torch.stack(found)


def operators(
    case: Case, loss: str, *, closed_form: bool = True
) -> Iterator[tuple[UnitSpec, sg.Unit, SplittingMatrix]]:
    """The library's S of every unit, as it is applied, on the case's one batch."""
    model, units = model_of(case), units_of(case)
    tensors = named_tensors(model)
    constants = {node: tensors[name].detach() for node, name in units.graph.tensors.items()}
    passes = collect(model, units, list(units), LOSSES[loss], [batch_of(case, loss)])
    ((_, _, evidence),) = list(passes)
    for spec in case.units:
        unit = units[spec.name]
        (only_call,) = evidence[unit.name]
        yield spec, unit, SplittingMatrix(unit, only_call, constants, None, closed_form=closed_form)


def as_dense(unit: sg.Unit, apply: SplittingMatrix) -> Tensor:  # (width, d, d)
    return dense(apply, unit.width, unit.size, torch.zeros(0, dtype=torch.float64))


def norms(S: Tensor) -> Tensor:  # (width,)
    """Spectral norm of each matrix."""
    return torch.linalg.matrix_norm(S, ord=2)


# --- plans --------------------------------------------------------------------------------


def entry(unit: sg.Unit, neuron: int, lambda_: float, direction: Tensor) -> sg.Entry:
    return sg.Entry(unit.name, neuron, lambda_, direction, 1.0)


def entries_of(found: sg.UnitScores, neurons: Sequence[int] | None = None) -> list[sg.Entry]:
    """Neurons of a unit with the splitting index and gradient that were scored."""
    chosen = range(found.unit.width) if neurons is None else neurons
    return [entry(found.unit, k, found.values[k].item(), found.vectors[k]) for k in chosen]


def unit_vector(size: int, generator: torch.Generator | None = None) -> Tensor:
    v = torch.randn(size, dtype=torch.float64, generator=generator)
    return v / v.norm()


def slope(steps: Sequence[float], errors: Sequence[float]) -> float:
    """Of the straight line through log error against log step, by least squares."""
    x = [math.log(s) for s in steps]
    y = [math.log(e) for e in errors]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    dots = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return dots / sum((a - mx) ** 2 for a in x)
