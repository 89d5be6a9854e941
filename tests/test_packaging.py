"""The files that install the kit agree with each other, and setup does what it says."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import syncbn_lab
from syncbn_lab import doctor

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
ENVIRONMENT: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())

PYPI_NAME = {"pytorch": "torch", "matplotlib-base": "matplotlib"}
"""conda-forge's name to PyPI's, where they differ."""

NOT_REQUIREMENTS = {"python", "pip"}
"""What an environment.yml names and a pyproject.toml does not, or elsewhere."""

# In pieces, so that this file does not name what no file may name.
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
    )
]


def _lines(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pins() -> dict[str, Version]:
    requirements = [Requirement(line) for line in _lines("constraints.txt")]
    pins = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{requirement} is no pin"
        pins[canonicalize_name(requirement.name)] = Version(specifier.version)
    assert len(pins) == len(requirements), "a package is pinned twice"
    return pins


def _project(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def _conda() -> dict[str, Requirement]:
    lines = [line for line in ENVIRONMENT["dependencies"] if isinstance(line, str)]
    requirements = [Requirement(line) for line in lines]
    return {
        canonicalize_name(PYPI_NAME.get(requirement.name, requirement.name)): requirement
        for requirement in requirements
    }


def _pip_part() -> list[str]:
    (part,) = [part for part in ENVIRONMENT["dependencies"] if isinstance(part, dict)]
    lines: list[str] = part["pip"]
    return lines


# ---- pins ----


def test_every_requirement_has_a_pin_that_it_admits() -> None:
    pins = _pins()
    for name, requirement in _project(*EXTRAS).items():
        assert name in pins, f"{name} has no pin in constraints.txt"
        assert pins[name] in requirement.specifier


def test_constraints_are_sorted_versions_without_hashes_and_without_apex_or_the_kit() -> None:
    names = [canonicalize_name(Requirement(line).name) for line in _lines("constraints.txt")]
    assert names == sorted(names)
    assert "--hash" not in (ROOT / "constraints.txt").read_text()  # breaks every other install
    assert not {"apex", "pytorch-extension", "syncbn-lab", "pip"} & set(names)


def test_what_runs_here_has_the_pinned_versions() -> None:
    """The pins are those of a working environment, torch's build aside."""
    if not os.environ.get("CI"):
        pytest.skip("an environment of one's own may differ from the pins; CI's may not")
    for name in _project(*EXTRAS):
        assert Version(importlib.metadata.version(name).partition("+")[0]) == _pins()[name]


def test_torch_is_developed_at_one_version() -> None:
    assert str(_pins()["torch"]) == "2.13.0"
    assert "torch==2.13.0" in _lines("constraints.txt")  # without +cpu: any build of it


def test_apex_is_pinned_with_its_hash() -> None:
    (line,) = _lines("requirements-apex.txt")
    assert re.fullmatch(r"pytorch-extension==0\.2 --hash=sha256:[0-9a-f]{64}", line)


def test_the_oldest_versions_are_said_once() -> None:
    python = SpecifierSet(PROJECT["requires-python"])
    assert str(python) == ">=" + ".".join(map(str, doctor.MINIMUM_PYTHON))
    assert str(_project()["torch"].specifier) == ">=" + ".".join(map(str, doctor.MINIMUM_TORCH))


# ---- environment.yml ----


def test_environment_and_pyproject_name_the_same_packages() -> None:
    conda = set(_conda()) - NOT_REQUIREMENTS
    assert conda == set(_project("apex", "notebooks"))


def test_environment_admits_the_pins_and_asks_for_no_less_than_pyproject() -> None:
    pins, project = _pins(), _project("apex", "notebooks")
    for name, requirement in _conda().items():
        if name not in NOT_REQUIREMENTS:
            assert pins[name] in requirement.specifier
            assert requirement.specifier == project[name].specifier
    assert _conda()["python"].specifier == SpecifierSet(PROJECT["requires-python"])


def test_environment_ends_in_apex_and_an_editable_install() -> None:
    apex = _lines("requirements-apex.txt")[0].partition(" ")[0]
    assert _pip_part() == [apex, "-e ."]
    assert ENVIRONMENT["dependencies"][-1] == {"pip": _pip_part()}
    assert "pip" in ENVIRONMENT["dependencies"]
    assert "conda-forge" in ENVIRONMENT["channels"]
    assert "nvidia-apex" in (ROOT / "environment.yml").read_text()  # the GPU variant, in a comment


# ---- what is stored ----


def test_versions_agree() -> None:
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == version
    assert getattr(syncbn_lab, "__version__", version) == version


