"""syncbn-lab: what happens when synchronized batch norm meets mixed precision, and why.

What needs torch, pandas or matplotlib loads when it is first used: ``import syncbn_lab as lab``
and the command line's help import none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ``cases`` and ``run`` are each a function and the module it lives in. Imported here, the
# function keeps the name: a module binds its own name in the package only when first loaded.
from syncbn_lab.cases import Case, cases, find_case
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.params import Parameters, choices, parameters
from syncbn_lab.results import comparison, read_results, record, reproduction
from syncbn_lab.run import run
from syncbn_lab.run_result import RunResult

if TYPE_CHECKING:
    from syncbn_lab import oracle, plots, reading, replays, rules, tables
    from syncbn_lab.rules import torch12_rules

__version__ = "0.1.0"

__all__ = [
    "Case",
    "Experiment",
    "InputError",
    "Parameters",
    "RunResult",
    "cases",
    "choices",
    "comparison",
    "find_case",
    "oracle",
    "parameters",
    "plots",
    "read_results",
    "reading",
    "record",
    "replays",
    "reproduction",
    "rules",
    "run",
    "tables",
    "torch12_rules",
]


def __getattr__(name: str) -> Any:
    if name == "torch12_rules":
        return importlib.import_module("syncbn_lab.rules").torch12_rules
    if name in ("oracle", "plots", "reading", "replays", "rules", "tables"):
        return importlib.import_module(f"syncbn_lab.{name}")
    raise AttributeError(f"syncbn_lab has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
