"""One small function per ATen operation: what it does to the index of a unit."""

from splitgrow.rules import (  # noqa: F401  (imported to register their rules)
    contraction,
    distance,
    elementwise,
    normalization,
    pooling,
    reduction,
    refused,
    shape,
)
from splitgrow.rules.registry import RULES, Op, Result, Rule, Trait, find_rule, operands, rule

__all__ = ["RULES", "Op", "Result", "Rule", "Trait", "find_rule", "operands", "rule"]
