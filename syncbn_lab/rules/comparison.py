"""The rules against the record: what a real torch 1.2.0 said, row by row, beside what we say."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from .record import Record, read_record
from .recorder.answers import NO_KERNEL, NOT_MADE, Answer, ask, rows
from .torch12 import torch12_rules

AGREES, DIFFERS, NOT_COMPARABLE = "agrees", "differs", "not comparable"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A kind of row in which we don't say what torch 1.2 said, and why."""

    rows: str
    """Regular expression that the row's name matches."""
    recorded: str
    """Regular expression found in what torch 1.2 said: its message, or its result's dtype."""
    ours: str
    """The same for what we say."""
    reason: str


_CUDNN = (
    "refused by both; the words depend on the kernel that ran (on a CPU MKL-DNN or THNN), and the "
    "rules give cuDNN's"
)
_REFUSED_TODAY = "today's torch refuses it, whatever the rules say"
_INDEX = "what may stand in square brackets is not judged; today's torch takes int32 as well"
KNOWN: tuple[Difference, ...] = (
    Difference(
        r".*bfloat16",
        r"Byte|uint8",
        r"",
        "torch 1.2 could store bfloat16 but not promote it, and took it for uint8; the rules give "
        "it half's",
    ),
    Difference(
        r"conv",
        r"argument #\d '(weight|bias)'$|^expected scalar type \w+ but found|CPUBoolType",
        r"^Input type \(\S+\) and (weight|bias) type \(\S+\) should be the same$|"
        r"^Expected object of scalar type \w+ but got scalar type \w+ for argument #\d",
        _CUDNN,
    ),
    Difference(
        r"int64 mul of 0-dim requiring grad",
        r"^int64$",
        r"^float",
        "autograd has decided on a floating result before the rules are asked",
    ),
    Difference(
        r"__setitem__ index backward, 0-dim",
        r"^Function IndexPutBackward returned an invalid gradient",
        r"^Index put requires the source and destination dtypes match",
        "refused by both; today's formula of that node refuses first, in words of its own",
    ),
    Difference(r"__getitem__", r"^tensors used as indices", r"^float|^tensors used as", _INDEX),
    Difference(
        r"(__sub__|__rsub__|sub_)\(.*True\)", r"^float", r"^Subtraction", _REFUSED_TODAY
    ),
    Difference(r"add alpha=\(.*True\)", r"^float|^u?int", r"^Boolean alpha", _REFUSED_TODAY),
    Difference(r"addcdiv\(int64", r"^int64$", r"^Integer division", _REFUSED_TODAY),
    Difference(r"argmax\(bool", r"^int64$", r"does not support bool", _REFUSED_TODAY),
    Difference(
        r"kl_div\((int64|bool)",
        r"^expected device|^Subtraction",
        r"^kl_div: Integral inputs not supported",
        "refused by both; today's torch refuses integers first, in words of its own",
    ),
    Difference(
        r"__ipow__",
        r"^in-place pow not implemented$",
        r"",
        "torch 1.2 had no such operator, whatever the dtypes",
    ),
    Difference(
        r"logsumexp\(u?int",
        r"^value cannot be converted",
        r"^float32$",
        "an accident of torch 1.2's formula on integers, not a rule of dtypes",
    ),
)
"""Every kind of difference that is known. A comparison with a row outside them is a fault."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One row: the record's answer and ours."""

    recorded: Answer
    ours: Answer
    agreement: str
    """`agrees`: same outcome and same dtype, or same error type and message, letter for letter.
    `not comparable`: torch 1.2's CPU has no kernel for these dtypes."""
    reason: str | None
    """For a row that differs: why, where it is known."""


def compare(record: Record | None = None, names: Iterable[str] | None = None) -> list[Compared]:
    """Ask this torch, under the rules, every recorded row (or those named), and compare."""
    answers = (record or read_record()).answers
    wanted = None if names is None else set(names)
    found = []
    for row in rows():
        name = str(row)
        if name not in answers or (wanted is not None and name not in wanted):
            continue
        with torch12_rules():
            ours = ask(row)
        found.append(_compared(answers[name], ours))
    return found


def _compared(recorded: Answer, ours: Answer) -> Compared:
    if recorded == ours:
        return Compared(recorded, ours, AGREES, None)
    if recorded.outcome in (NO_KERNEL, NOT_MADE):
        return Compared(recorded, ours, NOT_COMPARABLE, None)
    said, ours_said = (answer.message or answer.result_dtype for answer in (recorded, ours))
    for known in KNOWN:
        if (
            re.match(known.rows, recorded.row)
            and re.search(known.recorded, said)
            and re.search(known.ours, ours_said)
        ):
            return Compared(recorded, ours, DIFFERS, known.reason)
    return Compared(recorded, ours, DIFFERS, None)