def test_no_file_names_a_package_registry() -> None:
    """Registries are a setting of whoever installs, mirrors included."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of tracked files")
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    naming = [
        (name, host)
        for name in listed.split("\0")
        if name and (ROOT / name).is_file()
        for host in REGISTRY_HOSTS
        if host.encode() in (ROOT / name).read_bytes()
    ]
    assert naming == []


@pytest.mark.parametrize(
    "notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name
)
def test_notebooks_are_stored_clean(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert "papermill" not in content["metadata"]


# ---- the core needs torch alone ----


def _with_dependencies(name: str) -> set[str]:
    """Names of ``name`` and all that it needs here."""
    found: set[str] = set()
    wanted = [name]
    while wanted:
        package = canonicalize_name(wanted.pop())
        if package in found:
            continue
        found.add(package)
        for line in importlib.metadata.requires(package) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


def test_an_ordinary_install_without_dependencies_works_beside_torch_alone(tmp_path: Path) -> None:
    """What `pip install --no-deps` does in somebody's own container."""
    site, beside = tmp_path / "site", tmp_path / "beside"
    install = ["install", "-qq", "--no-deps", "--no-compile", "--target", str(site), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    for folder in ("reported", "torch-1.2"):
        stored = {path.name for path in (ROOT / "data" / folder).iterdir()}
        assert {path.name for path in (site / "syncbn_lab/data" / folder).iterdir()} == stored

    beside.mkdir()
    for name in _with_dependencies("torch"):
        package = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in package.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            (beside / top).symlink_to(Path(str(package.locate_file(top))))
    command = [sys.executable, "-S", "-m", "syncbn_lab", "doctor"]  # -S: without site-packages
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{beside}"}
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stderr == ""
    assert answer.returncode == 0, answer.stdout
    assert re.search(r"^ok +torch ", answer.stdout, re.M)
    assert re.search(r"^note +apex +no apex is installed", answer.stdout, re.M)
    assert re.search(r"^note +notebook packages +missing: jupyterlab, ", answer.stdout, re.M)

    # No apex is needed for this one, and without PyYAML no case can be looked up.
    options = "--opt-level autocast-bf16 --implementation batchnorm --rules installed --model toy"
    command = [sys.executable, "-S", "-m", "syncbn_lab", "run", *options.split()]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "completed, right" in answer.stdout


# ---- make ----

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@needs_make
def test_make_alone_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    declared = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.M)[0].split())
    answer = _make()
    assert answer.returncode == 0
    assert set(re.findall(r"^make (\w+)", answer.stdout, re.M)) == declared


@needs_make
def test_setup_without_a_suitable_python_says_so_in_one_sentence(tmp_path: Path) -> None:
    answer = _make("setup", f"VENV={tmp_path / 'venv'}", "PYTHON=/no/such/python")
    assert answer.returncode != 0
    assert answer.stdout == ""
    sentence, *rest = answer.stderr.splitlines()
    assert sentence == (
        "Setup needs Python 3.11 or newer with its venv module, and none of /no/such/python is "
        "one: name another with PYTHON=/path/to/python3."
    )
    assert all(line.startswith("make: ***") for line in rest)


@needs_make
def test_setup_with_a_python_without_venv_names_the_package_that_brings_it(tmp_path: Path) -> None:
    """As on Debian, where ensurepip is a package of its own."""
    python = tmp_path / "python3"
    (tmp_path / "ensurepip.py").write_text("raise ImportError('not packaged')")
    script = f"PYTHONPATH='{tmp_path}' exec '{sys.executable}'"
    python.write_text(f'#!/bin/sh\n{script} "$@"\n')
    python.chmod(0o755)
    answer = _make("setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert answer.returncode != 0
    assert (
        f"{python} has no venv module (Debian and Ubuntu: apt install python3-venv)"
        in (answer.stderr.splitlines()[0])
    )
    assert not (tmp_path / "venv").exists()


@pytest.fixture
def finished_setup(tmp_path: Path) -> Path:
    """Make a set-up environment whose interpreter notes its calls and fails in O2."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(
        f"""#!/bin/sh
echo "$*" >>'{tmp_path}/calls'
case "$*" in
  *papermill*O2) echo "InputError: the reason"; exit 1 ;;
  *papermill*) echo run >"$5" ;;
  *results*) echo "the table of $*" ;;
esac
"""
    )
    python.chmod(0o755)
    (venv / "syncbn-lab-is-set-up").touch()
    return tmp_path


@needs_make
def test_a_failing_level_loses_nothing_of_the_others(finished_setup: Path) -> None:
    runs = finished_setup / "runs"
    answer = _make("repro", f"VENV={finished_setup / 'venv'}", f"RUNS={runs}")
    assert answer.returncode != 0
    assert "failed: O2" in answer.stderr
    assert "InputError: the reason" in answer.stdout
    o1, o3 = runs / "repro-O1.ipynb", runs / "repro-O3.ipynb"
    tables = [line for line in answer.stdout.splitlines() if line.startswith("the table of")]
    begin = "the table of -m syncbn_lab results --table"
    assert tables == [f"{begin} {o1}", f"{begin} {o3}", f"{begin} {o1} {o3}"]
    assert o1.exists()
    assert o3.exists()
    calls = (finished_setup / "calls").read_text().splitlines()
    assert not any("pip" in call for call in calls)  # a second make installs nothing


@needs_make
def test_one_level_alone(finished_setup: Path) -> None:
    runs = finished_setup / "runs"
    venv = finished_setup / "venv"
    answer = _make("repro", "OPT_LEVEL=O3", f"VENV={venv}", f"RUNS={runs}")
    assert answer.returncode == 0, answer.stderr
    assert [path.name for path in sorted(runs.iterdir())] == ["repro-O3.ipynb", "repro-O3.log"]
