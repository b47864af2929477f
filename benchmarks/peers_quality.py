"""How good an answer is: against a converged reference, and by the loss after the split."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from peers_bench import Bench, loss_fn
from torch import Tensor

import splitgrow as sg
from splitgrow.errors import SplitRefused
from splitgrow.plan import Entry, SplitPlan
from splitgrow.units import named_tensors

SHARE = 0.3  # of the neurons is split
REFERENCE_STEPS = 64

Values = Mapping[str, Tensor]  # unit -> (width,)


@dataclass(frozen=True)
class Answer:
    """lambda and v of every neuron, by unit."""

    values: dict[str, Tensor]  # (width,)
    vectors: dict[str, Tensor]  # (width, size)

    @classmethod
    def of(cls, scores: sg.Scores) -> Answer:
        """The same from scores."""
        return cls(
            {name: found.values for name, found in scores.items()},
            {name: found.vectors for name, found in scores.items()},
        )


def reference(bench: Bench, dtype: torch.dtype, steps: int = REFERENCE_STEPS) -> Answer:
    """Ours with many Lanczos steps; exact for every unit with no more parameters than steps."""
    model = copy.deepcopy(bench.model).to(dtype)
    batches = [(images.to(dtype), labels) for images, labels in bench.batches]
    units = sg.find_units(model, batches[0][0][:2])  # a graph has a dtype
    return Answer.of(sg.score(model, loss_fn, batches, units=units, steps=steps))


def most_negative(values: Tensor, share: float = SHARE) -> set[int]:
    """The numbers of the most negative values; ties go to the lower number."""
    count = max(round(share * len(values)), 1)
    return set(values.double().cpu().sort(stable=True).indices[:count].tolist())


def overlap_by_unit(found: Values, truth: Values) -> float:
    """Mean over the units of the share of the most negative neurons that both name.

    Units in which nothing is worth splitting (no lambda below 0) are left out.
    """
    shares = []
    for name, values in truth.items():
        if bool((values < 0).any()):
            wanted = most_negative(values)
            shares.append(len(wanted & most_negative(found[name])) / len(wanted))
    return sum(shares) / len(shares)


def overlap_over_net(found: Values, truth: Values) -> float:
    """The same for the most negative neurons of all units together."""
    wanted = most_negative(_joined(truth, truth))
    return len(wanted & most_negative(_joined(found, truth))) / len(wanted)


def errors(found: Values, truth: Values) -> tuple[float, float]:
    """Median and largest relative error of lambda over the neurons worth splitting."""
    right, given = _joined(truth, truth), _joined(found, truth)
    worth = torch.tensor(sorted(k for k in most_negative(right) if right[k] < 0))
    relative = ((given - right).abs() / right.abs())[worth]
    return relative.median().item(), relative.max().item()


def _joined(values: Values, order: Values) -> Tensor:
    return torch.cat([values[name].double().cpu() for name in order])


@dataclass(frozen=True)
class Gain:
    """What splitting did to the loss on the scored images."""

    neurons: int
    change: float
    loss: float  # before


def gain(bench: Bench, answer: Answer) -> Gain:
    """Split the most negative neurons of the net, at the best step that `split` finds.

    Every method splits as many, whatever it thinks of their sign. A split that no step makes worth
    while is none.
    """
    plan = _plan(bench, answer)
    model = copy.deepcopy(bench.model)
    try:
        receipt = sg.split(model, plan, loss_fn=loss_fn, batches=bench.batches)
    except SplitRefused:
        return Gain(len(plan), 0.0, float("nan"))
    assert receipt.measured is not None
    assert receipt.loss is not None
    return Gain(len(plan), receipt.measured, receipt.loss)


def _plan(bench: Bench, answer: Answer) -> SplitPlan:
    order = {unit.name: answer.values[unit.name] for unit in bench.units}
    chosen = most_negative(_joined(order, order))
    tensors, entries, start = named_tensors(bench.model), [], 0
    for unit in bench.units:
        scales = unit.vectors(tensors).detach().norm(dim=1).tolist()
        values = answer.values[unit.name].tolist()
        vectors = answer.vectors[unit.name].detach()
        vectors = (vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-30)).cpu()
        entries += [
            Entry(unit.name, k, values[k], vectors[k], scales[k])
            for k in range(unit.width)
            if start + k in chosen
        ]
        start += unit.width
    return SplitPlan(entries, bench.units)
