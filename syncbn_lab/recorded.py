"""The recorded replays: the reported configurations as a real torch 1.2.0 ran them.

torch 1.2 has no half arithmetic on a CPU, so a replay shifts the dtype pair (``implementations/
pair.py``): real apex and real torch 1.2, with (float, double) in the place of (half, float).
``replays.py`` records them; here they are read, and found for an experiment.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations.apex import find_apex, require_apex, source_of
from syncbn_lab.locations import data_folder
from syncbn_lab.run_result import RunResult, result_from_dict

RECORDED = "recorded"
"""The source of a message that comes from the record."""
_CONFIGURATIONS = (
    ("O1", None),
    ("O2", None),
    ("O3", True),
    ("O0", None),
    ("O3", None),
    ("O2", False),
)
_REVISIONS = ("reported", "cast-added", "return-fixed")
_MODELS = ("encoder", "toy")


@dataclasses.dataclass(frozen=True)
class Replays:
    """The recorded replays, and where they come from."""

    provenance: dict[str, str]
    results: list[RunResult]


def replayed() -> list[Experiment]:
    """Every experiment that the record holds."""
    return [
        Experiment(
            opt_level=level,
            keep_batchnorm_fp32=keep,
            revision=revision,
            model=model,
            rules="recorded",
        )
        for model in _MODELS
        for revision in _REVISIONS
        for level, keep in _CONFIGURATIONS
    ]


@functools.cache
def read_replays(path: Path | None = None) -> Replays:
    """Read ``replays.json``.

    Raises
    ------
    InputError
        When the file is not there or holds no replays.
    """
    file = path or data_folder("torch-1.2") / "replays.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Replays(found["provenance"], [result_from_dict(r) for r in found["replays"]])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the recorded replays, {file.name}, can't be read: {error}.") from error


def not_applicable(experiment: Experiment) -> str | None:
    """Why an experiment says nothing in torch 1.2 with the pair shifted; None if it does."""
    mixes = experiment.opt_level == "O1" or experiment.keeps_batchnorm_fp32
    if experiment.implementation == "batchnorm" and mixes and experiment.opt_level != "O0":
        return (
            "Plain batch norm takes half input with float32 parameters on CUDA alone; its CPU "
            "kernel in torch 1.2 has no such exception, so the shifted pair says nothing here."
        )
    return None


def find(experiment: Experiment) -> RunResult:
    """The recorded replay of an experiment; `not runnable here` where there is none."""
    for replay in read_replays().results:
        if _same(replay.experiment, experiment):
            return _shown(replay, experiment)
    known = dict.fromkeys(one.configuration for one in replayed())
    return RunResult(
        experiment,
        "not runnable here",
        "No real torch 1.2 is here (`make torch12` makes an environment with it), and no replay of "
        f"this experiment is recorded: recorded are {', '.join(known)}, one rank, "
        f"one step, seed 0, revisions {', '.join(_REVISIONS)}, models {' and '.join(_MODELS)}.",
        "not judged",
    )


def _same(recorded: Experiment, wanted: Experiment) -> bool:
    """Whether a recorded replay answers for an experiment."""
    revision = wanted.revision
    if revision == "installed":
        revision = find_apex().revision or revision
    return (
        dataclasses.replace(recorded, keep_batchnorm_fp32=None, time_limit=1.0)
        == dataclasses.replace(wanted, keep_batchnorm_fp32=None, time_limit=1.0, revision=revision)
        and recorded.keeps_batchnorm_fp32 == wanted.keeps_batchnorm_fp32
    )


def _shown(replay: RunResult, experiment: Experiment) -> RunResult:
    """A recorded replay as the result of an experiment: its source says that it is recorded."""
    provenance = read_replays().provenance
    changes: dict[str, Any] = {
        "experiment": experiment,
        "reason": f"{replay.reason} Recorded on {provenance['date']} in torch "
        f"{provenance['torch']}; no real torch 1.2 is here (`make torch12`).",
        "source": RECORDED if replay.message else None,
    }
    if replay.place:
        changes |= _with_source(replay.place, experiment)
    return dataclasses.replace(replay, **changes)


def _with_source(place: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """The statement's text, from the apex that is here: the record holds none of its code."""
    try:
        info = require_apex()
        folder = Path(info.location or "") / "parallel"
        if place["file"] == "apex/parallel/sync_batchnorm.py":
            rebuilt = source_of(experiment.revision)
            text = rebuilt[1] if rebuilt else (folder / "sync_batchnorm.py").read_text()
        elif place["file"] == "apex/parallel/sync_batchnorm_kernel.py" and info.kernel_known:
            text = (folder / "sync_batchnorm_kernel.py").read_text()
        else:
            return {}
    except InputError:
        return {}
    first, last = place["statement_lines"]
    statement = "\n".join(text.splitlines()[first - 1 : last])
    return {"source_text": text, "place": {**place, "statement": statement}}
