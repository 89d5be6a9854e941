"""Sentences that read results: what a notebook says under a table or a figure.

Everything here is computed from the results at hand; nothing is said that they do not show.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncbn_lab.cases import Case
from syncbn_lab.messages import VERBATIM
from syncbn_lab.run_result import RunResult

if TYPE_CHECKING:
    from syncbn_lab.replays import ComparedReplay
    from syncbn_lab.rules.comparison import Compared
    from syncbn_lab.rules.record import Record


class Sentence(str):
    """Text that a notebook renders as Markdown."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)


def outcome(result: RunResult, case: Case | None) -> Sentence:
    """Read the run: what happened, and how near it is to the report."""
    parts = [f"**{_outcome(result)}.** {result.reason}"]
    if result.message:
        parts.append(f"Message ({result.source}): {_code(result.message)}.")
    if result.recorded:
        row, said = _code(result.recorded["row"]), result.recorded["message"]
        said = "exactly this" if result.recorded["match"] == VERBATIM else _code(said)
        parts.append(
            f"It rests on a recorded row: for {row} a real torch 1.2.0 on a CPU said {said}."
        )
    if result.experiment.implementation == "torch" and result.experiment.world_size == 1:
        parts.append(
            "On one rank torch's layer is plain batch norm: this says nothing about its "
            "synchronized path."
        )
    if case is None:
        parts.append("This is a control.")
    elif result.message:
        parts.append(f"It matches the reported message: **{result.messages_match}**.")
    return Sentence(" ".join(parts))


def place(result: RunResult) -> Sentence:
    """Read the place: which operands the failing statement had, and what refused them."""
    if result.place is None:
        what = "The error names no statement" if result.message else "Nothing was raised"
        return Sentence(f"{what}, so there is no place to show. {result.reason}")
    operands = result.place["operands"]
    kinds: dict[str, list[str]] = {}
    for name, tensor in operands.items():
        kinds.setdefault(tensor["dtype"], []).append(f"`{name}`")
    held = "; ".join(
        f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''} {dtype}"
        for dtype, names in kinds.items()
    )
    text = f"The error stands at **{result.file} line {result.line}**"
    first, last = result.place["statement_lines"]
    # After a refused gradient the traceback ends in another file, of which its number speaks.
    if result.traceback_line not in (None, result.line) and first <= result.traceback_line <= last:
        text += f" (this Python's traceback says {result.traceback_line})"
    if result.module:
        text += f", in layer `{result.module}`"
    return Sentence(text + (f". It held {held}." if held else "."))


def today(result: RunResult, now: RunResult) -> Sentence:
    """Read the same experiment under today's rules: what is cast, what it costs, what breaks."""
    casts = now.silent_casts or []
    backward = sum(cast["gradient_index"] is not None for cast in casts)
    torch = now.environment.get("torch", "today's torch")
    text = f"Under the rules of torch {torch} itself: **{_outcome(now)}**. "
    if now.outcome != "completed" and not now.message:
        return Sentence(text + now.reason)
    if casts:
        text += (
            f"Where torch 1.2 would have refused, {len(casts)} operations went through without a "
            f"word, {backward} of them gradients that the autograd engine cast. "
        )
    elif not now.message:
        text += "torch 1.2 would have refused nothing on the way. "
    if now.message:
        where = f" in layer `{now.module}`" if now.module else ""
        breaks = "It breaks later"
        if _same_place(vars(result), vars(now)):
            same = result.message == now.message
            breaks = "It breaks as well" if same else "It breaks at the same place, in other words"
        text += f"{breaks}, in {now.phase}{where}: {_code(now.message)}."
    elif now.findings:
        text += f"It costs: {now.findings[0]}."
    elif now.outcome == "completed":
        text += "Every layer stays within its error budget, so it costs nothing here."
    if result.outcome == "reproduced" and now.outcome == "completed":
        text += " The error is gone; that is not the same as being right."
    return Sentence(text)


