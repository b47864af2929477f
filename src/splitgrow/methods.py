"""Ways to grow a net by some neurons, behind one interface, so that they compare on equal terms.

A method ranks the neurons it would grow and carries the growth out. How many neurons and at what
cost is not its business: the same policy and the same budget choose among the ranked ones.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitgrow.directions import Directions
from splitgrow.distributed import team_of
from splitgrow.errors import InputError, SplitRefused
from splitgrow.plan import Entry, SplitPlan
from splitgrow.policy import Policy
from splitgrow.score import score
from splitgrow.scores import Scores
from splitgrow.select import Candidate, Limits, _check_scores, candidates, choose
from splitgrow.split import Receipt, Relative, is_relative, rehearse, split
from splitgrow.tap import LossFn
from splitgrow.units import Units, named_tensors

# Where no step lowers the loss, a baseline takes this one, relative to the neurons' mean length.
SMALL_STEP = 1e-3
# Neurons that are tried one by one when a plan as a whole lowers nothing, and with which steps.
MOST_REHEARSED = 64
REHEARSED = (3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Site:
    """The net to grow, the data to judge it by, and the limits to keep."""

    model: nn.Module
    units: Units
    loss_fn: LossFn
    batches: Iterable[Any]
    policy: Policy
    limits: Limits
    optimizer: Optimizer | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    start: Directions | None = None  # of the same neurons, from the phase before


@dataclass(frozen=True)
class Survey:
    """What a method would grow.

    Attributes:
        candidates: by unit, the neurons that may grow, the best first.
        directions: of all neurons, where they were scored.
    """

    candidates: dict[str, list[Candidate]]
    directions: Directions | None = None


@dataclass(frozen=True)
class Grown:
    """A neuron that was divided into ``neuron`` and ``twin``, or a new one, ``twin`` alone."""

    unit: str
    neuron: int | None
    twin: int
    lambda_: float | None = None
    step: float | None = None
    predicted: float | None = None  # the change of the loss that theory expects of it


@dataclass(frozen=True)
class Growth:
    """What a method did; see :class:`splitgrow.history.Split`.

    ``directions`` are those of the grown net's neurons, where they were scored.
    """

    neurons: tuple[Grown, ...]
    measured: float | None
    loss: float | None
    parity: float
    step: float | None = None
    relative: bool = True
    predicted: float | None = None
    score_seconds: float = 0.0
    split_seconds: float = 0.0
    directions: Directions | None = None


@dataclass(frozen=True)
class Nothing:
    """Why nothing was grown.

    ``"stable"``, ``"params"`` or ``"macs"``, ``"policy"`` or ``"refused"``; see
    :class:`splitgrow.History`.
    """

    reason: str
    score_seconds: float = 0.0


class Method(ABC):
    """One way to grow."""

    @abstractmethod
    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        """By unit, the neurons that may grow, the best first."""

    @abstractmethod
    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Grow the neurons of a plan in place, or raise and leave everything as it was."""

    def survey(self, site: Site) -> Survey:
        """What to choose from; a method that scores neurons tells their directions too."""
        return Survey(self.rank(site))

    def grow(self, site: Site) -> Growth | Nothing:
        """Grow the best neurons that the limits allow."""
        start = time.perf_counter()
        found = self.survey(site)
        plan = _choose(site, found.candidates, site.limits)
        scored = time.perf_counter()
        if not len(plan):
            return Nothing(_why_nothing(site, found.candidates), scored - start)
        try:
            growth = self.carry_out(site, plan)
        except SplitRefused:
            return Nothing("refused", scored - start)
        with team_of(site.batches).guard("directions"):
            directions = _carried(found.directions, site.units, growth)
        done = time.perf_counter()
        return replace(
            growth, score_seconds=scored - start, split_seconds=done - scored,
            directions=directions,
        )  # fmt: skip


