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
import linecache
from collections.abc import Collection
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch


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


def place_of(
    error: BaseException, targets: Collection[str] = (), skipped: tuple[str, ...] = ()
) -> Place | None:
    """Find where ``error`` was raised.

    The innermost frame in one of the ``targets`` counts; without one, the innermost frame of a
    file whose path does not start with one of ``skipped``. None when there is no such frame.
    """
    frames = list(_frames(error.__traceback__))
    chosen = None
    for frame, lasti, line in frames:
        name = frame.f_code.co_filename
        if name in targets:
            chosen = (frame, lasti, line)
    if chosen is None:
        for frame, lasti, line in frames:
            if not frame.f_code.co_filename.startswith(skipped):
                chosen = (frame, lasti, line)
    if chosen is None:
        return None
    frame, lasti, line = chosen
    code = frame.f_code
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    first, last, names = statement_at(source, line)
    return Place(
        file=code.co_filename,
        line=end_line(code, lasti) or line,
        traceback_line=line,
        function=code.co_qualname,
        statement="\n".join(source.splitlines()[first - 1 : last]),
        statement_lines=(first, last),
        operands=_lookup(frame, names),
    )


def end_line(code: CodeType, lasti: int) -> int | None:
    """Last source line of the instruction at byte offset ``lasti``; None where unknown."""
    positions = list(code.co_positions())
    index = lasti // 2
    if not 0 <= index < len(positions):
        return None
    return positions[index][1]


def current_line(frame: FrameType) -> int:
    """The line that a frame is at, counted by statement."""
    return end_line(frame.f_code, frame.f_lasti) or frame.f_lineno


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


def describe_tensor(value: torch.Tensor) -> dict[str, Any]:
    """Dtype, device and shape of a tensor as plain values."""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "shape": list(value.shape),
    }


def _frames(traceback: TracebackType | None) -> Any:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next


def _lookup(frame: FrameType, names: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        head, _, attribute = name.partition(".")
        value = frame.f_locals.get(head, frame.f_globals.get(head))
        if attribute:
            value = getattr(value, attribute, None) if isinstance(value, torch.nn.Module) else None
        if isinstance(value, torch.Tensor):
            found[name] = describe_tensor(value)
    return found
