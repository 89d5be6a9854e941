"""The benchmark measures the real thing and appends tidy rows; its figures are not judged here."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from syncbn_lab import bench
from syncbn_lab.__main__ import main

ROOT = Path(__file__).resolve().parents[1]


def test_experiments_are_timed() -> None:
    rows = bench.experiment_cost(2)
    assert [row["metric"] for row in rows] == ["one more", "ten more"] * 3
    one, ten = (float(row["median"]) for row in rows[:2])
    # Ten runs take longer than one, and no run takes no time.
    assert 0 < one < ten


def test_rows_are_appended_under_one_header(tmp_path: Path) -> None:
    row = bench._row("a benchmark", "a subject", "wall time", "s", [3.0, 1.0, 2.0])
    assert (row["n"], row["median"], row["low"], row["high"]) == (3, "2", "1", "3")
    path = tmp_path / "new" / "runs.csv"
    bench.append([row], path)
    bench.append([row, row], path)
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_the_committed_measurements_are_tidy() -> None:
    with (ROOT / "data" / "bench" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert set(rows[0]) == set(bench.COLUMNS)
    assert all(float(row["low"]) <= float(row["median"]) <= float(row["high"]) for row in rows)


def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--repeats", "0"]) == 1
    assert "--repeats is 0; allowed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bench.InputError, match="from the repository root"):
        bench.notebook_cost(1)
