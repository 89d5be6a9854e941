"""An environment with the real torch 1.2.0 beside the kit's own: ``make torch12``.

torch 1.2.0 has wheels for Python 3.6 and 3.7 alone, so it needs an interpreter, and an
environment, of its own. This module finds the one and makes the other; it imports no torch.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from syncbn_lab import elsewhere
from syncbn_lab.errors import InputError

VARIABLE = "SYNCBN_LAB_TORCH12"
"""Environment variable: path of an interpreter that already has torch 1.2 (container, conda)."""

_ROOT = Path(__file__).resolve().parents[1]
_CHECKOUT = (_ROOT / "pyproject.toml").is_file()
_HOME = Path(os.path.expanduser("~"))  # Path.home() raises where there is none
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or _HOME / ".cache")
FOLDER = _ROOT / ".venv-torch-1.2" if _CHECKOUT else _CACHE / "syncbn-lab" / "torch-1.2"
"""Where the environment is made."""

_CONDAS = [
    *(_HOME / name for name in ("miniconda3", "anaconda3", "miniforge3")),
    Path("/opt/conda"),
]
_MARKER = "made-by-syncbn-lab"  # only a folder with this file is ever emptied; locked by a build
_STAMP = "syncbn-lab-torch-1.2.json"  # written last: what a finished environment has
# Versions with a wheel, best first, and the GB that must be free: at the peak they took 2.2 and
# 2.9 (Python 3.6's pip copies more), and pip's cache may take 0.75 more.
_FREE_GB = {"3.7": 3.0, "3.6": 3.7}
# Of numpy and tqdm the last for both: where an index does not say which Python a file is for,
# the pip of Python 3.6 takes the newest.
_PACKAGES = ("torch==1.2.0", "numpy<1.20", "tqdm<4.63")
_PROBE_SECONDS = 20

# What would lead pip astray, beside what is hidden from every other interpreter.
_HIDDEN = (
    *("__PYVENV_LAUNCHER__", "PIP_REQUIREMENT", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER"),
)

# Runs in Python 2.7 too, so that the refusal of such a one can say what it is.
_PROBE = """
import platform, struct
bits = "%d-bit" % (8 * struct.calcsize("P"))
words = [platform.python_implementation(), platform.python_version(), platform.machine(), bits]
for name in ("venv", "ensurepip"):
    try:
        __import__(name)
        words.append(name)
    except ImportError:
        pass
print(" ".join(words))
"""

_VERIFY = """
import json, platform, warnings
warnings.simplefilter("ignore")
import numpy, torch, tqdm, apex.amp, apex.parallel.sync_batchnorm
assert torch.__version__.partition("+")[0] == "1.2.0", "its torch is " + torch.__version__
assert (torch.ones(2) + 1).tolist() == [2.0, 2.0], "its torch adds 1 and 1 to something else"
try:
    import pkg_resources
    found = {package.key: package.version for package in pkg_resources.working_set}
except ImportError:
    found = {}
versions = {module.__name__: module.__version__ for module in (torch, numpy, tqdm)}
versions["python"] = platform.python_version()
versions["apex"] = found.get("pytorch-extension") or found.get("apex") or "of unknown version"
versions["git_version"] = torch.version.git_version
print(json.dumps(versions))
"""


class Interpreter(NamedTuple):
    """A CPython that torch 1.2.0 has a wheel for and that can make environments."""

    path: Path
    version: str
    found_by: str


def ready_python() -> Path | None:
    """Interpreter that has torch 1.2: the variable's, else the finished environment's, if any."""
    given = os.environ.get(VARIABLE)
    if given:
        # Not resolved: the link in an environment's bin is what makes it that environment's.
        path = Path(os.path.abspath(os.path.expanduser(given)))
        if _executable(path):
            return path
        raise InputError(
            f"{VARIABLE} is {given}, which is no executable file; allowed is the path of a Python "
            "interpreter that has torch 1.2.0 and apex."
        )
    python = FOLDER / "bin" / "python"
    return python if (FOLDER / _STAMP).is_file() and _executable(python) else None


def require_python() -> Path:
    """``ready_python``, or an InputError that says how to get one."""
    python = ready_python()
    if python is None:
        raise InputError(
            "no real torch 1.2 is here; `make torch12` makes an environment with it, or "
            f"{VARIABLE} names an interpreter that has it."
        )
    return python


def require_version(python: Path | str, version: str) -> None:
    """Refuse an interpreter whose torch is another one: what it says is not torch 1.2's."""
    if version.partition("+")[0] != "1.2.0":
        raise InputError(f"{python} has torch {version}; allowed is torch 1.2.0 ({VARIABLE}).")


