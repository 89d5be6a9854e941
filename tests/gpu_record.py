"""A record of the last run of the GPU tests, which CI can't make: it has no GPU.

On a machine with an NVIDIA GPU, from the repository root:

    pytest -m gpu --gpu-record data/gpu/tests.json

The record names every GPU test with its outcome, the card, the versions, the date, and the hash
of the kernels that the tests ran. ``test_gpu_record.py`` fails where it no longer fits.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "data" / "gpu" / "tests.json"


def kernels_hash() -> str | None:
    """One hash of all files in kernels/, names included; None while there are none."""
    files = sorted(path for path in (ROOT / "kernels").rglob("*.cu*") if path.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="FILE", help="write a record of the GPU tests here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = (
        "needs an NVIDIA GPU, and torch sees none here; the last run on one is recorded in "
        "data/gpu/tests.json"
    )
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--gpu-record"):
        config.pluginmanager.register(_Recorder(config), "gpu-recorder")


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self.path = Path(config.getoption("--gpu-record"))
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" not in report.keywords:
            return
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        import torch

        record = {
            "date": datetime.date.today().isoformat(),
            "card": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "capability": list(torch.cuda.get_device_capability()),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "python": platform.python_version(),
            "kernels": kernels_hash(),
            "tests": dict(sorted(self.outcomes.items())),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n")
