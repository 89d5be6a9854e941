"""Frames for notebooks, made of results; nothing here runs anything."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from syncbn_lab.cases import Case
from syncbn_lab.run_result import RunResult

if TYPE_CHECKING:
    from syncbn_lab.replays import ComparedReplay
    from syncbn_lab.rules.comparison import Compared
    from syncbn_lab.rules.recorder.answers import Answer

ROLES = (
    ("input", "input of the layer"),
    ("mean", "batch mean"),
    ("running_mean", "running mean"),
    ("running_var", "running variance"),
    ("weight", "weight"),
    ("output", "output of the layer"),
    ("grad_output", "gradient received (grad_output)"),
    ("grad_input", "gradient returned for the input"),
    ("grad_weight", "gradient returned for the weight"),
)


class Table(pd.DataFrame):
    """A frame that shows its cells whole and left-aligned: most of them are sentences."""

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            text = self.to_html(
                border=0,
                index_names=False,
                justify="left",
                na_rep="–",
                float_format="{:.3g}".format,
            )
        cell = "text-align:left;vertical-align:top;white-space:normal"
        text = text.replace("<td>", f'<td style="{cell}">').replace("<th>", f'<th style="{cell}">')
        return f'<div style="overflow-x:auto">{text}</div>'


def reported(case: Case | None) -> Table:
    """What was reported, a row a fact; one row that says so for a control."""
    if case is None:
        rows = {"reported": "nothing: this configuration is a control"}
    else:
        where = [case.phase] if case.phase else []
        if case.file:
            where.append(f"{case.file} line {case.line}")
        elif case.phase == "backward":
            where.append("raised by the autograd engine")
        made_of = ", ".join(f"{name} {version}" for name, version in case.environment.items())
        rows = {
            "report": f"{case.title} ({', '.join(filter(None, (case.report, case.date)))})",
            "environment": made_of or "not said",
            "message": case.seen,
            "where": ", ".join(where) or "not said",
            "cause": case.cause.replace("`", ""),
            "cure": case.cure.replace("`", ""),
        }
    return Table({"what was reported": rows})


def runs(**results: RunResult) -> Table:
    """Runs side by side, a column each: outcome, verdict, message, place."""
    columns = {}
    for name, result in results.items():
        columns[name.replace("_", " ")] = {
            "rules": result.experiment.rules,
            "layer": result.experiment.implementation,
            "outcome": result.outcome,
            "verdict": result.verdict,
            "message": result.message or "–",
            "source": result.source or "–",
            "phase": result.phase or "–",
            "place": f"{result.file} line {result.line}" if result.file else "–",
            "in layer": result.module or "–",
            "worst finding": result.findings[0] if result.findings else "–",
        }
    return Table(columns)


def versions(*results: RunResult) -> Table:
    """The same experiment in several torches, a row each, in the order given."""
    return Table([result.row() for result in results]).set_index("torch")


def dtypes(**results: RunResult) -> Table:
    """Dtype and device of the layer's tensors by role, a pair of columns a run."""
    columns: dict[str, dict[str, str]] = {}
    for name, result in results.items():
        devices = {t["device"] for t in result.dtypes.values() if t.get("device")}
        label = name.replace("_", " ") + (f" ({', '.join(sorted(devices))})" if devices else "")
        columns[label] = {
            said: result.dtypes[role]["dtype"] if role in result.dtypes else "–"
            for role, said in ROLES
        }
    return Table(columns)


def operands(result: RunResult) -> Table:
    """The tensors of the failing statement, by the names it uses for them."""
    found = (result.place or {}).get("operands", {})
    return Table(
        [
            {"name": name, "dtype": t["dtype"], "device": t["device"], "shape": tuple(t["shape"])}
            for name, t in found.items()
        ],
        columns=["name", "dtype", "device", "shape"],
    ).set_index("name")


def silent_casts(result: RunResult) -> Table:
    """What torch 1.2 would have refused and today's torch did without a word, counted by place."""
    rows = []
    for cast in result.silent_casts or []:
        if cast["gradient_index"] is None:
            dtypes_in = " × ".join(dtype for dtype, _, _ in cast["operands"])
            does = f"{dtypes_in} → {cast['result_dtype']}"
        else:
            does = f"gradient {cast['got']} → {cast['expected']}"
        in_engine = cast["gradient_index"] is not None or not cast["file"]
        where = "autograd engine" if in_engine else f"{_name(cast['file'])} line {cast['line']}"
        rows.append(
            {
                "phase": cast["phase"],
                "operation": cast["operation"],
                "what happens": does,
                "where": where,
                "values": cast["numel"],
            }
        )
    columns = ["phase", "operation", "what happens", "where", "values"]
    frame = Table(rows, columns=columns)
    grouped = frame.groupby(columns[:4], sort=False, as_index=False)
    counted = grouped.agg(times=("values", "size"), values=("values", "sum"))
    return Table(counted).set_index("operation")


def layers(result: RunResult) -> Table:
    """Every batch norm layer against the float64 oracle: worst error in ulp, and its budget."""
    rows = [
        {
            "layer": layer["name"],
            "quantity": comparison["quantity"],
            "dtype": comparison["dtype"],
            "worst error, ulp": comparison["worst_ulp"],
            "share of its budget": comparison["budget_share"],
            "share of the channel's scale": max(comparison["per_channel"], default=0.0),
        }
        for layer in result.layers
        for comparison in layer["comparisons"]
    ]
    return Table(rows)


