"""What is installed here, and each trap with its cure: ``python -m syncbn_lab doctor``.

Everything is found from files and package metadata where that is enough, so that it works with
torch alone, with a broken torch and with none. apex is never imported; torch is, in a process of
its own: a torch that crashes can't take the doctor with it, and asking it for GPUs leaves this
process fit to fork children that use CUDA.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json as jsonlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from syncbn_lab import real_torch12
from syncbn_lab.errors import InputError

MINIMUM_PYTHON = (3, 11)
MINIMUM_TORCH = (2, 11)

_NOTEBOOK_PACKAGES = (
    "jupyterlab",
    "papermill",
    "nbconvert",
    "pandas",
    "matplotlib",
    "ipykernel",
    "PyYAML",
    "pillow",
)
_SHADOWED = ("torch", "apex", "numpy", "pandas", "matplotlib", "papermill")
_SAMPLE_PHOTO = Path("mpl-data", "sample_data", "grace_hopper.jpg")
_ENOUGH_MEMORY_GIB = 2.0
_INSTALL_NOTEBOOKS = (
    "In the checkout, `pip install -c constraints.txt -e '.[notebooks]'` brings what is missing."
)
_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    found: str
    status: Literal["ok", "note", "trap"]
    """A note is worth knowing; a trap makes something fail, or silently be another thing."""
    cure: str = ""
    """One sentence that says what to do; empty where there is nothing to do."""


def examine() -> list[Check]:
    """Look at this interpreter's environment and at the current folder; takes some seconds."""
    shadows = _shadows()
    torch_check, probe = _torch("torch" in {path.stem for path in shadows})
    return [
        _python(),
        _kit(),
        torch_check,
        _gpu(probe),
        _apex(),
        _torch12(),
        _torch_copies(),
        _shadowing(shadows),
        _notebook_packages(),
        _kernelspec(),
        _photo(),
        _fork(),
        _machine(),
    ]


def report(checks: Sequence[Check]) -> str:
    """Format ``checks`` as a plain text table, at most 100 columns wide."""
    indent = 6 + 2 + max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        head = f"{check.status:<6}{check.name:<{indent - 6}}"
        lines += _wrapped(check.found, head, " " * indent)
        if check.cure:
            lines += _wrapped(check.cure, " " * indent + "cure: ", " " * (indent + 6))
    traps = sum(check.status == "trap" for check in checks)
    notes = sum(check.status == "note" for check in checks)
    lines += ["", f"{_count(traps, 'trap')}, {_count(notes, 'note')}."]
    return "\n".join(lines)


def to_json(checks: Sequence[Check]) -> str:
    """Give ``checks`` as a JSON array of objects with the fields of ``Check``."""
    return jsonlib.dumps([dataclasses.asdict(check) for check in checks], indent=2)


def main(json: bool = False) -> int:
    """Examine, print, and return the exit code: 0 without a trap, else 1."""
    checks = examine()
    print(to_json(checks) if json else report(checks))
    return int(any(check.status == "trap" for check in checks))


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    found = f"{version}, {sys.executable}"
    if sys.version_info < MINIMUM_PYTHON:
        return Check("Python", found, "trap", "Use Python 3.11 or newer.")
    return Check("Python", found, "ok")


def _kit() -> Check:
    folder = Path(__file__).parent
    version = _version("syncbn-lab")
    if version is None:
        cure = "Fine from the checkout's root; elsewhere, `pip install --no-deps -e .` there first."
        return Check("syncbn-lab", f"not installed, used from {folder}", "note", cure)
    return Check("syncbn-lab", f"{version}, in {folder}", "ok")


def _torch(shadowed: bool) -> tuple[Check, dict[str, Any] | None]:
    """Examine the torch under test; what it told of itself comes too, unless it did not import."""
    name = "torch"
    if shadowed:
        return Check(name, "not looked at, because a file here stands in its way", "note"), None
    if importlib.util.find_spec("torch") is None:
        cure = "Run `make setup` in the checkout, or install torch 2.11 or newer with pip or conda."
        return Check(name, "not installed", "trap", cure), None
    probe = _probe_in_child()
    if "error" in probe:
        found = f"{_version('torch') or 'unknown version'}, does not import: {probe['error']}"
        cure = (
            "Reinstall it, and only one of it: `pip uninstall torch` until none is left, then "
            "install it again (`make distclean setup` in the checkout)."
        )
        return Check(name, found, "trap", cure), None
    found = f"{probe['version']}, {_build(probe)}, in {probe['folder']}"
    if _numbers(probe["version"])[:2] < MINIMUM_TORCH:
        cure = "Use torch 2.11 or newer: `pip install --upgrade torch`."
        return Check(name, f"{found}: too old", "trap", cure), probe
    return Check(name, found, "ok"), probe


