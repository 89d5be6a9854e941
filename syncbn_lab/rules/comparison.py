"""The rules against the record: what a real torch 1.2.0 said, row by row, beside what we say."""

from __future__ import annotations

import dataclasses
import re

from ..real_torch12 import require_python, require_version
from .record import Record, ask_there, parse, read_record
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
        r"^b?float\d\d$|^expected device|^output with device|^Subtraction|^Boolean alpha",
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
    Difference(r"(__sub__|__rsub__|sub_)\(.*True\)", r"^float", r"^Subtraction", _REFUSED_TODAY),
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
        r"^float\d\d$|^int64$|'exponent'$",
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

    @property
    def differs(self) -> bool:
        """Whether both answered, and not the same."""
        return self.agreement == DIFFERS

    @property
    def unexplained(self) -> bool:
        """Whether it differs for no known reason: a fault."""
        return self.differs and self.reason is None


def compare(record: Record | None = None, rule: str | None = None) -> list[Compared]:
    """Ask this torch, under the rules, every recorded row (or those of one rule), and compare."""
    answers = (record or read_record()).answers
    found = []
    for row in rows():
        name = str(row)
        if name not in answers or rule not in (None, row.rule):
            continue
        with torch12_rules():
            ours = ask(row)
        found.append(_compared(answers[name], ours))
    return found


def compare_with(source: str, rule: str = "all") -> tuple[Record, list[Compared]]:
    """Compare with the record ("recorded"), or with a real torch 1.2 asked now ("live").

    ``rule`` is one of ``describe_rules()``, or "all". Live, it takes a minute.
    """
    if source == "live":
        python = require_python()
        record = parse(ask_there(python))
        require_version(python, record.provenance["torch"])
    else:
        record = read_record()
    return record, compare(record, None if rule == "all" else rule)


def _compared(recorded: Answer, ours: Answer) -> Compared:
    if recorded == ours:
        return Compared(recorded, ours, AGREES, None)
    if recorded.outcome in (NO_KERNEL, NOT_MADE):
        return Compared(recorded, ours, NOT_COMPARABLE, None)
    said, ours_said = (answer.message or answer.result_dtype for answer in (recorded, ours))
    return Compared(recorded, ours, DIFFERS, known_reason(said, ours_said, recorded.row))


def known_reason(recorded: str, ours: str, row: str | None = None) -> str | None:
    """Why we don't say what torch 1.2 said, in a row or (None) anywhere; None if not known."""
    for known in KNOWN:
        if (
            (row is None or re.match(known.rows, row))
            and re.search(known.recorded, recorded)
            and re.search(known.ours, ours)
        ):
            return known.reason
    return None
