"""Results recorded into a notebook as it runs, and read back from the executed file.

A record is one JSON object in a cell's output, under a media type of the kit's own beside a
plain text form, so that it travels with the notebook and no viewer shows it twice.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncbn_lab.errors import InputError
from syncbn_lab.params import Parameters
from syncbn_lab.run_result import RunResult

if TYPE_CHECKING:
    from syncbn_lab.replays import ComparedReplay
    from syncbn_lab.rules.comparison import Compared
    from syncbn_lab.rules.record import Record

MEDIA_TYPE = "application/vnd.syncbn-lab.results+json"
_NARROWEST = 20
"""Characters of a column of ``text_table``."""
NOT_OURS = "holds no results of this kit; run it with papermill first"


def reproduction(
    parameters: Parameters, result: RunResult, today: RunResult, control: RunResult
) -> dict[str, Any]:
    """What repro.ipynb showed, as one flat table of plain values.

    Fields that speak of a report are None for a control, where nothing was reported.
    """
    case = parameters.case
    experiment = result.experiment
    environment = result.environment or today.environment
    return {
        "case": case.case if case else None,
        "opt_level": experiment.opt_level,
        "keep_batchnorm_fp32": experiment.keep_batchnorm_fp32,
        "implementation": experiment.implementation,
        "revision": experiment.revision if experiment.implementation == "apex" else None,
        "rules": experiment.rules,
        "device": experiment.device,
        "world_size": experiment.world_size,
        "model": experiment.model,
        "seed": experiment.seed,
        "outcome": result.outcome,
        "reason": result.reason,
        "verdict": result.verdict,
        "findings": result.findings,
        "phase": result.phase,
        "file": result.file,
        "line": result.line,
        "traceback_line": result.traceback_line,
        "module": result.module,
        "error_type": result.error_type,
        "expected_message": case.seen if case and case.error_type else None,
        "message": result.message,
        "source": result.source,
        "recorded_row": result.recorded,
        "messages_match": result.messages_match if case and case.error_type else None,
        "dtypes": result.dtypes,
        "today": {
            "outcome": today.outcome,
            "verdict": today.verdict,
            "message": today.message,
            "module": today.module,
            "phase": today.phase,
            "file": today.file,
            "line": today.line,
            "silent_casts": len(today.silent_casts or []),
            "findings": today.findings,
        },
        "control": {
            "implementation": control.experiment.implementation,
            "outcome": control.outcome,
            "verdict": control.verdict,
            "message": control.message,
        },
        # The kit's own layer is not there yet; nothing can be said for it.
        "fixed_outcome": None,
        "apex": environment.get("apex"),
        "torch": environment.get("torch"),
        "python": environment.get("python"),
        "input": environment.get("input"),
        "stand_ins": environment.get("stand_ins"),
    }


def comparison(
    torch12: str, record: Record, compared: Sequence[Compared], replays: Sequence[ComparedReplay]
) -> dict[str, Any]:
    """What rules.ipynb showed, as one flat table of plain values.

    ``torch12`` is "recorded" or "live": where torch 1.2's answers come from.
    """
    differ = [one for one in compared if one.differs]
    comparable = sum(one.agreement != "not comparable" for one in compared)
    return {
        "torch12": torch12,
        "provenance": record.provenance,
        "rows": len(compared),
        "comparable": comparable,
        "agree": comparable - len(differ),
        "differ_for_known_reason": sum(one.reason is not None for one in differ),
        "differ_unexplained": [one.recorded.row for one in differ if one.unexplained],
        "replays": len(replays),
        "replays_agree": sum(one.agrees for one in replays),
        "replays_unexplained": [
            one.replay.experiment.describe() for one in replays if one.unexplained
        ],
        "reproduced": sorted(
            {one.replay.case or "" for one in replays if one.replay.outcome == "reproduced"}
        ),
        "torch": replays[0].ours.environment.get("torch") if replays else None,
    }


def record(results: dict[str, Any]) -> None:
    """Record results into the running notebook; outside one, print them as JSON."""
    text = json.dumps(results, indent=1)
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        print(text)
        return
    if get_ipython() is None:
        print(text)
        return
    plain = f"{len(results)} results recorded; `python -m syncbn_lab results FILE` reads them back."
    display({MEDIA_TYPE: results, "text/plain": plain}, raw=True)


def read_results(path: str | Path) -> dict[str, Any]:
    """Read what an executed notebook recorded.

    Raises
    ------
    InputError
        When the file is not there, is not a notebook, or was not executed to its end.
    """
    file = Path(path)
    try:
        notebook = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist.") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read as a notebook: {error}.") from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise InputError(f"{path} is not a notebook: it holds no list of cells.")
    for cell in reversed(cells):
        for output in cell.get("outputs", []):
            found = output.get("data", {}).get(MEDIA_TYPE)
            if found is not None:
                return found
    raise InputError(f"{path} {NOT_OURS}.")


def summary_row(results: dict[str, Any]) -> dict[str, str]:
    """One run as the row that `make repro` prints."""
    today = results["today"]
    keep = results["keep_batchnorm_fp32"]
    place = f"{results['file']}:{results['line']}" if results["file"] else "–"
    then = today["outcome"]
    if today["message"]:
        then += f": {today['message']}"
        if today["module"]:
            then += f" (in {today['module']})"
    else:
        then += f", {today['verdict']}; {today['silent_casts']} silent casts"
    return {
        "configuration": results["opt_level"]
        + ("" if keep is None else f" + keep_batchnorm_fp32={keep}"),
        "outcome": results["outcome"]
        + ("" if results["verdict"] == "not judged" else f", {results['verdict']}"),
        "reported message": results["expected_message"] or "–",
        "message seen": results["message"] or "–",
        "its source": results["source"] or "–",
        "place": f"{results['phase']}, {place}" if results["phase"] else "–",
        "match": results["messages_match"] or "–",
        "today's torch": then,
    }


def text_table(rows: list[dict[str, str]], width: int = 118) -> str:
    """Runs as one plain text table: a column a run, its cells wrapped to share the width.

    Where the columns would grow too narrow to read, the runs go on in a table below.
    """
    if not rows:
        return ""
    names = list(rows[0])
    label = max(len(name) for name in names)
    column = (width - label - 3 * len(rows)) // len(rows)
    if column < _NARROWEST and len(rows) > 1:
        half = len(rows) // 2
        return f"{text_table(rows[:half], width)}\n\n{text_table(rows[half:], width)}"
    column = max(column, 1)
    rule = "─" * label + "".join("─┼─" + "─" * column for _ in rows)
    lines = []
    for name in names:
        cells = [textwrap.wrap(row[name], column) or [""] for row in rows]
        for i in range(max(len(cell) for cell in cells)):
            left = name if i == 0 else ""
            parts = [cell[i] if i < len(cell) else "" for cell in cells]
            lines.append(f"{left:<{label}}" + "".join(f" │ {part:<{column}}" for part in parts))
        lines.append(rule)
    return "\n".join(line.rstrip() for line in lines[:-1])
