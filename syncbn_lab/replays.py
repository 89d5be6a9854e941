"""Replays in a real torch 1.2: recorded anew, and compared with our runs of the same steps."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from syncbn_lab import elsewhere, real_torch12
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.recorded import read_replays, replayed
from syncbn_lab.run import run, run_in_torch12
from syncbn_lab.run_result import RunResult

# What is left out of the record: apex's own source, this machine's paths, and what is bulky.
_LEFT_OUT = ("trace", "source_text", "traceback", "log", "layers", "seconds")


def record(python: Path, say: Callable[[str], object] = lambda text: None) -> str:
    """Run every replay in this interpreter's torch and give the record's text, JSON.

    Raises
    ------
    InputError
        When its torch is not 1.2.0.
    """
    results = []
    for experiment in replayed():
        result = run_in_torch12(experiment, python)
        say(result.sentence())
        if "torch" not in result.environment:
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


def as_ours(experiment: Experiment) -> Experiment:
    """The same experiment under our rules on today's torch, to be compared with its replay."""
    return experiment.replace(rules="torch-1.2", dtype_pair="float-double")


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

    @property
    def unexplained(self) -> bool:
        """Whether it differs for no known reason: a fault."""
        return not self.agrees and self.reason is None


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
    return compare(run_in_torch12(experiment, python) for experiment in replayed())


def _stored(result: RunResult) -> dict[str, Any]:
    fields = {k: v for k, v in result.to_dict().items() if k not in _LEFT_OUT}
    environment = dict(fields["environment"])
    environment.pop("interpreter", None)
    environment["apex"] = {k: v for k, v in environment["apex"].items() if k != "location"}
    fields["environment"] = environment
    if fields["place"]:
        fields["place"] = {**fields["place"], "file": result.file, "statement": ""}
    return fields
