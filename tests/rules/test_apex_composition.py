"""Real apex.amp under the rules gives what the reporters saw."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HAS_APEX = importlib.util.find_spec("apex") and importlib.util.find_spec("tqdm")

BACKWARD = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - "
    "expected type torch.HalfTensor but got torch.FloatTensor"
)
FORWARD = "expected device cpu and dtype Float but got device cpu and dtype Half"

# (opt_level, keep_batchnorm_fp32, the reported SyncBatchNorm or plain BatchNorm2d): message
EXPECTED = {
    ("O0", None, True): "ok",
    ("O1", None, True): BACKWARD,
    ("O2", None, True): FORWARD,
    ("O3", True, True): FORWARD,
    ("O3", None, True): "ok",
    ("O0", None, False): "ok",
    ("O1", None, False): "ok",
    ("O2", None, False): "ok",
    ("O3", True, False): "ok",
    ("O3", None, False): "ok",
}


@pytest.fixture(scope="module")
def answers():
    if not HAS_APEX:
        pytest.skip("real apex is not installed (requirements-apex.txt)")
    if not hasattr(os, "fork"):
        pytest.skip("the experiments run in forked children")
    run = subprocess.run(
        [sys.executable, str(HERE / "apex_child.py"), json.dumps(list(EXPECTED))],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    return {tuple(key): answer for *key, answer in lines}


@pytest.mark.parametrize("key", EXPECTED, ids=str)
def test_the_reported_table(answers, key):
    assert answers[key]["message"] == EXPECTED[key]


def test_where_the_forward_fails(answers):
    """Counted by statement, whatever line today's Python names."""
    answer = answers["O2", None, True]
    assert (answer["phase"], answer["file"], answer["line"]) == (
        "forward",
        "sync_batchnorm.py",
        109,
    )