def _carried(directions: Directions | None, units: Units, growth: Growth) -> Directions | None:
    """Those of the grown net, where they are known of all its neurons."""
    if directions is None or directions.misfit(units):
        return None
    if any(grown.neuron is None for grown in growth.neurons):
        return None
    chosen: dict[str, list[int]] = {}
    for unit, neuron in sorted((g.unit, g.neuron) for g in growth.neurons if g.neuron is not None):
        chosen.setdefault(unit, []).append(neuron)
    return directions.grown(units, chosen)


def _choose(site: Site, ranked: Mapping[str, list[Candidate]], limits: Limits) -> SplitPlan:
    listed = {name: list(found) for name, found in ranked.items()}  # which choose() uses up
    return choose(site.units, listed, limits, site.policy.caps)


def _why_nothing(site: Site, ranked: Mapping[str, list[Candidate]]) -> str:
    """What keeps every neuron from growing: there is none, the policy, or a budget."""
    if not any(ranked.values()):
        return "stable"
    if not len(_choose(site, ranked, replace(site.limits, params=None, macs=None))):
        return "policy"
    return "macs" if len(_choose(site, ranked, replace(site.limits, macs=None))) else "params"


class _Scoring(Method):
    """Scores neurons, from the directions of the phase before."""

    @abstractmethod
    def order(self, site: Site, scores: Scores) -> dict[str, list[Candidate]]:
        """By unit, the neurons that may grow, the best first."""

    def survey(self, site: Site) -> Survey:
        """What was found in scoring; without directions where a subclass ranks by itself."""
        if type(self).rank is not _Scoring.rank:
            return super().survey(site)
        scores = _scores(site)
        return Survey(self.order(site, scores), scores.directions)

    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        """By their scores."""
        return self.order(site, _scores(site))


class Splitting(_Scoring):
    """The neurons with the most negative splitting index, along their splitting gradients."""

    def order(self, site: Site, scores: Scores) -> dict[str, list[Candidate]]:
        """By splitting index, as the policy compares them."""
        return candidates(scores, site.policy.threshold, site.policy.rank)

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Split with the step that lowers the loss most.

        Where no step does, neurons that do not help on their own are left out: of an activation
        with kinks the index is an estimate, and on few data a poor one.
        """
        try:
            return self._split(site, plan)
        except SplitRefused:
            if site.policy.step is not None or site.policy.round_to > 1 or len(plan) == 1:
                raise
        helpful = _helpful(site, plan)
        for entries in (helpful, helpful[:1]):
            try:
                return self._split(site, SplitPlan(entries, plan.units))
            except SplitRefused:
                continue
        raise SplitRefused("no neuron of the plan lowers the loss on its own. Nothing was changed.")

    def _split(self, site: Site, plan: SplitPlan) -> Growth:
        if not len(plan):
            raise SplitRefused("no neuron of the plan lowers the loss. Nothing was changed.")
        receipt = _split_at(site, plan, site.policy.step)
        return _from_receipt(receipt, relative=is_relative(site.policy.step), known=True)


def _helpful(site: Site, plan: SplitPlan) -> list[Entry]:
    """The neurons of a plan that lower the loss when split alone, the best first."""

    def change(entry: Entry) -> float:
        alone = SplitPlan([entry], plan.units)
        return min(rehearse(site.model, alone, REHEARSED, site.loss_fn, site.batches))

    found = [(change(entry), i, entry) for i, entry in enumerate(plan[:MOST_REHEARSED])]
    return [entry for lowered, _, entry in sorted(found, key=lambda t: t[:2]) if lowered < 0]


class RandomNeuron(_Scoring):
    """Any neurons, each along its own splitting gradient."""

    def order(self, site: Site, scores: Scores) -> dict[str, list[Candidate]]:
        """At random."""
        entries = [
            Entry(name, k, float(found.values[k]), found.vectors[k].cpu(), float(found.scales[k]))
            for name, found in scores.items()
            for k in range(len(found.values))
        ]
        return shuffled(entries, site.generator)

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Split with the best step; with a small one where none lowers the loss."""
        return _split_anyway(site, plan, known=True)


