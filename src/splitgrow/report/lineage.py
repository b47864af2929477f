"""Figure 3: the evolution tree of the neurons of a unit.

A *founder* is a neuron without a parent. A founder and all that came from it are a *family*, drawn
as a tree: one row for each neuron that is alive at the end, parents in the middle of their
children. Founders that never split are many and all alike, so they are only counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitgrow.report.history import Neuron, Run, SplitNeuron
from splitgrow.show import count

LISTED = 40  # ids of quiet neurons that a tooltip names

Events = Mapping[tuple[str, int], SplitNeuron]
Children = Mapping[int, Sequence[Neuron]]


@dataclass(frozen=True)
class Node:
    """A neuron in its family; ``row`` counts from the top of the family."""

    id: int
    parent: int | None
    born: int
    ended: int | None
    row: float
    children: tuple[int, ...]
    lambda_: float | None
    step: float | None
    predicted: float | None


@dataclass(frozen=True)
class Family:
    """A founder that split, and its descendants, parents before children."""

    founder: int
    rows: int
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Quiet:
    """Founders of one phase that never split."""

    born: int
    count: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class UnitTree:
    """Figure 3, for one unit of one run."""

    unit: str
    finding: str
    phases: int
    families: tuple[Family, ...]
    quiet: tuple[Quiet, ...]


def unit_trees(run: Run) -> tuple[UnitTree, ...]:
    """The trees of all units of a run, in the order of the model."""
    events = {
        (neuron.unit, neuron.parent): neuron
        for _, split in run.splits
        for neuron in split.neurons
        if neuron.parent is not None
    }
    phases = 1 + max(
        [phase.number for phase in run.phases]
        + [neuron.born for neurons in run.neurons.values() for neuron in neurons]
    )
    return tuple(unit_tree(u, neurons, events, phases) for u, neurons in run.neurons.items())


def unit_tree(unit: str, neurons: Sequence[Neuron], events: Events, phases: int) -> UnitTree:
    """The tree of one unit, the largest families first."""
    known = {neuron.id for neuron in neurons}
    children: defaultdict[int, list[Neuron]] = defaultdict(list)
    for neuron in neurons:
        if neuron.parent is not None and neuron.parent in known:
            children[neuron.parent].append(neuron)
    founders = [neuron for neuron in neurons if neuron.parent not in known]
    families = [family(unit, f, children, events) for f in founders if children[f.id]]
    return UnitTree(
        unit=unit,
        finding=_finding(unit, neurons, founders),
        phases=phases,
        families=tuple(sorted(families, key=lambda f: (-f.rows, f.founder))),
        quiet=quiet(f for f in founders if not children[f.id]),
    )


def family(unit: str, founder: Neuron, children: Children, events: Events) -> Family:
    """A founder and its descendants, each with its row."""
    order = _parents_first(founder, children)
    rows = _rows(order, children)
    nodes = tuple(
        _node(neuron, rows[neuron.id], children.get(neuron.id, ()), events.get((unit, neuron.id)))
        for neuron in order
    )
    return Family(founder.id, sum(not node.children for node in nodes), nodes)


def quiet(founders: Iterable[Neuron]) -> tuple[Quiet, ...]:
    """Founders that never split, counted by the phase they were born in."""
    born = defaultdict(list)
    for neuron in founders:
        born[neuron.born].append(neuron.id)
    return tuple(Quiet(b, len(ids), tuple(ids[:LISTED])) for b, ids in sorted(born.items()))


def _parents_first(founder: Neuron, children: Children) -> list[Neuron]:
    """Depth first, without recursion: a family may be hundreds of phases deep."""
    order, waiting = [], [founder]
    while waiting:
        neuron = waiting.pop()
        order.append(neuron)
        waiting.extend(reversed(children.get(neuron.id, ())))
    return order


def _rows(order: Sequence[Neuron], children: Children) -> dict[int, float]:
    """0, 1, 2, ... for neurons without children, and the middle of the children for the others."""
    leaves = [neuron.id for neuron in order if not children.get(neuron.id)]
    rows = {identity: float(row) for row, identity in enumerate(leaves)}
    for neuron in reversed(order):
        if neuron.id not in rows:
            below = [rows[child.id] for child in children[neuron.id]]
            rows[neuron.id] = (min(below) + max(below)) / 2
    return rows


def _node(
    neuron: Neuron, row: float, children: Sequence[Neuron], event: SplitNeuron | None
) -> Node:
    return Node(
        id=neuron.id,
        parent=neuron.parent,
        born=neuron.born,
        ended=neuron.ended,
        row=row,
        children=tuple(child.id for child in children),
        lambda_=event.lambda_ if event else None,
        step=event.step if event else None,
        predicted=event.predicted if event else None,
    )


def _finding(unit: str, neurons: Sequence[Neuron], founders: Sequence[Neuron]) -> str:
    seed = sum(founder.born == 0 for founder in founders)
    added = len(founders) - seed
    alive = sum(neuron.ended is None for neuron in neurons)
    if alive == seed and len(neurons) == seed:
        return f"Layer {unit}: {count(seed, 'neuron')}, none split yet"
    new = f", {added:,} of them added anew" if added else ""
    return f"Layer {unit}: {count(seed, 'neuron')} became {alive:,}{new}"
