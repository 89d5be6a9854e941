"""What running things costs: the main notebook as a whole process, and one more experiment.

Results go into a tidy, append-only CSV, one measurement a row. Times in seconds belong to the
machine they were taken on; what compares between machines is the ratio, taken pair by pair.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from syncbn_lab.errors import InputError

NOTEBOOK = Path("notebooks") / "repro.ipynb"
COLUMNS = (
    *("date", "kit", "python", "torch", "machine", "cores"),
    *("benchmark", "subject", "metric", "unit", "n", "median", "low", "high"),
)
BASELINE = """import matplotlib.pyplot as plt
import pandas
import torch
plt.plot([0, 1], [0, 1]);"""
"""A notebook that only imports torch, pandas and matplotlib and draws one line."""


def notebook_cost(pairs: int) -> list[dict[str, Any]]:
    """Time `papermill repro.ipynb` against the smallest notebook, in turn, as whole processes."""
    import nbformat

    if not NOTEBOOK.is_file():
        raise InputError(f"{NOTEBOOK} is not here; run the benchmark from the repository root.")
    ours, floor = [], []
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "baseline.ipynb"
        cells = [nbformat.v4.new_code_cell(BASELINE)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), small)
        # One of each first, not counted: files come into the disk cache.
        for turn in range(pairs + 1):
            took = _papermill(small, folder), _papermill(NOTEBOOK, folder)
            if turn:
                floor.append(took[0])
                ours.append(took[1])
    return [
        _row("notebook", "baseline notebook", "wall time", "s", floor),
        _row("notebook", "repro.ipynb, defaults", "wall time", "s", ours),
        _row(
            "notebook",
            "repro.ipynb / baseline notebook",
            "ratio",
            "1",
            [mine / base for mine, base in zip(ours, floor, strict=True)],
        ),
    ]


def experiment_cost(repeats: int) -> list[dict[str, Any]]:
    """Time one more experiment from a warm parent, and ten more, with the report-sized toy."""
    from syncbn_lab.experiment import Experiment
    from syncbn_lab.run import run

    rows = []
    for level, implementation in (("O0", "batchnorm"), ("O1", "apex"), ("O2", "apex")):
        experiment = Experiment(opt_level=level, implementation=implementation, model="toy")
        run(experiment)
        one = [_seconds(run, experiment) for _ in range(repeats)]
        ten = [_seconds(_ten_times, run, experiment) for _ in range(max(1, repeats // 5))]
        subject = f"{level}, {implementation}, toy"
        rows.append(_row("experiment", subject, "one more", "s", one))
        rows.append(_row("experiment", subject, "ten more", "s", ten))
    return rows


def append(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Append rows to the CSV; a new file gets its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _papermill(notebook: Path, folder: str) -> float:
    out = Path(folder) / "out.ipynb"
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(notebook), str(out)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - start
    if done.returncode:
        raise RuntimeError(f"papermill {notebook} failed:\n{done.stderr[-2000:]}")
    return took


def _ten_times(work: Any, argument: Any) -> None:
    for _ in range(10):
        work(argument)


def _seconds(work: Any, *arguments: Any) -> float:
    start = time.monotonic()
    work(*arguments)
    return time.monotonic() - start


def _row(
    benchmark: str, subject: str, metric: str, unit: str, values: list[float]
) -> dict[str, Any]:
    from importlib.metadata import version

    from syncbn_lab import __version__

    return {
        "date": datetime.date.today().isoformat(),
        "kit": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "benchmark": benchmark,
        "subject": subject,
        "metric": metric,
        "unit": unit,
        "n": len(values),
        "median": f"{statistics.median(values):.4g}",
        "low": f"{min(values):.4g}",
        "high": f"{max(values):.4g}",
    }