def _gpu(probe: dict[str, Any] | None) -> Check:
    name = "GPU"
    seen = _nvidia_smi()
    devices = probe["devices"] if probe else []
    broken = [device for device in devices if device["error"]]
    if broken:
        found = "; ".join(f"{device['name']} fails: {device['error']}" for device in broken)
        cure = (
            "Install a torch build made for this GPU and its driver, or hide the GPU with "
            "`CUDA_VISIBLE_DEVICES=`."
        )
        return Check(name, found, "trap", cure)
    if devices and probe:
        found = "; ".join(
            f"{device['name']}, capability {device['capability']}, {device['memory_gib']} GiB"
            for device in devices
        )
        drivers = sorted({driver for _, driver in seen})
        found += f"; {_build(probe)}" + (f", driver {', '.join(drivers)}" if drivers else "")
        return Check(name, found, "ok")
    if not seen:
        found = (
            "none that torch can use: `-p device cuda` and NCCL do not run here; the main job does"
        )
        return Check(name, found, "note")
    found = "; ".join(f"{gpu}, driver {driver}" for gpu, driver in seen)
    if probe is None:
        return Check(name, f"{found}, of no use without a working torch", "note")
    if probe["cuda"] is None:
        cure = (
            "Install the CUDA build: `make distclean setup` in the checkout takes it where "
            "nvidia-smi sees a GPU; elsewhere `pip uninstall torch`, then install it again."
        )
        return Check(name, f"{found}, beside a torch that is a {_build(probe)}", "trap", cure)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not probe["warning"]:
        found += f", hidden from torch by CUDA_VISIBLE_DEVICES={hidden!r}"
        return Check(name, found, "note", "Unset CUDA_VISIBLE_DEVICES to use it.")
    found += f", but torch ({_build(probe)}) can't use it: {probe['warning'] or 'no reason given'}"
    cure = "Update the driver, or install the torch build for the CUDA version that it supports."
    return Check(name, found, "trap", cure)


def _apex() -> Check:
    from syncbn_lab.implementations.apex import find_apex

    info = find_apex()
    status: Literal["ok", "note", "trap"]
    if info.status == "usable":
        status = "ok" if info.revision and info.kernel_known else "note"
    else:
        # Without any apex only its own cases can't run; another one in its name misleads.
        status = "note" if info.status == "absent" else "trap"
    return Check("apex", info.sentence().removesuffix("."), status, info.cure or "")


def _torch12() -> Check:
    name = "torch 1.2"
    try:
        python = real_torch12.ready_python()
    except InputError as error:
        return Check(name, str(error), "trap", f"Correct {real_torch12.VARIABLE}, or unset it.")
    if python is None:
        cure = (
            "`make torch12` in the checkout makes one; without it the recorded answers are shown."
        )
        return Check(name, "no real torch 1.2 beside this one", "note", cure)
    return Check(name, f"real, in {python}", "ok")


def _torch_copies() -> Check:
    """Find more than one torch: which one is imported, and which files it gets, is then chance."""
    name = "copies of torch"
    copies = {}
    for package in importlib.metadata.distributions(name="torch"):
        folder = os.path.realpath(str(package.locate_file("")))
        installer = (package.read_text("INSTALLER") or "unknown installer").strip()
        copies[(folder, package.version)] = installer
    told = [f"{version} ({how}) in {where}" for (where, version), how in copies.items()]
    by_conda = sorted(Path(sys.prefix, "conda-meta").glob("pytorch-[0-9]*.json"))
    if by_conda and "pip" in copies.values():
        told.append(f"conda's record {by_conda[0].name}")
    if len(told) < 2:
        return Check(name, _count(len(told), "copy", "copies"), "ok")
    cure = (
        "Keep one: `pip uninstall torch` until none is left (and `conda remove pytorch` if conda "
        "installed one), take other folders off PYTHONPATH, then install it once."
    )
    return Check(name, "; ".join(told), "trap", cure)


def _shadows() -> list[Path]:
    """Files and packages in the current folder that Python imports in place of installed ones."""
    here = Path.cwd()
    if here.name in ("site-packages", "dist-packages"):
        return []
    files = [here / f"{name}.py" for name in _SHADOWED]
    packages = [here / name for name in _SHADOWED if (here / name / "__init__.py").is_file()]
    return [path for path in [*files, *packages] if path.exists()]


def _shadowing(shadows: Sequence[Path]) -> Check:
    name = "current folder"
    if not shadows:
        return Check(name, f"{Path.cwd()}, nothing in it hides a package", "ok")
    found = f"{', '.join(map(str, shadows))}: imported in place of the installed package"
    return Check(name, found, "trap", "Rename it, or work in another folder.")


def _notebook_packages() -> Check:
    name = "notebook packages"
    versions = {package: _version(package) for package in _NOTEBOOK_PACKAGES}
    found = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    missing = ", ".join(package for package, version in versions.items() if not version)
    if not missing:
        return Check(name, found, "ok")
    found = f"{found}; missing: {missing}" if found else f"missing: {missing}"
    return Check(name, found, "note", _INSTALL_NOTEBOOKS)


