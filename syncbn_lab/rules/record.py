"""The record of a real torch 1.2.0: what it answered to every row, and what a rule rests on.

``data/torch-1.2/rules.csv`` is written by ``recorder`` inside that torch.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
import signal
import subprocess
from pathlib import Path

from .. import elsewhere
from ..errors import InputError
from ..locations import data_folder
from ..messages import NAME, PAIR, VERBATIM, dtype_order, without_device, without_dtypes
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
    """`verbatim` (but for the device, which was a CPU), `but for the name` of a Function, node or
    hook, or `but for the dtype pair`."""

    def sentence(self) -> str:
        """Say it in one line."""
        how = {
            VERBATIM: "exactly this",
            NAME: "the same of another name",
            PAIR: "it with other dtypes",
        }
        return f"a real torch 1.2.0 on a CPU said {how[self.match]} for {self.row}"


@functools.cache
def read_record(path: Path | None = None) -> Record:
    """Read ``rules.csv``.

    Raises
    ------
    InputError
        When the file is not there or is no record.
    """
    file = path or data_folder("torch-1.2") / "rules.csv"
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the record {file.name} can't be read: {error.strerror}.") from error


def parse(text: str) -> Record:
    """A record's text as the recorder wrote it; anything else is an InputError."""
    lines = text.splitlines()
    above = [line for line in lines if line.startswith("# ")]
    provenance = dict(line.removeprefix("# ").split(": ", 1) for line in above)
    table = csv.reader(lines[len(above) :])
    if tuple(next(table, ())) != COLUMNS:
        raise InputError(f"this is no record: its columns are not {', '.join(COLUMNS)}.")
    return Record(provenance, {fields[0]: Answer(*fields) for fields in table})


def ask_there(python: Path | str) -> str:
    """Ask the torch of another interpreter every row; the text of its record.

    Raises
    ------
    InputError
        When that interpreter or its torch fails.
    """
    command = [str(python), elsewhere.__file__, "rules"]
    said = subprocess.run(command, env=elsewhere.environment(), capture_output=True, text=True)
    if said.returncode != 0:
        how = f"exit code {said.returncode}"
        if said.returncode < 0:
            how = f"it was killed by {signal.Signals(-said.returncode).name}"
        lines = [line for line in said.stderr.splitlines() if not line.endswith(" rows")]
        last = f"; it said: {lines[-1]}" if lines else ""
        raise InputError(f"{python} could not record its torch's rules: {how}{last}.")
    return said.stdout


def evidence_for(rule: str, operation: str, message: str) -> Evidence | None:
    """The recorded row that stands behind a message of a rule; None where there is none.

    A row of the same rule with the very same words, of this operation if there is one; else one
    with other dtypes in the same order of precision. Names of Functions, nodes and hooks don't
    count: they are the user's.
    """
    same, shifted = _errors()
    text = _blank_names(without_device(message))
    for found in (
        same.get((rule, text)),
        shifted.get((rule, without_dtypes(text), tuple(dtype_order(text)))),
    ):
        if found:
            answer = next((a for a in found if _operation(a.row) == operation), found[0])
            return Evidence(answer.row, answer.message, _match(answer.message, message))
    return None


def _match(recorded: str, message: str) -> str:
    recorded, message = without_device(recorded), without_device(message)
    if recorded == message:
        return VERBATIM
    return NAME if _blank_names(recorded) == _blank_names(message) else PAIR


_Same = tuple[str, str]  # rule, words
_Shifted = tuple[str, str, tuple[int, ...]]  # rule, words without dtypes, the dtypes' order


@functools.cache
def _errors() -> tuple[dict[_Same, list[Answer]], dict[_Shifted, list[Answer]]]:
    """Recorded errors by rule and words; by rule, words without dtypes, and the dtypes' order."""
    same: dict[_Same, list[Answer]] = {}
    shifted: dict[_Shifted, list[Answer]] = {}
    try:
        answers = read_record().answers
    except InputError:  # a rule needs no record to hold
        return same, shifted
    for answer in answers.values():
        # torch 1.2 took bfloat16 for uint8 in most of its messages.
        if answer.outcome not in (ERROR, NO_KERNEL) or "bfloat16" in answer.row:
            continue
        text = _blank_names(without_device(answer.message))
        order = tuple(dtype_order(text))
        same.setdefault((answer.rule, text), []).append(answer)
        shifted.setdefault((answer.rule, without_dtypes(text), order), []).append(answer)
    return same, shifted


def _operation(row: str) -> str:
    """What a row asks, as the rules name it: "conv2d" of "conv2d bias(float16[1,2,5,5], …)"."""
    return re.split(r"[ (,]", row.removeprefix("F."))[0]


def _blank_names(message: str) -> str:
    message = re.sub(r"^Function \w+ returned", "Function <name> returned", message)
    return re.sub(r"^hook '[^']*'", "hook <name>", message)
