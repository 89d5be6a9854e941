"""Run an experiment in a fresh child of the warm parent, and say what happened.

This process needs no torch: it talks to the warm parent (``warm.py``) over a pipe, and
everything that comes back is plain data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncbn_lab.cases import NO, Case, look_up, match_message
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment, experiment_from_dict
from syncbn_lab.implementations.apex import require_apex
from syncbn_lab.warm import warm_parent

OUTCOMES = (
    "reproduced",
    "completed",
    "different error",
    "died",
    "timed out",
    "not runnable here",
    "not applicable",
)
SCHEMA = 1
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
    """`raised by torch X`, or `raised by our rule`."""
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
    silent_casts: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Under today's rules: what torch 1.2 would have refused, in order."""
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


def run(experiment: Experiment) -> RunResult:
    """Run one experiment; whatever happens in the child becomes an outcome.

    Raises
    ------
    InputError
        Before any work starts: apex is needed and is not there or is another package.
    """
    if experiment.needs_apex:
        require_apex()
    reply = warm_parent().ask({"experiment": experiment.to_dict()})
    return _interpret(experiment, reply)


def machine() -> dict[str, Any]:
    """What torch finds here, asked in a child: its version, whether it sees a GPU, which."""
    return warm_parent().ask({"machine": True})


def start() -> None:
    """Start the warm parent in the background, so that the first run need not wait for torch."""
    warm_parent()


def require_device(device: str) -> None:
    """Refuse a device that is not there, in one sentence, before any experiment starts."""
    if device == "cpu":
        return
    found = machine()
    if found.get("cuda_available"):
        return
    raise InputError(
        f"device is {device!r}, but torch {found.get('torch', '')} sees no GPU here; allowed here "
        "is cpu (`python -m syncbn_lab doctor` says why)."
    )


def _interpret(experiment: Experiment, reply: dict[str, Any]) -> RunResult:
    if "ranks" not in reply:
        raise RuntimeError(f"the warm parent failed:\n{reply.get('message')}")
    rank = _telling_rank(reply["ranks"])
    status = rank["status"]
    common: dict[str, Any] = {
        "experiment": experiment,
        "verdict": "not judged",
        "environment": rank.get("environment", {}),
        "log": rank.get("log", ""),
        "seconds": reply["seconds"],
    }
    if status == "broken":
        raise RuntimeError(f"the kit itself failed in the child process:\n{rank['message']}")
    if status == "not runnable":
        return RunResult(outcome="not runnable here", reason=rank["message"], **common)
    if status == "timed out":
        reason = f"The run was ended after {experiment.time_limit:g} s."
        return RunResult(outcome="timed out", reason=reason, **common)
    if status not in ("raised", "completed"):
        return RunResult(outcome="died", reason=f"The child {status}.", **common)

    common.update(
        dtypes=rank["dtypes"],
        silent_casts=rank["silent_casts"],
        trace=rank["frames"],
        nodes=rank["nodes"],
        source_text=rank["source_text"],
    )
    case, unread = look_up(experiment)
    common["case"] = case.case if case else None
    if status == "raised":
        return _raised(experiment, rank, case, unread, common)

    judged = reply.get("verdict")
    if judged is None:
        raise RuntimeError(f"the judging child failed:\n{reply.get('judge_log')}")
    common.update(
        verdict=judged["verdict"],
        findings=judged["findings"],
        layers=judged["layers"],
        output_dtype=rank["output_dtype"],
        loss=rank["loss"],
        messages_match=NO if case else None,
    )
    reason = "It ran to the end"
    if case:
        reason += ", where the reported run raised an error"
    if judged["findings"]:
        reason += f"; {judged['findings'][0]}"
    return RunResult(outcome="completed", reason=f"{reason}.", **common)


def _raised(
    experiment: Experiment,
    rank: dict[str, Any],
    case: Case | None,
    unread: str | None,
    common: dict[str, Any],
) -> RunResult:
    place = rank["place"] or {}
    match = match_message(case.seen, rank["message"]) if case else None
    where = f"{_short(place.get('file'))} line {place.get('line')}" if place else "torch itself"
    in_module = f" in layer {rank['module']}" if rank["module"] else ""
    if case is None:
        outcome = "different error"
        reason = f"An error was raised in {rank['phase']}{in_module}, {where}; "
        reason += unread or "none was reported for this configuration"
    elif match != NO and _same_place(case, rank["phase"], place):
        outcome = "reproduced"
        reason = f"The reported error was raised in {rank['phase']}, {where}"
    else:
        outcome = "different error"
        reason = (
            f"An error was raised in {rank['phase']}{in_module}, {where}; it is not the one "
            f"reported as {case.case}"
        )
    return RunResult(
        outcome=outcome,
        reason=f"{reason}.",
        error_type=rank["error_type"],
        message=rank["message"],
        source=rank["source"],
        file=_short(place.get("file")),
        line=place.get("line"),
        traceback_line=place.get("traceback_line"),
        place=rank["place"],
        module=rank["module"],
        phase=rank["phase"],
        messages_match=match,
        traceback=rank["traceback"],
        **common,
    )


def _same_place(case: Case, phase: str, place: dict[str, Any]) -> bool:
    if case.phase and case.phase != phase:
        return False
    if case.file is None:
        return True
    same_file = Path(place.get("file") or "").name == Path(case.file).name
    return same_file and case.line in (None, place.get("line"))


def _telling_rank(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The rank that failed first: the others fail because of it. Any, when all completed.

    Of two that ended at once the one that died tells more than the one that raised.
    """
    failed = [rank for rank in ranks if rank["status"] != "completed"]
    order = ("broken", "died", "raised", "not runnable", "timed out")

    def key(rank: dict[str, Any]) -> tuple[int, int]:
        status = rank["status"].partition(":")[0]
        return rank["ended"], order.index(status) if status in order else len(order)

    return min(failed or ranks, key=key)


def _short(file: str | None) -> str | None:
    """A path from its package on: "apex/parallel/sync_batchnorm.py", whatever lies before."""
    if not file:
        return None
    parts = Path(file).parts
    for package in ("apex", "torch", "syncbn_lab"):
        if package in parts:
            last = len(parts) - 1 - parts[::-1].index(package)
            return "/".join(parts[last:])
    return parts[-1]