def control(result: RunResult, same_run: bool = False) -> Sentence:
    """Say whether the same configuration works without synchronized batch norm.

    ``same_run``: the run that it controls was with plain batch norm already.
    """
    layer = result.experiment.implementation
    if same_run:
        return Sentence(
            "The run above is without synchronized batch norm itself: this is it again."
        )
    if result.outcome == "completed":
        said = f"The same configuration with `{layer}`: completed, {result.verdict}"
        return Sentence(said + (f": {result.findings[0]}." if result.findings else "."))
    return Sentence(f"The same configuration with `{layer}`: {_outcome(result)}. {result.reason}")


def showed(record: dict[str, Any]) -> Sentence:
    """Sum up a recorded run: at most five sentences, most important first."""
    keep = record["keep_batchnorm_fp32"]
    configuration = record["opt_level"] + ("" if keep is None else f" + keep_batchnorm_fp32={keep}")
    lines = []
    name = f"{configuration} with `{record['implementation']}`"
    if record["revision"]:
        name += f" at revision `{record['revision']}`"
    if record["case"] is None:
        lines.append(f"**{name} is a control: {record['outcome']}, {record['verdict']}.**")
    elif record["outcome"] == "reproduced":
        lines.append(
            f"**The reported error happens: {name}, in {record['phase']}, at "
            f"{Path(record['file'] or '').name} line {record['line']}; message "
            f"{record['messages_match']}, {record['source']}.**"
        )
    elif record["expected_message"] is None and record["message"] is None:
        # A silent fault was reported: the verdict is where it shows, or does not.
        finding = f": {record['findings'][0]}" if record["findings"] else ""
        lines.append(
            f"**No error was reported and none is raised; {name}: {record['outcome']}, "
            f"{record['verdict']}{finding}.**"
        )
    else:
        lines.append(f"**The reported error does not happen so: {name}: {record['outcome']}.**")
    if record["message"] and record["outcome"] != "reproduced":
        instead = "" if record["case"] is None else " instead"
        lines.append(f"What was raised{instead}: {_code(record['message'])} ({record['source']}).")
    now = record["today"]
    if now["message"]:
        fails = (
            "fails with the same error"
            if _same_place(record, now) and record["message"] == now["message"]
            else "fails at the same place in other words"
            if _same_place(record, now)
            else "fails elsewhere"
            if record["message"]
            else "fails"
        )
        lines.append(f"Today's torch {fails}, in {now['phase']}: {_code(now['message'])}.")
    else:
        lines.append(
            f"Today's torch: {now['outcome']}, {now['verdict']}, {now['silent_casts']} silent "
            f"casts{': ' + now['findings'][0] if now['findings'] else ''}."
        )
    plain = record["control"]
    lines.append(f"Plain batch norm in its place: {plain['outcome']}, {plain['verdict']}.")
    if record["fixed_outcome"] is None:
        lines.append("This kit's own layer is not there yet, so nothing is said for it.")
    return Sentence("\n".join(f"- {line}" for line in lines))


def real_torch12() -> Sentence:
    """Say what was and what was not run on a real torch 1.2."""
    return Sentence(
        "> **What was run on a real torch 1.2, and what was not.** A message marked `raised by "
        "our rule` is torch 1.2's wording, raised on today's torch by this kit. The rules behind "
        "it were recorded in a real torch 1.2.0 on a CPU (`data/torch-1.2/rules.csv`), with half "
        "tensors too wherever it checks dtypes before it looks for a kernel, as it does in sums, "
        "products and gradients. Half arithmetic does not exist there, so whole training steps "
        "were replayed with (float, double) in the place of (half, float): the three reported "
        "errors appear. CUDA was never run on a real torch 1.2 by this project: for it the "
        "evidence is the same rule, and the report's own text."
    )