def _kernelspec() -> Check:
    """Ask jupyter which interpreter the kernel ``python3`` starts, and that one where it lives."""
    name = "kernel python3"
    try:
        from jupyter_client.kernelspec import NoSuchKernel
        from jupyter_client.manager import KernelManager
    except ImportError:
        return Check(name, "no jupyter_client, so no kernels", "note", _INSTALL_NOTEBOOKS)
    manager = KernelManager(kernel_name="python3")
    try:
        command = manager.format_kernel_cmd()[0]
        folder = manager.kernel_spec.resource_dir  # type: ignore[union-attr]
    except NoSuchKernel:
        return Check(name, "no such kernel", "trap", "Install ipykernel: it brings the kernel.")
    ask = "import sys; print(sys.prefix); print(*sys.version_info[:3], sep='.')"
    cure = (
        f"Delete {folder} (`jupyter kernelspec list` shows what takes its place), or set "
        "JUPYTER_PREFER_ENV_PATH=1 and unset JUPYTER_PATH."
    )
    try:
        answer = subprocess.run(
            [command, "-c", ask], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, f"{folder} starts {command}: {_sentence(error)}", "trap", cure)
    prefix, version = answer.stdout.split("\n")[:2]
    if os.path.realpath(prefix) != os.path.realpath(sys.prefix):
        found = f"{folder} starts another interpreter: Python {version} of {prefix}"
        return Check(name, found, "trap", cure)
    return Check(name, f"{folder}, starts this interpreter", "ok")


def _photo() -> Check:
    """Look for matplotlib's sample photograph, the main job's input."""
    name = "sample photo"
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return Check(name, "no matplotlib, which ships it", "note", _INSTALL_NOTEBOOKS)
    photo = Path(spec.origin).parent / _SAMPLE_PHOTO
    if photo.is_file():
        return Check(name, f"{photo.name}, among matplotlib's samples", "ok")
    cure = "Install matplotlib from PyPI or conda-forge: system packages may leave its samples out."
    return Check(name, f"{photo} is missing", "trap", cure)


def _fork() -> Check:
    name = "fork"
    if sys.platform == "linux":
        return Check(name, "available: experiments run in forked children", "ok")
    found = f"not reliable on {sys.platform}, and experiments run in forked children"
    return Check(name, found, "note", "Run experiments on Linux, in WSL or in a Linux container.")


def _machine() -> Check:
    name = "machine"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    free = _free_memory_gib()
    told = "unknown free memory" if free is None else f"{free:.1f} GiB of memory free"
    found = f"{_count(cores or 1, 'core')}, {told}, {sys.platform}"
    if free is not None and free < _ENOUGH_MEMORY_GIB:
        cure = f"Free some memory: below {_ENOUGH_MEMORY_GIB:g} GiB a run may be killed."
        return Check(name, found, "note", cure)
    return Check(name, found, "ok")


def _free_memory_gib() -> float | None:
    """Memory that a new process may use: the machine's, or less in a limited container."""
    bounds = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        bounds.append(int(re.findall(r"MemAvailable: *(\d+) kB", meminfo)[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        bounds.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):  # "max", not Linux, or another kind of cgroup
        pass
    return min(bounds) / 2**30 if bounds else None


def _probe_in_child() -> dict[str, Any]:
    """Import torch in a process of its own with this one's path: what it tells, or an error."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "from syncbn_lab.doctor import _probe; _probe()"
    )
    command = [sys.executable, "-c", code, jsonlib.dumps(sys.path)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired as error:
        return {"error": f"no answer within {error.timeout:g} s"}
    lines = child.stdout.splitlines()
    if child.returncode < 0:
        return {"error": f"the process died of {signal.Signals(-child.returncode).name}"}
    if child.returncode or not lines:
        return {"error": (child.stderr.strip() or "it ended the process").splitlines()[-1]}
    answer: dict[str, Any] = jsonlib.loads(lines[-1])
    return answer


def _probe() -> None:
    """Print, as one line of JSON, what torch tells of itself; runs in the child process."""
    try:
        import torch

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        answer: dict[str, Any] = {
            "version": str(torch.__version__),
            "folder": str(Path(torch.__file__).parent),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "warning": _first_line(str(caught[-1].message)) if caught else "",
            "devices": [_device(torch, index) for index in range(count)],
        }
    except Exception as error:  # a broken torch fails in any way: a missing library, a name
        answer = {"error": _sentence(error)}
    print(jsonlib.dumps(answer))


def _device(torch: Any, index: int) -> dict[str, Any]:
    """Describe one GPU, after a small operation on it: only that proves that this build can."""
    properties = torch.cuda.get_device_properties(index)
    try:
        torch.ones(2, device=f"cuda:{index}").add(1).sum().item()
        error = ""
    except Exception as failure:
        error = _sentence(failure)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30),
        "error": error,
    }


def _nvidia_smi() -> list[tuple[str, str]]:
    """Name and driver of each NVIDIA GPU that the driver sees, whatever torch thinks."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rpartition(", ") for line in answer.stdout.splitlines() if ", " in line]
    return [(gpu, driver) for gpu, _, driver in rows]


def _build(probe: dict[str, Any]) -> str:
    if probe["cuda"]:
        return f"CUDA {probe['cuda']} build"
    return f"ROCm {probe['hip']} build" if probe["hip"] else "CPU build"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