def find_interpreter(explicit: str | None = None) -> Interpreter:
    """Find a CPython 3.7 or 3.6: the ``explicit`` one or none; else pyenv's, conda's, PATH's."""
    machine = f"{platform.system()} {platform.machine()}"
    if machine not in ("Linux x86_64", "Darwin x86_64", "Darwin arm64"):  # arm64 has Rosetta
        raise InputError(
            f"torch 1.2.0 has wheels for Linux and macOS on x86-64 alone, and this is {machine}; "
            "everything else works from the recorded data in data/torch-1.2."
        )
    if explicit:
        named = os.path.expanduser(explicit)
        path = Path(os.path.abspath(shutil.which(named) or named))
        version, fault = _probe(path)
        if fault:
            raise InputError(f"{explicit} {fault}; allowed is a 64-bit x86 CPython 3.7 or 3.6.")
        return Interpreter(path, version, "given")
    nearly = ""
    for path, found_by in _candidates():
        version, fault = _probe(path)
        if not fault:
            return Interpreter(path, version, found_by)
        if version[:3] in _FREE_GB:
            nearly += f" ({path} {fault}.)"
    raise InputError(
        "torch 1.2.0 needs CPython 3.7 or 3.6, and none was found in pyenv, in conda or on PATH."
        f"{nearly} `pyenv install 3.7.16` brings one, which is then found, and one elsewhere is "
        "given with --python (make: TORCH12_PYTHON=); with conda, `conda env create -f "
        f"data/torch-1.2/environment.yml` makes the whole environment, and {VARIABLE} then names "
        "its interpreter. Everything else works from the recorded data in data/torch-1.2."
    )


def build(explicit: str | None = None, say: Callable[[str], object] = print) -> Path:
    """Make the environment unless it is there, and return its interpreter."""
    ready = ready_python()
    if ready and os.environ.get(VARIABLE):
        if explicit:
            raise InputError(f"{VARIABLE} names {ready}, so none is made; unset it to have one.")
        say(f"{ready}, which {VARIABLE} names, has {_told(_verify(ready))}.")
        return ready
    if ready:
        say(f"{FOLDER} is there, with {_told(json.loads((FOLDER / _STAMP).read_text()))}.")
        return ready
    interpreter = find_interpreter(explicit)
    with _own_folder() as lock:
        if len(list(FOLDER.iterdir())) > 1:
            say(f"{FOLDER} is of a build that was not finished: beginning anew.")
            _empty()
        free, needed = shutil.disk_usage(FOLDER).free / 1e9, _FREE_GB[interpreter.version[:3]]
        if free < needed:
            raise InputError(
                f"torch 1.2.0 needs {needed:g} GB free in {FOLDER.parent}, and {free:.1f} GB "
                f"are; free some, or name an interpreter that has it elsewhere by {VARIABLE}."
            )
        size, disk = ("60 MB", 0.4) if platform.system() == "Darwin" else ("749 MB", 1.5)
        say(
            f"Setting up {FOLDER}, once, with Python {interpreter.version} "
            f"({interpreter.found_by}: {interpreter.path}).\n"
            f"To be downloaded, unless pip has it cached (then {disk} GB on disk):\n"
            f"  torch 1.2.0: {size}\n"
            "  numpy, tqdm and apex (pytorch-extension 0.2): about 15 MB"
        )
        sys.stdout.flush()  # before what pip prints into the same file
        _run([interpreter.path, "-I", "-m", "venv", FOLDER], "make the environment", lock)
        python = FOLDER / "bin" / "python"
        # pip shows progress only where it may say everything else too.
        quiet = [] if sys.stdout.isatty() else ["--quiet"]
        pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "install", *quiet]
        _run([*pip, *_PACKAGES], "install torch 1.2.0", lock)
        hashed = _ROOT / "requirements-apex.txt"
        apex = ["pytorch-extension==0.2"]
        if _CHECKOUT and hashed.is_file():
            apex = ["--require-hashes", "--requirement", str(hashed)]
        _run([*pip, "--no-deps", *apex], "install apex", lock)
        found = {**_verify(python), "date": datetime.date.today().isoformat()}
        part = FOLDER / f"{_STAMP}.part"
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(FOLDER / _STAMP)
    say(f"Finished: {_told(found)}.")
    return python


