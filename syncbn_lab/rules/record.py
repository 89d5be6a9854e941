"""The record of a real torch 1.2.0: what it answered to every row, and what a rule rests on.

``data/torch-1.2/rules.csv`` is written by ``recorder`` inside that torch.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from pathlib import Path

from ..errors import InputError
from ..messages import PAIR, VERBATIM, dtype_order, without_device, without_dtypes
from .recorder.answers import COLUMNS, ERROR, NO_KERNEL, Answer


@dataclasses.dataclass(frozen=True)
class Record:
    """The recorded answers of a real torch 1.2."""

    provenance: dict[str, str]
    answers: dict[str, Answer]
    """By the row's name, in the order of recording."""


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The recorded row that a message of ours rests on."""

    row: str
    """Its name, such as "add(float16[3], float32[3])"."""
    message: str
    """What torch 1.2.0 said there, on a CPU."""
    match: str
    """`verbatim` (but for the device, which was a CPU), or `but for the dtype pair`."""

    def sentence(self) -> str:
        """Say it in one line."""
        if self.match == VERBATIM:
            return f"a real torch 1.2.0 on a CPU said exactly this for {self.row}"
        return f"a real torch 1.2.0 on a CPU said it with other dtypes for {self.row}"


def folder() -> Path:
    """Where the record is: beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "data" / "torch-1.2"
    return inside if inside.is_dir() else package.parent / "data" / "torch-1.2"


@functools.cache
def read_record(path: Path | None = None) -> Record:
    """Read ``rules.csv``.

    Raises
    ------
    InputError
        When the file is not there or is no record.
    """
    file = path or folder() / "rules.csv"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"the record {file.name} can't be read: {error.strerror}.") from error
    above = [line for line in lines if line.startswith("# ")]
    provenance = dict(line.removeprefix("# ").split(": ", 1) for line in above)
    table = csv.reader(lines[len(above) :])
    if tuple(next(table, ())) != COLUMNS:
        raise InputError(f"{file.name} is no record: its columns are not {', '.join(COLUMNS)}.")
    return Record(provenance, {fields[0]: Answer(*fields) for fields in table})


def evidence_for(rule: str, message: str) -> Evidence | None:
    """The recorded row that stands behind a message of a rule; None where there is none.

    A row of the same rule with the very same words; else one with other dtypes in the same order
    of precision. Names of Functions, nodes and hooks don't count: they are the user's.
    """
    same, shifted = _errors()
    text = _blank_names(without_device(message))
    if (rule, text) in same:
        answer = same[rule, text]
        return Evidence(answer.row, answer.message, VERBATIM)
    answer = shifted.get((rule, without_dtypes(text), tuple(dtype_order(text))))
    return None if answer is None else Evidence(answer.row, answer.message, PAIR)


@functools.cache
def _errors() -> tuple[dict[tuple[str, str], Answer], dict[tuple[str, str, tuple[int, ...]], Answer]]:
    """Recorded errors by rule and words; by rule, words without dtypes, and the dtypes' order."""
    same: dict[tuple[str, str], Answer] = {}
    shifted: dict[tuple[str, str, tuple[int, ...]], Answer] = {}
    try:
        answers = read_record().answers
    except InputError:  # a rule needs no record to hold
        return same, shifted
    for answer in answers.values():
        # torch 1.2 took bfloat16 for uint8 in most of its messages.
        if answer.outcome not in (ERROR, NO_KERNEL) or "bfloat16" in answer.row:
            continue
        text = _blank_names(without_device(answer.message))
        if (answer.rule, text) not in same:
            same[answer.rule, text] = answer
            order = tuple(dtype_order(text))
            shifted.setdefault((answer.rule, without_dtypes(text), order), answer)
    return same, shifted


def _blank_names(message: str) -> str:
    message = re.sub(r"^Function \w+ returned", "Function <name> returned", message)
    return re.sub(r"^hook '[^']*'", "hook <name>", message)
