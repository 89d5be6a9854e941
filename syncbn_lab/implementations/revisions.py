"""Which revision of apex's ``sync_batchnorm.py`` a file is, and how to get an earlier one back.

The file (``apex/parallel/sync_batchnorm.py`` in NVIDIA/apex, the pure Python fallback) has four
revisions that matter, told apart by the sha256 of their bytes. The report was made with the
first of them, which nobody can install any more. Each earlier revision is rebuilt from the next
one by editing instructions: delete these lines, take four spaces off that one, turn a ``return``
into an assignment. The instructions hold no apex code, and the hash of what comes out proves
that it is, bit for bit, what the commit held.

Standard library only: nothing here imports torch or apex, or opens a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from syncbn_lab.errors import InputError

KERNEL_SHA256 = "780f2b23dc3c221640659f56d6c7effbb374cabf08a1f690a611a8716678d39e"
"""sha256 of ``sync_batchnorm_kernel.py`` (the autograd Function): one file beside all four."""

REVISION_NAMES = ("reported", "cast-added", "return-fixed", "installed")
"""What ``revision=`` may be; ``installed`` is the file as it lies there, known or not."""


@dataclass(frozen=True)
class Revision:
    """One revision of ``sync_batchnorm.py``: where it comes from and what it does."""

    name: str
    commit: str  # NVIDIA/apex, all 40 digits
    date: str  # of that commit, YYYY-MM-DD
    sha256: str  # of the file's bytes
    behaviour: str  # one sentence
    target_lines: tuple[int, int]
    # First and last line of the statement that updates running_mean, the one that refuses mixed
    # dtypes in the report's O2 and O3. A traceback names the last line on Python 3.6 and 3.7
    # (so "line 109" of the report), and the first on 3.8 and newer (108).

    @property
    def short_commit(self) -> str:
        """The commit's first eight digits."""
        return self.commit[:8]


KNOWN: tuple[Revision, ...] = (
    Revision(
        "reported",
        "0a991543846966d5f586540dc2441e512139e9fc",
        "2019-03-22",
        "2ffba4aec2cd8865f64d008dd653530242f1bedb799ba9a5b8ef8e34f51ef286",
        "Casts nothing, so half input meets float32 statistics: the three reported errors.",
        (108, 109),
    ),
    Revision(
        "cast-added",
        "ffbb52ba6c57091f744fe007bb0e90d9e7b7045a",
        "2019-05-17",
        "9a23b57fd8e63fbba8db7674b92e8cd3943cd64bf3c93063bab20b966e19eda0",
        "Casts the input to the statistics' dtype (PR 285), but ends in an assignment and never "
        "returns: forward gives None.",
        (121, 122),
    ),
    Revision(
        "return-fixed",
        "574fe2449cbe6ae4c8af53c6ecb1b5fc13877234",
        "2019-07-12",
        "7138bb79c0c8157e64cc07f22cabaddf0691d624d736c198e62942d3f1670236",
        "Returns again (PR 384), but notes the dtype to go back to after the cast: half in, "
        "float32 out.",
        (124, 125),
    ),
    Revision(
        "deprecation-text",
        "48bf0df5f7925f71bdeac66c6995ab5c6f2617e3",
        "2022-10-10",
        "0067d7d31ccf24881e07cf50644ff444767b9a036ee400b47fcf352f2c13fd43",
        "As return-fixed, with a deprecation warning; the file of tags 24.04.01, 25.04 and 25.05.",
        (126, 127),
    ),
)
"""The four revisions, oldest first."""


@dataclass(frozen=True)
class Edit:
    """One editing instruction. Lines count from 1 in the file as it is before any edit."""

    action: Literal["delete", "dedent", "return to assignment", "assignment to return"]
    first: int
    last: int | None = None  # a range only for "delete"


