"""Run an experiment in a fresh child of the warm parent, and say what happened.

This process needs no torch: it talks to the warm parent (``warm.py``) over a pipe, and
everything that comes back is plain data.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

from syncbn_lab import real_torch12, recorded
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations.apex import require_apex
from syncbn_lab.interpret import interpret
from syncbn_lab.run_result import RunResult
from syncbn_lab.warm import warm_parent


def run(experiment: Experiment) -> RunResult:
    """Run one experiment; whatever happens in the child becomes an outcome.

    Raises
    ------
    InputError
        Before any work starts: apex is needed and is not there or is another package, or there
        is no such interpreter.
    """
    if experiment.rules == "recorded":
        return _run_recorded(experiment)
    request = experiment.to_dict()
    if experiment.python is not None:
        # The warm parent may have been started with another PATH.
        request["python"] = require_interpreter(experiment.python)
    if experiment.needs_apex and (experiment.python is None or experiment.revision != "installed"):
        require_apex()
    reply = warm_parent().ask({"experiment": request})
    return interpret(experiment, reply)


def run_in_torch12(experiment: Experiment, python: Path) -> RunResult:
    """Run an experiment in the torch 1.2 of this interpreter, with the dtype pair shifted."""
    there = experiment.replace(rules="installed", dtype_pair="float-double", python=str(python))
    result = run(there)
    if "torch" in result.environment:
        real_torch12.require_version(python, result.environment["torch"])
    return dataclasses.replace(result, experiment=experiment)


def _run_recorded(experiment: Experiment) -> RunResult:
    """Run in a real torch 1.2 if one is here; else find the recorded replay."""
    if reason := recorded.not_applicable(experiment):
        return RunResult(experiment, "not applicable", reason, "not judged")
    python = real_torch12.ready_python()
    return recorded.find(experiment) if python is None else run_in_torch12(experiment, python)


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
