"""torch 1.2's dtype rules on today's torch."""

from __future__ import annotations

from .describe import describe_rules
from .torch12 import Rules, torch12_rules
from .violations import Torch12RuleError, Violation

__all__ = ["Rules", "Torch12RuleError", "Violation", "describe_rules", "torch12_rules"]