def _candidates() -> Iterator[tuple[Path, str]]:
    """Paths that may be such interpreters, in order, not yet looked at."""
    roots = [Path(os.environ.get("PYENV_ROOT") or _HOME / ".pyenv")]
    if pyenv := shutil.which("pyenv"):
        roots.append(Path(pyenv).resolve().parents[1])
    for root in dict.fromkeys(roots):
        for minor in _FREE_GB:
            found = root.glob(f"versions/{minor}.*/bin/python")
            for path in sorted(found, key=_numbers, reverse=True):
                yield path, "pyenv"

    active = os.environ.get("CONDA_PREFIX")
    bases = [Path(active), *_CONDAS] if active else _CONDAS
    for folder in dict.fromkeys(one for base in bases for one in (base, *base.glob("envs/*"))):
        for minor in _FREE_GB:
            yield folder / "bin" / f"python{minor}", "conda"

    for name in ("python3.7", "python3.6", "python3", "python"):
        for entry in os.get_exec_path():
            yield Path(os.path.abspath(entry), name), "PATH"


def _probe(python: Path) -> tuple[str, str]:
    """Version of ``python``, and what is wrong with it: a predicate, or nothing."""
    if not _executable(python):
        return "", "is no executable file"
    try:
        # From the root, as `-c` imports what lies in the current folder first.
        answer = _child(
            [python, "-c", _PROBE], cwd="/", capture_output=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "", f"did not answer within {_PROBE_SECONDS} s"
    except OSError as error:
        return "", f"can't be run ({error.strerror})"
    words = answer.stdout.split()
    if answer.returncode or len(words) < 4:
        return "", "does not answer as a Python interpreter does"
    implementation, version, machine, bits, *modules = words
    if implementation != "CPython" or version[:4] not in [f"{minor}." for minor in _FREE_GB]:
        return version, f"is {implementation} {version}"
    if (machine, bits) != ("x86_64", "64-bit"):
        return version, f"is a {bits} CPython {version} for {machine}"
    if missing := " and ".join(name for name in ("venv", "ensurepip") if name not in modules):
        package = f"python{version[:3]}-venv"
        return version, f"lacks {missing} (Debian and Ubuntu have it in {package})"
    return version, ""


@contextlib.contextmanager
def _own_folder() -> Iterator[int]:
    """Make ``FOLDER`` or enter ours, and hold it: yields the file descriptor of the lock."""
    import fcntl  # here, as Windows lacks it and may import the rest

    marker = FOLDER / _MARKER
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        if not marker.exists() and any(FOLDER.iterdir()):
            raise InputError(
                f"{FOLDER} is there, and not of this kit's making: move it away, or name its "
                f"interpreter by {VARIABLE} if it has torch 1.2.0 and apex."
            )
        file = marker.open("a")
    except OSError as error:
        raise InputError(f"{FOLDER} can't be written: {error.strerror}.") from error
    with file:
        try:
            # pip inherits the lock: where only this process was killed, its pip still writes.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"Another build is under way in {FOLDER}; wait for it.") from error
        yield file.fileno()


def _empty() -> None:
    """Remove all of ``FOLDER`` but the marker: it stays ours if this is cut off."""
    for path in FOLDER.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _MARKER:
            path.unlink()


def _run(command: list[Any], what: str, lock: int) -> None:
    """Run one step of the build; a failing one ends in the last lines of its errors."""
    step = _child(command, pass_fds=(lock,), stderr=subprocess.PIPE)
    if step.returncode == 0:
        return
    lines = [line.strip() for line in step.stderr.splitlines() if line.strip()]
    lines = [line for line in lines if line.startswith("ERROR")] or lines
    told = " ".join(lines[-2:]).removesuffix(".") or f"exit code {step.returncode}"
    if step.returncode < 0:
        told = f"{signal.Signals(-step.returncode).name}, as when memory is out (pip may need 3 GB)"
    raise InputError(
        f"Could not {what}: {told}. Mend that and run it again (what pip had downloaded whole, it "
        f"mostly has cached), or name an interpreter that has torch 1.2.0 by {VARIABLE}."
    )


def _verify(python: Path) -> dict[str, str]:
    """Versions of what ``python`` has, after a look at whether it works."""
    try:
        answer = _child([python, "-I", "-c", _VERIFY], capture_output=True)
        why = (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1]
        if answer.returncode == 0:
            versions: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
            return versions
    except (OSError, ValueError, IndexError) as error:  # no Python at all
        why = f"{type(error).__name__}: {error}"
    raise InputError(f"{python} has no torch 1.2.0 and apex that work: {why.rstrip('.')}.")


def _child(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in elsewhere.environment().items() if name not in _HIDDEN
    }
    # A constraint in a configuration file too: Python 3.6's pip takes `torch<3` for `torch==1.2.0`.
    environment["PIP_CONSTRAINT"] = os.devnull
    options |= {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
    return subprocess.run(command, env=environment, **options)


def _told(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "numpy", "apex"))


def _executable(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _numbers(path: Path) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", path.parts[-3])]
