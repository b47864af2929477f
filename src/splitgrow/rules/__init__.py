"""One small function per ATen operation: what it does to the index of a unit."""

from splitgrow.rules import (  # noqa: F401  (imported to register their rules)
    contraction,
    elementwise,
    normalization,
    pooling,
    reduction,
    shape,
)
from splitgrow.rules.registry import RULES, Op, Rule, Trait, find_rule, rule

__all__ = ["RULES", "Op", "Rule", "Trait", "find_rule", "rule"]
