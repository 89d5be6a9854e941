"""torch 1.2's dtype rules on today's torch."""

from __future__ import annotations

from .comparison import compare, compare_with
from .describe import describe_rules
from .torch12 import Rules, torch12_rules
from .violations import Torch12RuleError, Violation

__all__ = [
    "Rules",
    "Torch12RuleError",
    "Violation",
    "compare",
    "compare_with",
    "describe_rules",
    "torch12_rules",
]
