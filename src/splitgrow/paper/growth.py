"""The growth between two phases: one neuron more, by the library's own methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from splitgrow.methods import Growth, Site, method_named
from splitgrow.plan import Entry, SplitPlan
from splitgrow.policy import Policy
from splitgrow.score import score
from splitgrow.scores import Scores
from splitgrow.select import Limits
from splitgrow.split import Receipt, split
from splitgrow.tap import LossFn
from splitgrow.units import Units, find_units

Batch = tuple[Tensor, Tensor]
_UNITS: dict[tuple[type[nn.Module], int], Units] = {}


@dataclass(frozen=True)
class Field:
    """What nets of one experiment are grown on: a loss and one batch with all the data.

    ``step`` is the epsilon of every split; without one, the step that lowers the loss most.
    """

    loss_fn: LossFn
    batch: Batch
    step: float | None = None

    def units(self, net: nn.Module) -> Units:
        """The units of a net, traced once for each width: nets of a class differ in nothing else.

        ``Units.check`` of the library refuses them for a net of any other shape.
        """
        key = type(net), len(next(net.parameters()))
        if key not in _UNITS:
            _UNITS[key] = find_units(net, (self.batch[0][:2],))
        return _UNITS[key]

    def grow(self, net: nn.Module, method: str, seed: int) -> bool:
        """One neuron more in place, by a method's name; False where there is none to split."""
        site = Site(
            net, self.units(net), self.loss_fn, [self.batch], Policy(count=1, step=self.step),
            Limits(1, None, None), generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        return isinstance(method_named(method).grow(site), Growth)

    def score(self, net: nn.Module) -> Scores:
        """Splitting index and direction of every neuron."""
        return score(net, self.loss_fn, [self.batch], units=self.units(net))

    def split(self, net: nn.Module, entry: Entry, step: float | None = None) -> Receipt:
        """Split one neuron in place; without a step, with the one that lowers the loss most."""
        plan = SplitPlan([entry], self.units(net))
        return split(net, plan, step=step, loss_fn=self.loss_fn, batches=[self.batch])


def entries_of(scores: Scores) -> Sequence[Entry]:
    """Every neuron of a net with one unit, as an entry of a plan, the lowest index first."""
    (found,) = scores.values()
    entries = [
        Entry(found.unit.name, k, float(value), found.vectors[k], float(found.scales[k]))
        for k, value in enumerate(found.values)
    ]
    return sorted(entries, key=lambda entry: entry.lambda_)