def rules(compared: Sequence[Compared]) -> Table:
    """Our rules against a record, a row a rule: how many rows agree, and what the others do."""
    rows = [
        {
            "rule": one.recorded.rule,
            "rows": 1,
            "agree": one.agreement == "agrees",
            "no CPU kernel in torch 1.2": one.agreement == "not comparable",
            "differ, reason known": one.reason is not None,
            "differ, reason not known": one.unexplained,
        }
        for one in compared
    ]
    frame = pd.DataFrame(rows).groupby("rule", sort=True).sum()
    frame.loc["all"] = frame.sum()
    return Table(frame)


def rule_differences(compared: Sequence[Compared]) -> Table:
    """The rows that differ, counted by reason, with the first of each; the unexplained first."""
    kinds: dict[str, list[Compared]] = {}
    for one in compared:
        if one.differs:
            kinds.setdefault(one.reason or "NOT KNOWN", []).append(one)
    rows = [
        {
            "reason": reason,
            "rows": len(group),
            "for example": group[0].recorded.row,
            "torch 1.2 said": _said(group[0].recorded),
            "we say": _said(group[0].ours),
        }
        for reason, group in sorted(kinds.items(), key=lambda kind: kind[0] != "NOT KNOWN")
    ]
    columns = ["reason", "rows", "for example", "torch 1.2 said", "we say"]
    return Table(rows, columns=columns).set_index("reason")


def rule_rows(compared: Sequence[Compared], *names: str) -> Table:
    """Rows by name, as recorded and as ours."""
    found = {one.recorded.row: one for one in compared}
    rows = [
        {
            "row": name,
            "torch 1.2 said": _said(found[name].recorded),
            "we say": "the same" if found[name].agreement == "agrees" else _said(found[name].ours),
        }
        for name in names
        if name in found
    ]
    return Table(rows, columns=["row", "torch 1.2 said", "we say"]).set_index("row")


def replays(compared: Sequence[ComparedReplay]) -> Table:
    """Replays in a real torch 1.2 beside our runs: a row a revision and configuration."""
    groups: dict[tuple[str, str], list[ComparedReplay]] = {}
    for one in compared:
        experiment = one.replay.experiment
        key = experiment.revision, experiment.configuration
        groups.setdefault(key, []).append(one)
    rows = []
    for (revision, configuration), group in groups.items():
        models = [(one.replay.experiment.model, one) for one in group]
        rows.append(
            {
                "revision": revision,
                "configuration": configuration,
                "torch 1.2": _by_model((m, _ended(one.replay)) for m, one in models),
                "place": _by_model((m, _placed(one.replay)) for m, one in models),
                "we": _by_model((m, _agreement(one)) for m, one in models),
            }
        )
    return Table(rows).set_index(["revision", "configuration"])


def _by_model(said: Iterable[tuple[str, str]]) -> str:
    """What holds for every model, said once; else each model's."""
    by_model = dict(said)
    if len(set(by_model.values())) == 1:
        return next(iter(by_model.values()))
    return "; ".join(f"{model}: {text}" for model, text in by_model.items())


def _ended(result: RunResult) -> str:
    return result.message or f"{result.outcome}, {result.verdict}"


def _placed(result: RunResult) -> str:
    if not result.file:
        return result.phase or "–"
    return f"{result.phase}, {_name(result.file)}:{result.line}"


def _agreement(one: ComparedReplay) -> str:
    if one.agrees:
        return "agree"
    how = "; ".join(f"{name}: {ours}" for name, (_, ours) in one.differences.items())
    return f"{'' if one.reason else 'NOT KNOWN why: '}{how}"


def _said(answer: Answer) -> str:
    """A torch's answer to a row in words."""
    if answer.outcome == "result":
        return f"result {answer.result_dtype}"
    return f"{answer.error_type}: {textwrap.shorten(answer.message, 160, placeholder=' …')}"


class SourceView:
    """The source around a place, with the failing statement marked."""

    def __init__(self, result: RunResult, around: int = 6) -> None:
        place = result.place or {}
        text = result.source_text or ""
        first, last = place.get("statement_lines", (0, 0))
        lines = text.splitlines()
        in_source = bool(place) and 0 < first <= len(lines)
        self._rows: list[tuple[int, str, bool]] = []
        if in_source:
            for number in range(max(1, first - around), min(len(lines), last + around) + 1):
                self._rows.append((number, lines[number - 1], first <= number <= last))
        elif place:
            statement = place.get("statement", "").splitlines()
            self._rows = [(first + i, line, True) for i, line in enumerate(statement)]
        self._note = place.get("note")
        self._title = f"{result.file}" if result.file else "no statement to show"

    def __str__(self) -> str:
        rows = [f"{'>' if marked else ' '} {n:4} {line}" for n, line, marked in self._rows]
        return "\n".join([self._title, *rows, *([self._note] if self._note else [])])

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<div style="{_MARKED if marked else _PLAIN}">'
            f"{'&gt;' if marked else ' '}{n:5} {html.escape(line)}</div>"
            for n, line, marked in self._rows
        )
        note = f"<p>{html.escape(self._note)}</p>" if self._note else ""
        return (
            f"<p><b>{html.escape(self._title)}</b></p>"
            '<pre style="overflow-x:auto;line-height:1.35;font-family:monospace">'
            f"{rows}</pre>{note}"
        )


_PLAIN = "border-left:4px solid transparent"
_MARKED = "border-left:4px solid #b45309;font-weight:bold;background:rgba(251,191,36,.18)"


def source(result: RunResult, around: int = 6) -> SourceView:
    """Show the source around the place of an error, at the revision that ran."""
    return SourceView(result, around)


def _name(path: Any) -> str:
    return str(path or "").replace("\\", "/").rsplit("/", 1)[-1]
