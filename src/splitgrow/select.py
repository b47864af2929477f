"""Select: which neurons to split (step 3 of Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from splitgrow.cost import Cost, CostModel
from splitgrow.errors import InputError
from splitgrow.layout import Axis
from splitgrow.plan import Entry, SplitPlan
from splitgrow.score import Scores, UnitScores
from splitgrow.units import Unit

Rank = Literal["lambda", "gain"]
Per = Literal["neuron", "params", "macs"]


def select(
    scores: Scores,
    *,
    fraction: float | None = None,
    count: int | None = None,
    threshold: float = 0.0,
    rank: Rank = "lambda",
    per: Per | None = None,
    max_params: int | None = None,
    max_macs: int | None = None,
    min_per_unit: int = 0,
    max_per_unit: int | None = None,
    round_to: int = 1,
) -> SplitPlan:
    """Choose the neurons with the most negative splitting index.

    The paper's rule is ``count`` (m*) with ``threshold`` (lambda*). A neuron with lambda >= 0 is
    never taken. Ties are broken by the order of units and neurons.

    Args:
        scores: what ``score`` returned.
        fraction: split this fraction of all neurons, in (0, 1]; at least one.
        count: split this many at most.
        threshold: only neurons with lambda <= threshold; must be <= 0.
        rank: ``"lambda"`` as in the paper, or ``"gain"``: lambda * ||theta||^2, the gain of a
            step that is the same fraction of every neuron, whatever its scale.
        per: rank by gain per neuron, per added parameter or per added MAC; by default per the
            cost that is limited.
        max_params: add at most this many parameters.
        max_macs: add at most this many multiply-accumulates per sample.
        min_per_unit: take at least this many of each unit, where so many are negative.
        max_per_unit: take at most this many of each unit.
        round_to: let the width of every unit that grows end at a multiple of this.
    """
    _check(fraction, count, threshold, min_per_unit, max_per_unit, round_to)
    total = sum(len(found.values) for found in scores.values())
    if fraction is not None:
        count = max(round(fraction * total), 1)
    if per is None:
        per = "neuron" if max_params is None and max_macs is None else (
            "params" if max_params is not None else "macs")  # fmt: skip
    limits = Limits(count, max_params, max_macs)
    chooser = _Chooser(scores, limits, per, max_per_unit, round_to)
    candidates = {n: _candidates(n, found, threshold, rank) for n, found in scores.items()}
    for name, listed in candidates.items():
        chooser.take_at_least(scores[name].unit, listed, min_per_unit)
    chooser.take_best(candidates)
    return SplitPlan(chooser.entries, scores.units)


def _check(
    fraction: float | None, count: int | None, threshold: float,
    min_per_unit: int, max_per_unit: int | None, round_to: int,
) -> None:  # fmt: skip
    if fraction is not None and count is not None:
        raise InputError("give fraction= or count=, not both.")
    if fraction is not None and not 0 < fraction <= 1:
        raise InputError(f"fraction: expected a number in (0, 1], got {fraction}.")
    if count is not None and count < 1:
        raise InputError(f"count: expected at least 1, got {count}.")
    if not threshold <= 0:
        raise InputError(f"threshold: lambda* must be <= 0, got {threshold}.")
    if min_per_unit < 0 or (max_per_unit is not None and max_per_unit < max(min_per_unit, 0)):
        raise InputError(
            "min_per_unit and max_per_unit: expected 0 <= min <= max, got "
            f"{min_per_unit} and {max_per_unit}."
        )
    if round_to < 1:
        raise InputError(f"round_to: expected at least 1, got {round_to}.")


@dataclass(frozen=True)
class Limits:
    """What may not be exceeded, by all the splits of a plan together."""

    count: int | None
    params: int | None
    macs: int | None

    def allow(self, count: int, cost: Cost) -> bool:
        """Is a plan of this many neurons and this cost within the limits?"""
        pairs = ((self.count, count), (self.params, cost.params), (self.macs, cost.macs))
        return all(limit is None or spent <= limit for limit, spent in pairs)


@dataclass(frozen=True)
class _Candidate:
    gain: float
    entry: Entry


def _candidates(name: str, found: UnitScores, threshold: float, rank: Rank) -> list[_Candidate]:
    """The neurons of a unit that may be split, the best first."""
    values, scales = found.values.tolist(), found.scales.tolist()
    listed = []
    for k, (value, scale) in enumerate(zip(values, scales, strict=True)):
        if value < 0 and value <= threshold:
            gain = -value if rank == "lambda" else -value * scale**2
            entry = Entry(name, k, value, found.vectors[k].detach().cpu(), scale)
            listed.append(_Candidate(gain, entry))
    return sorted(listed, key=lambda c: (-c.gain, c.entry.neuron))


@dataclass
class _Chooser:
    """Takes packs of neurons while the limits allow it.

    A pack is one neuron, or as many as bring the unit's width to the next multiple.
    """

    scores: Scores
    limits: Limits
    per: Per
    max_per_unit: int | None
    round_to: int
    entries: list[Entry] = field(default_factory=list)
    widths: dict[Axis, int] = field(default_factory=dict)
    spent: Cost = Cost(0, 0)

    def __post_init__(self) -> None:
        self._costs = CostModel(self.scores.units)
        self._order_of = {name: i for i, name in enumerate(self.scores)}

    def take_at_least(self, unit: Unit, listed: list[_Candidate], minimum: int) -> None:
        """The best of one unit first, until it has its minimum."""
        while listed and self._taken(unit) < minimum:
            if not self._take(unit, listed):
                return

    def take_best(self, candidates: dict[str, list[_Candidate]]) -> None:
        """The best pack of all units, again and again, until nothing more fits."""
        open_units = [n for n, listed in candidates.items() if listed]
        while open_units:
            best = min(open_units, key=lambda n: self._order(n, candidates[n]))
            if not self._take(self.scores[best].unit, candidates[best]):
                open_units.remove(best)
            elif not candidates[best]:
                open_units.remove(best)

    def _order(self, name: str, listed: list[_Candidate]) -> tuple[float, float]:
        """Most gain per cost first; ties by the order of the units."""
        unit = self.scores[name].unit
        pack = listed[: self._pack_size(unit)]
        gain = sum(c.gain for c in pack) / len(pack)
        if self.per != "neuron":
            cost = self._costs.added(unit, self.widths, len(pack))
            gain = gain * len(pack) / max(getattr(cost, self.per), 1)
        return (-gain, self._order_of[name])

    def _take(self, unit: Unit, listed: list[_Candidate]) -> bool:
        size = self._pack_size(unit)
        pack = listed[:size]
        cost = self.spent + self._costs.added(unit, self.widths, size)
        full = self.max_per_unit is not None and self._taken(unit) + size > self.max_per_unit
        if len(pack) < size or full or not self.limits.allow(len(self.entries) + size, cost):
            return False
        del listed[:size]
        self.entries += [c.entry for c in pack]
        self.widths[unit.axis] = self._width(unit) + size
        self.spent = cost
        return True

    def _width(self, unit: Unit) -> int:
        return self.widths.get(unit.axis, unit.width)

    def _taken(self, unit: Unit) -> int:
        return self._width(unit) - unit.width

    def _pack_size(self, unit: Unit) -> int:
        return self.round_to - self._width(unit) % self.round_to
