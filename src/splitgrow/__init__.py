"""splitgrow: grow neural networks by splitting neurons.

Splitting steepest descent (Liu, Wu, Wang, NeurIPS 2019) for any PyTorch model::

    units = splitgrow.find_units(model, example_inputs)
    scores = splitgrow.score(model, loss_fn, batches, units=units)
    plan = splitgrow.select(scores, fraction=0.3)
    receipt = splitgrow.split(model, plan, optimizer=optimizer, loss_fn=loss_fn, batches=batches)
"""

from splitgrow.attributes import sizes_of
from splitgrow.cost import Cost, CostModel
from splitgrow.curvature import Softplus
from splitgrow.errors import (
    CaptureError,
    InputError,
    LossError,
    OptimizerError,
    PlanError,
    SplitgrowError,
    SplitRefused,
)
from splitgrow.optimizer import state_of
from splitgrow.plan import Entry, SplitPlan
from splitgrow.rules import RULES, Op, Rule, Trait, rule
from splitgrow.score import Scores, UnitScores, score
from splitgrow.select import select
from splitgrow.split import Offspring, Receipt, split
from splitgrow.units import Skipped, Slot, Unit, Units, find_units

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "CaptureError",
    "Cost",
    "CostModel",
    "Entry",
    "InputError",
    "LossError",
    "Offspring",
    "Op",
    "OptimizerError",
    "PlanError",
    "Receipt",
    "Rule",
    "Scores",
    "Skipped",
    "Slot",
    "Softplus",
    "SplitPlan",
    "SplitRefused",
    "SplitgrowError",
    "Trait",
    "Unit",
    "UnitScores",
    "Units",
    "find_units",
    "rule",
    "score",
    "select",
    "sizes_of",
    "split",
    "state_of",
]
