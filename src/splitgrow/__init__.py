"""splitgrow: grow neural networks by splitting neurons.

Splitting steepest descent (Liu, Wu, Wang, NeurIPS 2019) for any PyTorch model::

    units = splitgrow.find_units(model, example_inputs)
    scores = splitgrow.score(model, loss_fn, batches, units=units)
    plan = splitgrow.select(scores, fraction=0.3)
    receipt = splitgrow.split(model, plan, optimizer=optimizer, loss_fn=loss_fn, batches=batches)

and all of it in turn, until a budget is spent::

    result = splitgrow.grow(model, train=train, loss_fn=loss_fn, batches=batches)
"""

from splitgrow.additions import NewNeuron
from splitgrow.attributes import sizes_of
from splitgrow.checkpoint import load, read_metadata, save
from splitgrow.cost import Cost, CostModel
from splitgrow.curvature import Softplus
from splitgrow.directions import Directions
from splitgrow.distributed import Shard
from splitgrow.errors import (
    CaptureError,
    CheckpointError,
    ExportError,
    InputError,
    Interrupted,
    LossError,
    OptimizerError,
    PlanError,
    RankError,
    SplitgrowError,
    SplitRefused,
)
from splitgrow.experiment import Experiment
from splitgrow.fit import Fit, Trainer, fit
from splitgrow.fit_optimizer import Cosine, Step
from splitgrow.grow import Result, grow
from splitgrow.history import Event, History, Neuron, PhaseRecord, Split
from splitgrow.live import Live
from splitgrow.methods import Method
from splitgrow.optimizer import state_of
from splitgrow.patience import Patience
from splitgrow.phase import Phase
from splitgrow.plan import Entry, SplitPlan
from splitgrow.policy import Budget, Policy
from splitgrow.rules import RULES, Op, Rule, Trait, rule
from splitgrow.score import score
from splitgrow.scores import Scores, UnitScores
from splitgrow.select import select
from splitgrow.settle import Settle
from splitgrow.sharded import gather, scatter
from splitgrow.split import Offspring, Receipt, Relative, split
from splitgrow.units import Skipped, Slot, Unit, Units, find_units
from splitgrow.watch import TensorBoard, Watcher
from splitgrow.wrapped import rewrap

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Budget",
    "CaptureError",
    "CheckpointError",
    "Cosine",
    "Cost",
    "CostModel",
    "Directions",
    "Entry",
    "Event",
    "Experiment",
    "ExportError",
    "Fit",
    "History",
    "InputError",
    "Interrupted",
    "Live",
    "LossError",
    "Method",
    "Neuron",
    "NewNeuron",
    "Offspring",
    "Op",
    "OptimizerError",
    "Patience",
    "Phase",
    "PhaseRecord",
    "PlanError",
    "Policy",
    "RankError",
    "Receipt",
    "Relative",
    "Result",
    "Rule",
    "Scores",
    "Settle",
    "Shard",
    "Skipped",
    "Slot",
    "Softplus",
    "Split",
    "SplitPlan",
    "SplitRefused",
    "SplitgrowError",
    "Step",
    "TensorBoard",
    "Trainer",
    "Trait",
    "Unit",
    "UnitScores",
    "Units",
    "Watcher",
    "find_units",
    "fit",
    "gather",
    "grow",
    "load",
    "read_metadata",
    "rewrap",
    "rule",
    "save",
    "scatter",
    "score",
    "select",
    "sizes_of",
    "split",
    "state_of",
]
