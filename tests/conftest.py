"""What several test files share: real runs, made once."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import syncbn_lab as lab
from syncbn_lab import run as _run
from syncbn_lab.real_torch12 import ready_python

pytest_plugins = ("gpu_record",)

RUNS = {
    # The three reported configurations, each ending in the reported error.
    "o1": {"opt_level": "O1"},
    "o2": {"opt_level": "O2"},
    "o3_keep": {"opt_level": "O3", "keep_batchnorm_fp32": True},
    # The same under today's rules: one completes with silent casts, one breaks later.
    "o1_today": {"opt_level": "O1", "rules": "installed"},
    "o2_today": {"opt_level": "O2", "rules": "installed"},
    # The same error under both rules, and not the reported one.
    "cast_added": {"opt_level": "O2", "revision": "cast-added"},
    "cast_added_today": {"opt_level": "O2", "revision": "cast-added", "rules": "installed"},
    # Controls: a right one, one in half precision, one that raises.
    "plain": {"opt_level": "O0", "implementation": "batchnorm"},
    "half": {"opt_level": "O3"},
    "single": {"opt_level": "O0"},
    "control_raises": {"opt_level": "O0", "revision": "cast-added"},
    # An end without an error: the time limit is shorter than any run.
    "timed_out": {"opt_level": "O2", "time_limit": 0.01},
}
"""The toy is the smallest model that shows all of them."""


def pytest_report_header():
    """Say whether a real torch 1.2 is asked, or its record alone."""
    python = ready_python()
    if python is None:
        return "torch 1.2: none here (`make torch12`), tested against the record alone"
    return f"torch 1.2: live, in {python}, and against the record"


@pytest.fixture(scope="session")
def runs():
    """Real results by name: ``RUNS``, and one whose process was killed under way."""
    made = {name: _run(lab.Experiment(model="toy", **fields)) for name, fields in RUNS.items()}
    made["died"] = _killed_run()
    return made


def _killed_run():
    """A run of a million steps, whose process is killed as the kernel does when memory is out."""
    from syncbn_lab.warm import warm_parent

    parent = warm_parent()._process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    if not children.exists():
        pytest.skip("finding the child of the warm parent needs Linux's /proc")
    found = []
    experiment = lab.Experiment(model="toy", implementation="batchnorm", steps=10**6)
    thread = threading.Thread(target=lambda: found.append(_run(experiment)))
    thread.start()
    deadline = time.monotonic() + 30
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.005)
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)
    thread.join(30)
    return found[0]