def rules(compared: Sequence[Compared], record: Record) -> Sentence:
    """Read the comparison of our rules with a record: how many rows agree, what does not."""
    from syncbn_lab.rules.comparison import AGREES, DIFFERS, NOT_COMPARABLE  # needs torch

    count = collections.Counter(row.agreement for row in compared)
    unexplained = [row.ours.row for row in compared if row.unexplained]
    comparable = len(compared) - count[NOT_COMPARABLE]
    text = (
        f"**{count[AGREES]} of {comparable} comparable rows agree with torch "
        f"{record.provenance['torch']}, in outcome and letter for letter in the message.** "
        f"{count[NOT_COMPARABLE]} rows count for neither side, because its CPU has no kernel for "
        f"them. {count[DIFFERS]} differ, "
    )
    if not unexplained:
        return Sentence(text + "each for a known reason, listed below.")
    shown = ", ".join(_code(row) for row in unexplained[:5])
    return Sentence(f"{text}**{len(unexplained)} of them for no known reason: {shown}.**")


def replays(compared: Sequence[ComparedReplay]) -> Sentence:
    """Read the comparison of our runs with the replays in a real torch 1.2."""
    agree = sum(one.agrees for one in compared)
    known = sum(one.reason is not None for one in compared)
    rest = sum(one.unexplained for one in compared)
    text = (
        f"**{agree} of {len(compared)} replays agree with our run of the same experiment: outcome, "
        "message, phase, place and every dtype.** "
    )
    if known:
        reasons = ", ".join(sorted({one.reason for one in compared if one.reason}))
        text += f"{known} differ in the message alone: {reasons}. "
    text += f"**{rest} differ for no known reason.** " if rest else ""
    judged = [one for one in compared if one.replay.verdict != one.ours.verdict]
    if judged:
        worst = judged[0].replay.findings
        text += (
            f"In {len(judged)} the verdict on the values is another one: torch 1.2's CPU adds up "
            f"one value after the other{f' ({worst[0]})' if worst else ''}."
        )
    return Sentence(text.rstrip())


def compared(results: Mapping[str, Any]) -> Sentence:
    """Sum up the comparison with a real torch 1.2: at most five sentences."""
    provenance = results["provenance"]
    lines = [
        f"**{results['agree']} of {results['comparable']} comparable rows agree with a real torch "
        f"{provenance['torch']} letter for letter; {results['differ_for_known_reason']} differ for "
        f"a known reason, {len(results['differ_unexplained'])} for none.**",
        f"**{results['replays_agree']} of {results['replays']} replays agree in outcome, message, "
        f"place and every dtype; {len(results['replays_unexplained'])} differ for no known "
        "reason.**",
    ]
    if results["reproduced"]:
        cases = ", ".join(f"`{case}`" for case in results["reproduced"])
        lines.append(f"In the real torch 1.2, with the shifted pair, these happen: {cases}.")
    for name in ("differ_unexplained", "replays_unexplained"):
        if results[name]:
            lines.append(f"Without a reason: {', '.join(map(_code, results[name][:5]))}.")
    source = "asked now" if results["torch12"] == "live" else f"recorded on {provenance['date']}"
    lines.append(f"torch 1.2's answers were {source}; ours are of torch {results['torch']}.")
    return Sentence("\n".join(f"- {line}" for line in lines))


def recorded_in(provenance: Mapping[str, str]) -> Sentence:
    """Say where a record comes from."""
    return Sentence(
        f"Recorded on {provenance['date']} in torch {provenance['torch']} (git "
        f"{provenance['torch_git_version'][:10]}), {provenance['python']}, "
        f"{provenance['platform']}; recorder {provenance['recorder_sha256'][:10]}."
    )


def _same_place(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["message"]) and all(one[name] == other[name] for name in ("file", "line"))


def _code(text: str) -> str:
    """Text as Markdown code on one line, whatever backticks it holds itself."""
    text = " ".join(text.split("\n"))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if longest else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _outcome(result: RunResult) -> str:
    return f"completed, {result.verdict}" if result.outcome == "completed" else result.outcome
