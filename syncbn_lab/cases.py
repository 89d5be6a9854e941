"""Reported cases: what somebody saw in public, with its cause and its cure.

One YAML file per case in ``data/reported``; adding a case is adding a file. A case whose error
the kit can make again names the experiment that does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment, experiment_from_dict
from syncbn_lab.locations import data_folder

_REQUIRED = ("case", "title", "report", "seen", "cause", "cure", "command")
_OPTIONAL = ("date", "environment", "configuration", "phase", "error_type", "file", "line")
_KINDS: dict[str, tuple[type, str]] = {
    "date": (object, "a date"),
    "environment": (dict, "a table"),
    "configuration": (dict, "a table"),
    "line": (int, "a whole number"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One reported error, or one reported silence."""

    case: str
    """Its name: the file's, without the ending."""
    title: str
    report: str
    """Address of the public report."""
    seen: str
    """The message as it was reported; for a silent fault, what was seen instead."""
    cause: str
    cure: str
    command: str
    """The command of the kit that shows it, or that finds it on the user's machine."""
    date: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    configuration: Mapping[str, Any] | None = None
    """Fields of the experiment that makes it happen; None when the kit can't make it."""
    phase: str | None = None
    error_type: str | None = None
    """None for a silent fault."""
    file: str | None = None
    line: int | None = None
    """As the reporter's Python counts lines."""

    @property
    def experiment(self) -> Experiment | None:
        """The experiment that makes this case happen, where there is one."""
        return None if self.configuration is None else experiment_from_dict({**self.configuration})


def cases() -> list[Case]:
    """Every reported case, in the order of their names.

    Raises
    ------
    InputError
        When PyYAML is missing, or a file is not a case: the sentence names the file.
    """
    return list(_load(data_folder("reported")))


def find_case(name: str) -> Case:
    """One case by name; an unknown name is an InputError that lists the names."""
    known = {case.case: case for case in cases()}
    wanted = name.removesuffix(".yaml")
    if wanted not in known:
        raise InputError(f"case is {name!r}; allowed are {', '.join(known)}.")
    return known[wanted]


def reported_for(experiment: Experiment) -> Case | None:
    """The case that was reported for this configuration and layer; None for a control.

    The report speaks of a configuration on the layer of its day. Under another revision or
    other rules the same configuration is still compared with it; where it was reported for
    another implementation, it is not.
    """
    for case in cases():
        reported = case.experiment
        if (
            reported is not None
            and case.error_type is not None
            and reported.opt_level == experiment.opt_level
            and reported.keeps_batchnorm_fp32 == experiment.keeps_batchnorm_fp32
            and reported.implementation == experiment.implementation
        ):
            return case
    return None


def look_up(experiment: Experiment) -> tuple[Case | None, str | None]:
    """``reported_for``, or why nothing could be looked up: the core runs without PyYAML."""
    try:
        return reported_for(experiment), None
    except InputError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return None, f"no reported case was looked up: {error}".rstrip(".")


def markdown_table() -> str:
    """The first screen of the README: what you see, cause, cure, command, a row a case."""
    rows = ["| What you see | Cause | Cure | Command |", "|---|---|---|---|"]
    for case in cases():
        silent = case.error_type is None
        seen = case.seen if silent else f"`{case.seen}`"
        where = "" if silent else f"<br>({case.title})"
        cells = (seen + where, case.cause, case.cure, f"`{case.command}`")
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


@cache
def _load(directory: Path) -> tuple[Case, ...]:
    try:
        import yaml
    except ImportError as error:
        raise InputError(
            "the reported cases are YAML files and PyYAML is not installed; "
            "`pip install pyyaml` brings it."
        ) from error
    found = []
    for path in sorted(directory.glob("*.yaml")):
        try:
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise InputError(
                f"{path.name} can't be read as YAML: {' '.join(str(error).split())}."
            ) from error
        found.append(_case(path, fields))
    return tuple(found)


def _case(path: Path, fields: Any) -> Case:
    if not isinstance(fields, dict):
        raise InputError(f"{path.name} is not a case: it holds no table of fields.")
    fields = {str(name): value for name, value in fields.items() if value is not None}
    missing = [name for name in _REQUIRED if not fields.get(name)]
    unknown = sorted(set(fields) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise InputError(
            f"{path.name} is not a case: it {problem}; a case has {', '.join(_REQUIRED)} and may "
            f"have {', '.join(_OPTIONAL)}."
        )
    for name, value in fields.items():
        kind, said = _KINDS.get(name, (str, "text"))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(
                f"{path.name} is not a case: {name} is {value!r}, and has to be {said}."
            )
    if fields["case"] != path.stem:
        raise InputError(f"{path.name} calls itself {fields['case']!r}; its name must be the same.")
    case = Case(**{**fields, "date": str(fields["date"]) if fields.get("date") else None})
    try:
        # Checked now, so that a broken file is found before any run.
        _ = case.experiment
    except InputError as error:
        raise InputError(
            f"{path.name} has a configuration that is no experiment: {error}"
        ) from error
    return case
