"""Run an experiment in a fresh child of the warm parent, and say what happened.

This process needs no torch: it talks to the warm parent (``warm.py``) over a pipe, and
everything that comes back is plain data.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncbn_lab.cases import Case, look_up
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment, experiment_from_dict
from syncbn_lab.implementations.apex import find_apex, require_apex
from syncbn_lab.messages import NO, match_message
from syncbn_lab.trace.place import Place, place_in, place_of_gradient
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
_NO_HALF = re.compile(r"not (?:implemented|supported on CPUType) for '?Half")
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
        Before any work starts: apex is needed and is not there or is another package, or there
        is no such interpreter.
    """
    if experiment.rules == "recorded":
        from syncbn_lab import replays

        return replays.run_recorded(experiment)
    request = experiment.to_dict()
    if experiment.python is not None:
        # The warm parent may have been started with another PATH.
        request["python"] = require_interpreter(experiment.python)
    if experiment.needs_apex and (experiment.python is None or experiment.revision != "installed"):
        require_apex()
    reply = warm_parent().ask({"experiment": request})
    return _interpret(experiment, reply)


def require_interpreter(python: str) -> str:
    """The whole path of an interpreter; one that is not there is an InputError."""
    found = shutil.which(python)
    if found is None:
        raise InputError(
            f"python is {python!r}, which is no executable; allowed is the path of an interpreter, "
            "or of a script that starts one, or its name on PATH."
        )
    return os.path.abspath(found)


def machine() -> dict[str, Any]:
    """What torch finds here, asked in a child: its version, whether it sees a GPU, which."""
    return warm_parent().ask({"machine": True})


def start() -> None:
    """Start the warm parent in the background, so that the first run need not wait for torch."""
    warm_parent()


def require_device(experiment: Experiment) -> None:
    """Refuse a device that is not there, in one sentence, before any experiment starts."""
    # Another interpreter's torch may see a GPU where this one's does not.
    if experiment.device == "cpu" or experiment.python is not None:
        return
    found = machine()
    if found.get("cuda_available"):
        return
    raise InputError(
        f"device is {experiment.device!r}, but torch {found.get('torch', '')} sees no GPU here; "
        "allowed here is cpu (`python -m syncbn_lab doctor` says why)."
    )


def _interpret(experiment: Experiment, reply: dict[str, Any]) -> RunResult:
    if "ranks" not in reply:
        raise RuntimeError(f"the warm parent failed:\n{reply.get('message')}")
    rank = _telling_rank(reply["ranks"])
    status = rank["status"]
    common: dict[str, Any] = {
        "experiment": experiment,
        "verdict": "not judged",
        "environment": _environment(rank.get("environment", {})),
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
    if experiment.python is not None and "environment" not in rank and "exited" in status:
        said = (rank.get("log") or "").strip().splitlines()
        reason = (
            f"{experiment.python} ended without a word of the run; it has to be a Python 3.6 or "
            f"newer, or start one.{f' It said: {said[-1]}' if said else ''}"
        )
        return RunResult(outcome="not runnable here", reason=reason, **common)
    if status not in ("raised", "completed"):
        return RunResult(outcome="died", reason=f"The child {status}.", **common)

    common.update(
        dtypes=rank["dtypes"],
        silent_casts=_silent_casts(experiment, rank["violations"]),
        trace=rank["frames"],
        nodes=rank["nodes"],
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
    place = place_in(rank["place"]) if rank["place"] else None
    source = _source(rank, place)
    place = place_of_gradient(rank["message"], place, rank["frames"], rank["sources"]) or place
    match = match_message(case.seen, rank["message"]) if case else None
    where = f"{_short(place.file)} line {place.line}" if place else "torch itself"
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
    if experiment.python is not None and _NO_HALF.search(rank["message"]):
        reason += (
            "; this torch has no half arithmetic on its CPU: dtype_pair='float-double' runs "
            "it with (float, double)"
        )
    return RunResult(
        outcome=outcome,
        reason=f"{reason}.",
        error_type=rank["error_type"],
        message=rank["message"],
        source=source,
        recorded=rank["recorded"],
        file=_short(place.file) if place else None,
        line=place.line if place else None,
        traceback_line=place.traceback_line if place else None,
        place=dataclasses.asdict(place) if place else None,
        source_text=rank["sources"].get(place.file) if place else None,
        module=rank["module"],
        phase=rank["phase"],
        messages_match=match,
        traceback=rank["traceback"],
        **common,
    )


def _environment(found: dict[str, Any]) -> dict[str, Any]:
    """What the child says of itself, with what is known of the apex that it imported."""
    folder = found.get("apex_folder")
    apex = None
    if folder is not None:
        here = find_apex()
        if Path(folder).parent.name == "lent":
            # A copy of this environment's, for an interpreter that had none.
            apex = here.as_dict() | {"lent": True}
        else:
            same = folder == here.location
            apex = (here if same else find_apex([str(Path(folder).parent)])).as_dict()
    return {name: value for name, value in found.items() if name != "apex_folder"} | {"apex": apex}


def _source(rank: dict[str, Any], raised_at: Place | None) -> str:
    """Whose words a message is."""
    if rank["by_rule"]:
        return "raised by our rule"
    torch = f"torch {rank['environment']['torch'].partition('+')[0]}"
    if raised_at is not None and raised_at.statement.lstrip().startswith("raise "):
        # Raised in Python, by the code that stands there; what C++ raises is torch's.
        return f"raised by {Path(raised_at.file).name} on {torch}"
    return f"raised by {torch}"


def _silent_casts(
    experiment: Experiment, violations: list[dict[str, Any]] | None
) -> list[dict[str, Any]] | None:
    if violations is None or experiment.rules != "installed":
        return None
    # What today's torch refuses as well has no result, and is an error, not a silent cast.
    return [v for v in violations if v["result_dtype"] or v["gradient_index"] is not None]


def _same_place(case: Case, phase: str, place: Place | None) -> bool:
    if case.phase and case.phase != phase:
        return False
    if case.file is None:
        return True
    same_file = place is not None and Path(place.file).name == Path(case.file).name
    return same_file and case.line in (None, place.line if place else None)


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