class RandomSplit(Method):
    """Any neurons, each along any direction."""

    def rank(self, site: Site) -> dict[str, list[Candidate]]:
        """At random."""
        return shuffled(random_entries(site), site.generator)

    def carry_out(self, site: Site, plan: SplitPlan) -> Growth:
        """Split with the best step; with a small one where none lowers the loss."""
        return _split_anyway(site, plan, known=False)


def _scores(site: Site) -> Scores:
    neurons = sum(unit.width for unit in site.units)
    found = score(
        site.model, site.loss_fn, site.batches, units=site.units, steps=site.policy.lanczos,
        settle=site.policy.settled(neurons), stand_in=site.policy.stand_in, start=site.start,
    )  # fmt: skip
    _check_scores(found)
    return found


def random_entries(site: Site) -> list[Entry]:
    """Every neuron with a random direction; its index is not known, and stands at 0."""
    tensors = named_tensors(site.model)
    entries: list[Entry] = []
    for unit in site.units:
        scales = unit.vectors(tensors).detach().norm(dim=1).tolist()
        drawn = torch.randn(unit.width, unit.size, generator=site.generator)
        directions = drawn / drawn.norm(dim=1, keepdim=True)
        entries += [Entry(unit.name, k, 0.0, directions[k], s) for k, s in enumerate(scales)]
    return entries


def shuffled(entries: list[Entry], generator: torch.Generator) -> dict[str, list[Candidate]]:
    """Entries in random order, as candidates by unit."""
    gains: Tensor = torch.rand(len(entries), generator=generator, dtype=torch.float64)
    ranked: dict[str, list[Candidate]] = {entry.unit: [] for entry in entries}
    for gain, entry in sorted(zip(gains.tolist(), entries, strict=True), key=lambda pair: -pair[0]):
        ranked[entry.unit].append(Candidate(gain, entry))
    return ranked


def _split_at(site: Site, plan: SplitPlan, step: float | Relative | None) -> Receipt:
    return split(
        site.model, plan, step=step, columns=site.policy.columns, optimizer=site.optimizer,
        loss_fn=site.loss_fn, batches=site.batches,
    )  # fmt: skip


def _split_anyway(site: Site, plan: SplitPlan, *, known: bool) -> Growth:
    """A baseline grows in any case: where the search refuses, by a small fixed step."""
    step = site.policy.step
    try:
        receipt = _split_at(site, plan, step)
    except SplitRefused:
        step = SMALL_STEP * (sum(entry.scale for entry in plan) / len(plan) or 1.0)
        receipt = _split_at(site, plan, step)
    return _from_receipt(receipt, relative=is_relative(step), known=known)


def _from_receipt(receipt: Receipt, *, relative: bool, known: bool) -> Growth:
    """``known``: are the indexes in the plan those of the directions?"""
    neurons = tuple(
        Grown(o.unit, o.neuron, o.twin, o.lambda_ if known else None, o.step,
              o.predicted if known else None)
        for o in receipt.offspring
    )  # fmt: skip
    return Growth(
        neurons, receipt.measured, receipt.loss, receipt.parity,
        step=receipt.step, relative=relative, predicted=receipt.predicted if known else None,
    )  # fmt: skip


def method_named(name: str) -> Method:
    """A method by its name, one of ``METHODS``."""
    from splitgrow.additions import Boosting, Net2Net, NewNeuron

    made: dict[str, type[Method]] = dict(
        zip(METHODS, (Splitting, RandomSplit, RandomNeuron, NewNeuron, Net2Net, Boosting),
            strict=True)
    )  # fmt: skip
    if name not in made:
        raise InputError(f"method: expected one of {', '.join(METHODS)}, got {name!r}.")
    return made[name]()


METHODS = ("splitting", "random", "random-neuron", "new", "net2net", "boosting")
