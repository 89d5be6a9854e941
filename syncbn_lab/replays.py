"""The reported configurations in a real torch 1.2.0: live where there is one, else as recorded.

torch 1.2 has no half arithmetic on a CPU, so a replay shifts the dtype pair (``implementations/
pair.py``): real apex and real torch 1.2, with (float, double) in the place of (half, float).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from syncbn_lab import elsewhere, real_torch12
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations.apex import find_apex, require_apex, source_of
from syncbn_lab.locations import data_folder
from syncbn_lab.run import RunResult, result_from_dict, run

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
# What is left out of the record: apex's own source, this machine's paths, and what is bulky.
_LEFT_OUT = ("trace", "source_text", "traceback", "log", "layers", "seconds")


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


def run_recorded(experiment: Experiment) -> RunResult:
    """Run an experiment with ``rules="recorded"``: in the real torch 1.2 if it is there.

    Without one, the recorded replay of the same experiment; without that, `not runnable here`.
    """
    if reason := _not_applicable(experiment):
        return RunResult(experiment, "not applicable", reason, "not judged")
    python = real_torch12.ready_python()
    if python is not None:
        return live(experiment, python)
    for replay in read_replays().results:
        if _same(replay.experiment, experiment):
            return _shown(replay, experiment)
    return RunResult(
        experiment,
        "not runnable here",
        "No real torch 1.2 is here (`make torch12` makes an environment with it), and no replay of "
        f"this experiment is recorded: recorded are {', '.join(_CONFIGURATIONS_TEXT)}, one rank, "
        f"one step, seed 0, revisions {', '.join(_REVISIONS)}, models {' and '.join(_MODELS)}.",
        "not judged",
    )


def live(experiment: Experiment, python: Path) -> RunResult:
    """Run an experiment in the torch 1.2 of this interpreter, with the dtype pair shifted."""
    there = experiment.replace(rules="installed", dtype_pair="float-double", python=str(python))
    return dataclasses.replace(run(there), experiment=experiment)


def as_ours(experiment: Experiment) -> Experiment:
    """The same experiment under our rules on today's torch, to be compared with its replay."""
    return experiment.replace(rules="torch-1.2", dtype_pair="float-double")


_CONFIGURATIONS_TEXT = [
    Experiment(opt_level=level, keep_batchnorm_fp32=keep).configuration
    for level, keep in _CONFIGURATIONS
]


def _not_applicable(experiment: Experiment) -> str | None:
    mixes = experiment.opt_level == "O1" or experiment.keeps_batchnorm_fp32
    if experiment.implementation == "batchnorm" and mixes and experiment.opt_level != "O0":
        return (
            "Plain batch norm takes half input with float32 parameters on CUDA alone; its CPU "
            "kernel in torch 1.2 has no such exception, so the shifted pair says nothing here."
        )
    return None


@dataclasses.dataclass(frozen=True)
class Replays:
    """The recorded replays, and where they come from."""

    provenance: dict[str, str]
    results: list[RunResult]


def record(python: Path, say: Callable[[str], object] = lambda text: None) -> str:
    """Run every replay in this interpreter's torch and give the record's text, JSON.

    Raises
    ------
    InputError
        When its torch is not 1.2.0.
    """
    results = []
    for experiment in replayed():
        result = live(experiment, python)
        say(result.sentence())
        if not result.environment.get("torch", "").startswith("1.2.0"):
            raise InputError(f"{python} has no torch 1.2.0: {result.reason}")
        results.append(result)
    environment = results[0].environment
    provenance = {
        "torch": environment["torch"],
        "torch_git_version": environment["torch_git_version"],
        "python": f"CPython {environment['python']}",
        "platform": environment["platform"],
        "date": datetime.date.today().isoformat(),
        "recorder_sha256": elsewhere.modules_hash(),
    }
    plain = [_stored(result) for result in results]
    return json.dumps({"provenance": provenance, "replays": plain}, indent=1) + "\n"


@dataclasses.dataclass(frozen=True)
class ComparedReplay:
    """A replay in a real torch 1.2 beside our run of the same experiment."""

    replay: RunResult
    ours: RunResult
    differences: dict[str, tuple[Any, Any]]
    """What differs by name, as (torch 1.2, ours)."""
    reason: str | None
    """Why, where it is known."""

    @property
    def agrees(self) -> bool:
        """Whether everything compared is the same."""
        return not self.differences


_COMPARED = ("outcome", "error_type", "message", "phase", "file", "module", "dtypes")


def compare(replays: Iterable[RunResult] | None = None) -> list[ComparedReplay]:
    """Run every replayed experiment under our rules, with the same shifted pair, and compare.

    Outcome, error, message, phase, file, layer and all dtypes; the line where it stands in
    apex's own files (torch's have other lines today). Values are not compared: each torch sums
    in an order of its own, and each result has its verdict.
    """
    from syncbn_lab.rules.comparison import known_reason  # needs torch, and the rest does not

    found = []
    for replay in read_replays().results if replays is None else replays:
        ours = run(as_ours(replay.experiment))
        names = [*_COMPARED, *(["line"] if (replay.file or "").startswith("apex/") else [])]
        pairs = {name: (getattr(replay, name), getattr(ours, name)) for name in names}
        differences = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        reason = None
        if list(differences) == ["message"]:
            reason = known_reason(*(message or "" for message in differences["message"]))
        found.append(ComparedReplay(replay, ours, differences, reason))
    return found


def compare_with(source: str) -> list[ComparedReplay]:
    """Compare our runs with the recorded replays, or with replays run now ("live")."""
    if source != "live":
        return compare()
    python = real_torch12.require_python()
    return compare(live(experiment, python) for experiment in replayed())


def _stored(result: RunResult) -> dict[str, Any]:
    fields = {k: v for k, v in result.to_dict().items() if k not in _LEFT_OUT}
    environment = dict(fields["environment"])
    environment.pop("interpreter", None)
    environment["apex"] = {k: v for k, v in environment["apex"].items() if k != "location"}
    fields["environment"] = environment
    if fields["place"]:
        fields["place"] = {**fields["place"], "file": result.file, "statement": ""}
    return fields


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
