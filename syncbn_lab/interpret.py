"""What the ranks of a run left behind, made into its result: the outcome, and the reason for it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

from syncbn_lab.cases import Case, look_up
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations.apex import ApexInfo, find_apex, require_apex
from syncbn_lab.messages import NO, match_message
from syncbn_lab.run_result import RunResult
from syncbn_lab.trace.place import Place, place_in, place_of_gradient

_NO_HALF = re.compile(r"not (?:implemented|supported on CPUType) for '?Half")


def interpret(experiment: Experiment, reply: dict[str, Any]) -> RunResult:
    """Make the warm parent's reply to an experiment into its result."""
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
    if folder is not None and Path(folder).parent.name == "lent":
        # A copy of this environment's, for an interpreter that had none.
        apex = require_apex().as_dict() | {"lent": True}
    elif folder is not None:
        apex = _apex_in(folder).as_dict()
    return {name: value for name, value in found.items() if name != "apex_folder"} | {"apex": apex}


def _apex_in(folder: str) -> ApexInfo:
    """The apex in a folder: mostly this environment's, which was looked at before the run."""
    with contextlib.suppress(InputError):
        if (here := require_apex()).location == folder:
            return here
    return find_apex([str(Path(folder).parent)])


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
