"""The place of an error: file, line and operands, counted by statement.

A statement that stands on several lines has several candidate numbers. Python 3.6 and 3.7 name
the last line of the failing expression in a traceback, Python 3.8 and newer the first. A report
from Python 3.6 that says line 109 is the same place as today's traceback that says 108, so the
product counts by statement: the last line of the failing instruction's span (``co_positions``),
with the raw line beside it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from syncbn_lab.messages import dtype_called


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an error was raised."""

    file: str
    line: int
    """Last line of the failing instruction's span: what Python 3.6 and 3.7 report."""
    traceback_line: int
    """What this Python's traceback says."""
    function: str
    statement: str
    """The source text of the whole statement, as it stands."""
    statement_lines: tuple[int, int]
    operands: dict[str, dict[str, Any]]
    """The statement's tensors by the names it uses for them, such as "self.running_mean"."""
    note: str | None = None
    """Why the line is not the one that this Python's traceback names."""


def place_in(frame: dict[str, Any]) -> Place:
    """The place that ``frames.failing_frame`` found, with its statement and operands."""
    source = frame["source"]
    first, last, names = statement_at(source, frame["traceback_line"])
    tensors = frame["tensors"]
    raw = frame["traceback_line"]
    # Python 3.8 to 3.10 don't say where an instruction ends: there its statement counts.
    line = frame["line"] or last
    note = None
    if line != raw:
        note = (
            f"The statement stands on lines {first} to {last}. Python 3.6 and 3.7 name the last "
            f"line in a traceback, {line}; Python 3.8 and newer name the first, so the traceback "
            f"here says {raw}."
        )
    return Place(
        file=frame["file"],
        line=line,
        traceback_line=raw,
        function=frame["function"],
        statement="\n".join(source.splitlines()[first - 1 : last]),
        statement_lines=(first, last),
        operands={name: tensors[name] for name in names if name in tensors},
        note=note,
    )


_REFUSED_GRADIENT = re.compile(
    r"^Function (\w+?)(?:Backward\d*)? returned an invalid gradient at index (\d+) - "
    r"expected type torch\.(?:cuda\.)?(\w+)Tensor but got torch\.(?:cuda\.)?(\w+)Tensor"
)


def place_of_gradient(
    message: str,
    raised: Place | None,
    records: Sequence[Mapping[str, Any]],
    sources: Mapping[str, str],
) -> Place | None:
    """The statement that returned a gradient which the engine then refused.

    The engine raises after backward has returned, so the traceback ends in torch; a user has
    to look at the return statement of the function that the message names. It is found in the
    records of a ``FrameRecorder`` (as plain values). None for any other message.
    """
    found = _REFUSED_GRADIENT.match(message)
    if found is None:
        return None
    function, index, expected, got = found.groups()
    raw_file = Path(raised.file).name if raised else "torch"
    raw_line = raised.traceback_line if raised else 0
    for record in reversed(records):
        if record["function"] == f"{function}.backward":
            source = sources.get(record["file"], "")
            first, last, names = statement_at(source, record["line"])
            return Place(
                file=record["file"],
                line=record["line"],
                traceback_line=raw_line,
                function=record["function"],
                statement="\n".join(source.splitlines()[first - 1 : last]),
                statement_lines=(first, last),
                operands={n: record["tensors"][n] for n in names if n in record["tensors"]},
                note=f"Gradient {index} is {dtype_called(got)} where the input's dtype, "
                f"{dtype_called(expected)}, was expected. The autograd engine refused it after "
                "this statement had returned it; the traceback itself ends at the call that "
                f"started backward, {raw_file} line {raw_line}.",
            )
    if raised is None:
        return None
    note = "The autograd engine refused a gradient of a built-in operation."
    return dataclasses.replace(raised, function=function, operands={}, note=note)


def statement_at(source: str, line: int) -> tuple[int, int, list[str]]:
    """The innermost simple statement around a line: first line, last line, names it reads.

    Of a block statement (with, if, def) the header alone is meant. Names are variables ("mean")
    and attributes of a variable ("self.running_mean"), in order of appearance.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return line, line, []
    best: ast.stmt | None = None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.stmt)
            and node.lineno <= line <= (node.end_lineno or node.lineno)
            and (best is None or node.lineno >= best.lineno)
        ):
            best = node
    if best is None:
        return line, line, []
    first, last = best.lineno, best.end_lineno or best.lineno
    if isinstance(best, ast.Match) or hasattr(best, "body"):
        last = _header_end(best, source.splitlines())
        if line > last:
            # Between the blocks of one statement: "except …:", "else:", "case …:".
            first = last = line
    # An augmented assignment reads its target too; any other assignment does not.
    read = {node.target for node in ast.walk(best) if isinstance(node, ast.AugAssign)}
    names: dict[str, tuple[int, int]] = {}
    for node in ast.walk(best):
        if not isinstance(node, ast.Attribute | ast.Name) or not first <= node.lineno <= last:
            continue
        if not isinstance(node.ctx, ast.Load) and node not in read:
            continue
        if isinstance(node, ast.Name):
            names.setdefault(node.id, (node.lineno, node.col_offset))
        elif isinstance(node.value, ast.Name):
            names.setdefault(f"{node.value.id}.{node.attr}", (node.lineno, node.col_offset))
    return first, last, sorted(names, key=lambda name: names[name])


def _header_end(block: Any, lines: list[str]) -> int:
    """Last line of a block statement's header: the one before its body, or the body's own."""
    inside = block.cases[0].pattern if isinstance(block, ast.Match) else block.body[0]
    starts = [inside, *getattr(inside, "decorator_list", [])]
    last = max(block.lineno, min(node.lineno for node in starts) - 1)
    while last > block.lineno and lines[last - 1].partition("#")[0].strip() == "":
        last -= 1
    return last