# How each revision but the oldest becomes the one before it.
_EDITS: dict[str, tuple[Edit, ...]] = {
    "deprecation-text": (Edit("delete", 52, 53),),
    "return-fixed": (
        Edit("delete", 56),
        Edit("dedent", 57),
        Edit("delete", 58, 59),
        Edit("return to assignment", 134),
    ),
    "cast-added": (
        Edit("delete", 69, 81),
        Edit("assignment to return", 85),
        Edit("assignment to return", 130),
        Edit("delete", 131),
    ),
}

_INDENT = b"    "
_RETURN = b"return "
_ASSIGNMENT = b"out = "


def identify(source: bytes) -> Revision | None:
    """Find the known revision with exactly these bytes, or None."""
    sha256 = hashlib.sha256(source).hexdigest()
    return next((revision for revision in KNOWN if revision.sha256 == sha256), None)


def rebuild(source: bytes, name: str) -> bytes:
    """Give the bytes of revision ``name``, made from those of an equal or later known revision.

    Args:
        source: a ``sync_batchnorm.py`` as it is installed.
        name: one of ``REVISION_NAMES``; ``"installed"`` gives ``source`` back unchanged.

    Raises:
        InputError: ``name`` is not allowed, ``source`` is no known revision, or it is an earlier
            revision than the one asked for.

    """
    if name not in REVISION_NAMES:
        raise InputError(f"revision is {name!r}; allowed are {', '.join(REVISION_NAMES)}.")
    if name == "installed":
        return source
    names = [revision.name for revision in KNOWN]
    have = identify(source)
    if have is None:
        raise InputError(
            f"the installed sync_batchnorm.py (sha256 {hashlib.sha256(source).hexdigest()}) is none"
            f" of the revisions that {name!r} can be rebuilt from ("
            + ", ".join(f"{known.name} {known.sha256[:8]}…" for known in KNOWN)
            + "); revision='installed' still runs it as it is."
        )
    want = names.index(name)
    if names.index(have.name) < want:
        raise InputError(
            f"the installed sync_batchnorm.py is {have.name!r} of {have.date}, and {name!r} of "
            f"{KNOWN[want].date} can't be rebuilt from an earlier file; revision='installed' "
            "still runs it as it is."
        )
    for step in range(names.index(have.name), want, -1):
        source = apply_edits(source, _EDITS[names[step]])
        made = hashlib.sha256(source).hexdigest()
        if made != KNOWN[step - 1].sha256:  # a mistake in _EDITS: never hand out a wrong file
            raise RuntimeError(
                f"rebuilding {names[step - 1]!r} gave sha256 {made}, not {KNOWN[step - 1].sha256}"
            )
    return source


def apply_edits(source: bytes, edits: Sequence[Edit]) -> bytes:
    """Make ``edits`` in ``source``; every line that no edit names stays as it is.

    Raises:
        ValueError: an edit doesn't fit its line, so this is not the file it was written for.

    """
    lines = source.splitlines(keepends=True)
    # From the bottom up, so that a deletion leaves the line numbers of the other edits alone.
    for edit in sorted(edits, key=lambda edit: edit.first, reverse=True):
        last = edit.first if edit.last is None else edit.last
        if not 1 <= edit.first <= last <= len(lines):
            raise ValueError(f"{edit} is outside a file of {len(lines)} lines")
        if edit.action == "delete":
            del lines[edit.first - 1 : last]
        else:
            lines[edit.first - 1] = _edit_line(lines[edit.first - 1], edit)
    return b"".join(lines)


def _edit_line(line: bytes, edit: Edit) -> bytes:
    if edit.action == "dedent":
        old, new = _INDENT, b""
        start = 0
    else:
        old, new = _RETURN, _ASSIGNMENT
        if edit.action == "assignment to return":
            old, new = new, old
        start = len(line) - len(line.lstrip(b" "))
    if not line.startswith(old, start):
        raise ValueError(f"{edit} does not fit line {line!r}")
    return line[:start] + new + line[start + len(old) :]
