"""Select: which neurons to split (step 3 of Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from numbers import Real
from typing import Any, Literal, get_args

from splitgrow.cost import Cost, CostModel
from splitgrow.errors import InputError
from splitgrow.layout import Axis
from splitgrow.plan import Entry, SplitPlan
from splitgrow.scores import Rank, Scores, UnitScores
from splitgrow.units import Unit, Units

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
    max_growth: float | None = None,
    round_to: int = 1,
) -> SplitPlan:
    """Choose the neurons with the most negative splitting index.

    The paper's rule is ``count`` (m*) with ``threshold`` (lambda*). A neuron with lambda >= 0 is
    never taken. Ties are broken by the order of units and neurons. No limit is ever exceeded, so
    the plan may be smaller than asked for, or empty.

    Args:
        scores: what ``score`` returned.
        fraction: split this fraction of all neurons, in (0, 1], rounded; at least one.
        count: split this many at most.
        threshold: only neurons with lambda <= threshold; must be <= 0.
        rank: ``"lambda"`` as in the paper, or ``"gain"``: lambda * ||theta||^2, the gain of a
            step that is the same fraction of every neuron, whatever its scale.
        per: rank by gain per neuron, per added parameter or per added MAC. By default per the
            cost that is limited; where both are, per the share of the two budgets.
        max_params: add at most this many parameters.
        max_macs: add at most this many multiply-accumulates per sample.
        min_per_unit: take at least this many of each unit, where so many are negative and the
            limits allow it, before any others.
        max_per_unit: take at most this many of each unit.
        max_growth: take at most this fraction of each unit's neurons, in (0, 1], rounded; at
            least one. Costs need it: a channel next to a narrow layer is cheap, so that the
            cheapest unit would grow alone, and stay the cheapest.
        round_to: let the width of every unit that grows end at a multiple of this.
    """
    caps = Caps(per, min_per_unit, max_per_unit, round_to, max_growth)
    check_selection(rank, per, fraction, count, threshold, caps)
    _check_whole("max_params", max_params, 0)
    _check_whole("max_macs", max_macs, 0)
    _check_scores(scores)
    if fraction is not None:
        count = part_of(scores.neurons, fraction)
    limits = Limits(count, max_params, max_macs)
    return choose(scores.units, candidates(scores, threshold, rank), limits, caps)


def part_of(neurons: int, fraction: float) -> int:
    """A fraction of so many neurons, rounded; at least one."""
    return max(round(fraction * neurons), 1)


def check_selection(
    rank: str,
    per: str | None,
    fraction: float | None,
    count: int | None,
    threshold: float,
    caps: Caps,
) -> None:
    """Refuse settings of a selection that make no sense, each by its name."""
    _check_choices(rank, per)
    _check_amounts(fraction, count, threshold)
    _check_per_unit(caps.min_per_unit, caps.max_per_unit, caps.round_to)
    _check_fraction("max_growth", caps.max_growth)


def _check_choices(rank: str, per: str | None) -> None:
    for name, value, known in (
        ("rank", rank, get_args(Rank)),
        ("per", per, (None, *get_args(Per))),
    ):
        if value not in known:
            raise InputError(f"{name}: expected one of {known}, got {value!r}.")


def _check_amounts(fraction: float | None, count: int | None, threshold: float) -> None:
    if fraction is not None and count is not None:
        raise InputError("give fraction= or count=, not both.")
    _check_fraction("fraction", fraction)
    _check_whole("count", count, 1)
    if not (is_number(threshold) and threshold <= 0):
        raise InputError(f"threshold: lambda* must be <= 0, got {threshold!r}.")


def _check_fraction(name: str, value: Any) -> None:
    if value is not None and not (is_number(value) and 0 < value <= 1):
        raise InputError(f"{name}: expected a number in (0, 1], got {value!r}.")


def is_number(value: Any) -> bool:
    """A real number, and no truth value?"""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if not is_number(value) or value < least or value != value // 1:
        raise InputError(f"{name}: expected a whole number of at least {least}, got {value!r}.")


def _check_per_unit(minimum: int, maximum: int | None, round_to: int) -> None:
    _check_whole("min_per_unit", minimum, 0)
    _check_whole("max_per_unit", maximum, 0)
    _check_whole("round_to", round_to, 1)
    if maximum is not None and maximum < minimum:
        raise InputError(
            f"min_per_unit and max_per_unit: expected 0 <= min <= max, got {minimum} and {maximum}."
        )


def _check_scores(scores: Scores) -> None:
    if not isinstance(scores, Scores):
        raise InputError(f"scores: expected what score() returned, got {type(scores).__name__}.")
    for name, found in scores.items():
        for k, value in enumerate(found.values.tolist()):
            if not isfinite(value):
                raise InputError(
                    f"{name}, neuron {k}: its splitting index is {value}, so it cannot be ranked. "
                    "The loss or its derivatives overflow somewhere: score on other batches, in "
                    "float64, or leave the unit out with find_units(..., exclude=[...])."
                )


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

    def share(self, cost: Cost) -> float:
        """Which share of the budgets a cost takes, added up over the two."""
        pairs = ((self.params, cost.params), (self.macs, cost.macs))
        return sum(spent / max(limit, 1) for limit, spent in pairs if limit is not None)


@dataclass(frozen=True)
class Caps:
    """How gains are compared, and what each unit may take; see :func:`select`."""

    per: Per | None = None
    min_per_unit: int = 0
    max_per_unit: int | None = None
    round_to: int = 1
    max_growth: float | None = None

    def most(self, unit: Unit) -> float:
        """How many of a unit may be taken."""
        counts = [inf]
        if self.max_per_unit is not None:
            counts.append(self.max_per_unit)
        if self.max_growth is not None:
            counts.append(part_of(unit.width, self.max_growth))
        return min(counts)


@dataclass(frozen=True)
class Candidate:
    """A neuron that may be split, and what that is worth."""

    gain: float
    entry: Entry


def choose(
    units: Units, candidates: Mapping[str, list[Candidate]], limits: Limits, caps: Caps
) -> SplitPlan:
    """The best candidates that the limits allow; each unit lists its own, the best first."""
    chooser = _Chooser(units, limits, caps)
    chooser.take_best(candidates, until=caps.min_per_unit)
    chooser.take_best(candidates)
    return SplitPlan(chooser.entries, units)


def candidates(scores: Scores, threshold: float, rank: Rank) -> dict[str, list[Candidate]]:
    """By unit, the neurons that may be split, the best first."""
    return {name: _candidates(name, found, threshold, rank) for name, found in scores.items()}


def _candidates(name: str, found: UnitScores, threshold: float, rank: Rank) -> list[Candidate]:
    """The neurons of a unit that may be split, the best first."""
    rows = zip(
        found.values.tolist(), found.scales.tolist(), found.gains(rank).tolist(), strict=True
    )
    listed = []
    for k, (value, scale, gain) in enumerate(rows):
        if value < 0 and value <= threshold:
            entry = Entry(name, k, value, found.vectors[k].detach().cpu(), scale)
            listed.append(Candidate(gain, entry))
    return sorted(listed, key=lambda c: (-c.gain, c.entry.neuron))


@dataclass
class _Chooser:
    """Takes packs of neurons while the limits allow it.

    A pack is one neuron, or as many as bring the unit's width to the next multiple.
    """

    all_units: Units
    limits: Limits
    caps: Caps
    entries: list[Entry] = field(default_factory=list)
    widths: dict[Axis, int] = field(default_factory=dict)
    spent: Cost = field(default_factory=lambda: Cost(0, 0))

    def __post_init__(self) -> None:
        self._costs = CostModel(self.all_units)

    def take_best(
        self, candidates: Mapping[str, list[Candidate]], until: int | None = None
    ) -> None:
        """The best pack of all units, again and again, until nothing more fits.

        With ``until``, a unit that has as many is left alone. A pack that does not fit never will:
        what is spent only grows, and so does the cost of a neuron as its neighbours grow.
        """
        units = {n: self.all_units[n] for n, listed in candidates.items() if listed}
        while units:
            # min() keeps the first of equals: ties go to the unit that comes first.
            best = min(units, key=lambda n: -self._worth(units[n], candidates[n]))
            enough = until is not None and self._taken(units[best]) >= until
            if enough or not self._take(units[best], candidates[best]):
                del units[best]

    def _worth(self, unit: Unit, listed: list[Candidate]) -> float:
        """The gain of a unit's next pack per neuron, or per cost."""
        pack = listed[: self._pack_size(unit)]
        gain = sum(c.gain for c in pack)
        return gain / max(self._price(unit, len(pack)), 1e-30)

    def _price(self, unit: Unit, count: int) -> float:
        """What gains are divided by before they are compared."""
        limited = self.limits.params is not None or self.limits.macs is not None
        if self.caps.per == "neuron" or (self.caps.per is None and not limited):
            return count
        cost = self._costs.added(unit, self.widths, count)
        per = self.caps.per
        return self.limits.share(cost) if per is None else getattr(cost, per)

    def _take(self, unit: Unit, listed: list[Candidate]) -> bool:
        """Take the next pack of a unit, if there is one and the limits allow it."""
        size = self._pack_size(unit)
        if len(listed) < size:
            return False
        if self._taken(unit) + size > self.caps.most(unit):
            return False
        spent = self.spent + self._costs.added(unit, self.widths, size)
        if not self.limits.allow(len(self.entries) + size, spent):
            return False
        self.entries += [c.entry for c in listed[:size]]
        del listed[:size]
        self.widths[unit.axis] = self._width(unit) + size
        self.spent = spent
        return True

    def _width(self, unit: Unit) -> int:
        return self.widths.get(unit.axis, unit.width)

    def _taken(self, unit: Unit) -> int:
        return self._width(unit) - unit.width

    def _pack_size(self, unit: Unit) -> int:
        return self.caps.round_to - self._width(unit) % self.caps.round_to
