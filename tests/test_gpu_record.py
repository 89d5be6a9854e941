"""The committed record of the GPU tests fits the tests and the kernels of today."""

from __future__ import annotations

import json
import subprocess
import sys

from gpu_record import RECORD, ROOT, kernels_hash


def test_the_record_names_today_s_gpu_tests_and_all_passed() -> None:
    record = json.loads(RECORD.read_text())
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert listing.returncode == 0, listing.stdout + listing.stderr
    collected = {line for line in listing.stdout.splitlines() if "::" in line}
    assert collected
    how = "run `pytest -m gpu --gpu-record data/gpu/tests.json` on a GPU"
    assert set(record["tests"]) == collected, how
    assert set(record["tests"].values()) == {"passed"}, how
    assert record["card"]
    assert record["torch_cuda"]


def test_the_kernels_are_those_of_the_record() -> None:
    record = json.loads(RECORD.read_text())
    assert record["kernels"] == kernels_hash(), (
        "kernels/ changed after the last recorded run of the GPU tests: run them again"
    )
