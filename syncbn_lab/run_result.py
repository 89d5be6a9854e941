"""What one run showed, as plain data, and back from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment, experiment_from_dict

OUTCOMES = (
    "reproduced",
    "completed",
    "different error",
    "died",
    "timed out",
    "not runnable here",
    "not applicable",
)
SCHEMA = 2
"""Version of ``RunResult.to_dict``."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one run showed."""

    experiment: Experiment
    outcome: str
    """One of ``OUTCOMES``. `reproduced`: the error that was reported for this configuration was
    raised, with its message, in its phase and at its place."""
    reason: str
    """The outcome in a sentence."""
    verdict: str
    """`right`, `degraded`, `wrong`, or `not judged` for a run that did not complete."""
    findings: list[str] = dataclasses.field(default_factory=list)
    """What the verdict rests on, worst first; empty when everything is right."""
    error_type: str | None = None
    message: str | None = None
    source: str | None = None
    """`raised by torch X`, `raised by our rule`, or `recorded`."""
    recorded: dict[str, Any] | None = None
    """For a message of our rule, the row of the record that it rests on: `row`, what a real torch
    1.2.0 said there (`message`), and how far it is the same (`match`). None without one."""
    file: str | None = None
    line: int | None = None
    """Counted by statement, as Python 3.6 and 3.7 report it."""
    traceback_line: int | None = None
    """What this Python's own traceback says."""
    place: dict[str, Any] | None = None
    """The whole place: function, statement and its lines, operands, a note on the line."""
    module: str | None = None
    """Module path of the layer whose forward raised."""
    phase: str | None = None
    dtypes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Dtype, device and shape by role: input, mean, running_mean, weight, grad_input…"""
    messages_match: str | None = None
    """`verbatim`, `but for the device`, `but for the dtype pair`, `no`; None for a control."""
    case: str | None = None
    """The case that was reported for this configuration; None for a control."""
    layers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Every batch norm layer against the oracle."""
    silent_casts: list[dict[str, Any]] | None = None
    """Under today's rules: what torch 1.2 would have refused, in order. None where nobody looked:
    under other rules, and in another interpreter."""
    trace: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Every call of a function of the layer's files, with the tensors it held."""
    nodes: list[str] = dataclasses.field(default_factory=list)
    """Names of the autograd nodes behind the loss: which code really ran."""
    output_dtype: str | None = None
    loss: float | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    traceback: str | None = None
    log: str = ""
    """The end of what the child printed."""
    source_text: str | None = None
    """The layer's source file that the place stands in; None for a place elsewhere."""
    seconds: float = 0.0
    """From fork to verdict."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for strict JSON, with the schema's version.

        JSON has no infinity: a number that is not finite is spelled "inf", "-inf" or "nan".
        """
        return {"schema": SCHEMA, **_each_value(dataclasses.asdict(self), _spell)}

    def sentence(self) -> str:
        """Return the run in one line."""
        verdict = f", {self.verdict}" if self.outcome == "completed" else ""
        return f"{self.experiment.describe()}: {self.outcome}{verdict}. {self.reason}"

    def row(self) -> dict[str, str]:
        """Return the run as a row of a comparison, of torch versions for example."""
        environment = self.environment
        place = f"{self.phase}, {self.file}:{self.line}" if self.file else self.phase
        own = self.experiment.python or environment.get("interpreter")
        return {
            "torch": environment.get("torch") or "–",
            "python": environment.get("python") or "–",
            "interpreter": own or "this one",
            "rules": self.experiment.rules,
            "outcome": self.outcome,
            "verdict": self.verdict,
            "message": self.message or ("–" if self.outcome == "completed" else self.reason),
            "source": self.source or "–",
            "place": place or "–",
            "in layer": self.module or "–",
            "match": self.messages_match or "–",
            "worst finding": self.findings[0] if self.findings else "–",
        }


def result_from_dict(fields: dict[str, Any]) -> RunResult:
    """Make a result of what ``to_dict`` gave; another schema is an InputError."""
    fields = dict(fields)
    schema = fields.pop("schema", None)
    if schema != SCHEMA:
        raise InputError(f"this result has schema {schema}; this version reads schema {SCHEMA}.")
    fields = _each_value(fields, _unspell)
    return RunResult(**{**fields, "experiment": experiment_from_dict(fields["experiment"])})


def _spell(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unspell(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _each_value(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested plain values with a change made to each innermost one."""
    if isinstance(value, dict):
        return {key: _each_value(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_each_value(inner, change) for inner in value]
    return change(value)
