"""The doctor tells what is here, and each trap that is really laid for it, with its cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from syncbn_lab import doctor
from syncbn_lab.doctor import Check

ROOT = Path(__file__).parents[1]


def _examine(
    folder: Path, *paths: Path, options: tuple[str, ...] = (), **environment: str
) -> dict[str, Check]:
    """Examine from ``folder``, with ``paths`` ahead of what is installed, in a new process."""
    code = "import sys; from syncbn_lab import doctor; sys.exit(doctor.main(json=True))"
    answer = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert answer.stderr == ""
    checks = [Check(**fields) for fields in json.loads(answer.stdout)]
    trapped = any(check.status == "trap" for check in checks)
    assert answer.returncode == int(trapped)
    assert all(check.cure for check in checks if check.status == "trap")
    return {check.name: check for check in checks}


def _package(folder: Path, name: str, source: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


# ---- here ----


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    return _examine(tmp_path_factory.mktemp("here"))


def test_it_names_the_torch_under_test(here: dict[str, Check]) -> None:
    import torch

    assert here["torch"].status == "ok"
    assert str(torch.__version__) in here["torch"].found
    assert str(Path(torch.__file__).parent) in here["torch"].found


def test_it_names_the_gpu_or_what_does_not_run_without_one(here: dict[str, Check]) -> None:
    import torch

    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in here["GPU"].found
    elif here["GPU"].status == "note":
        assert "`-p device cuda`" in here["GPU"].found


def test_it_tells_apex_and_the_notebook_stack(here: dict[str, Check]) -> None:
    from syncbn_lab.implementations.apex import find_apex

    assert here["apex"].found == find_apex().sentence().removesuffix(".")
    assert here["notebook packages"].status == "ok"
    assert here["sample photo"].status == "ok"


def test_the_kernel_is_this_interpreter(tmp_path: Path) -> None:
    """As `make` runs it: the environment's own kernelspec goes before the user's."""
    environment = {"JUPYTER_PREFER_ENV_PATH": "1", "JUPYTER_PATH": ""}
    assert _examine(tmp_path, **environment)["kernel python3"].status == "ok"


def test_looking_imports_neither_apex_nor_torch(tmp_path: Path) -> None:
    """So that a notebook may ask, and still fork children that use CUDA."""
    code = (
        "import sys; from syncbn_lab import doctor; doctor.examine(); "
        "print([name for name in ('apex', 'torch') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout == "[]\n"


# ---- traps, laid all at once where they don't touch each other ----

PYRAMID_APEX = "from pyramid.config import Configurator\n"
OLDER_TORCH = "Metadata-Version: 2.1\nName: torch\nVersion: 2.10.0\n"
FAKE_GPU = '#!/bin/sh\necho "NVIDIA H200, 580.95.05"\n'


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    folder = tmp_path_factory.mktemp("traps")
    site = _package(folder / "site", "apex", PYRAMID_APEX)
    _package(site, "matplotlib", "")
    (site / "torch-2.10.0.dist-info").mkdir()
    (site / "torch-2.10.0.dist-info" / "METADATA").write_text(OLDER_TORCH)
    (site / "torch-2.10.0.dist-info" / "INSTALLER").write_text("conda\n")

    nvidia_smi = folder / "bin" / "nvidia-smi"
    nvidia_smi.parent.mkdir()
    nvidia_smi.write_text(FAKE_GPU)
    nvidia_smi.chmod(0o755)

    venv.create(folder / "other", with_pip=False)
    other_python = folder / "other" / "bin" / "python"
    _kernelspec(folder / "jupyter", str(other_python))
    work = folder / "work"
    work.mkdir()
    (work / "numpy.py").write_text("")
    return _examine(
        work,
        site,
        options=("-P",),  # so that numpy.py is seen, but not imported by torch
        JUPYTER_PATH=str(folder / "jupyter"),
        PATH=f"{nvidia_smi.parent}{os.pathsep}{os.environ['PATH']}",
    )


def _kernelspec(folder: Path, python: str) -> Path:
    spec: dict[str, Any] = {"argv": [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    spec |= {"display_name": "Python 3", "language": "python"}
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize(
    ("name", "found", "cure"),
    [
        ("apex", "Pyramid", "pip uninstall apex"),
        ("copies of torch", "2.10.0 (conda) in ", "Keep one"),
        ("sample photo", "grace_hopper.jpg is missing", "from PyPI or conda-forge"),
        ("kernel python3", "starts another interpreter", "JUPYTER_PREFER_ENV_PATH=1"),
        ("current folder", "numpy.py: imported in place", "Rename it"),
    ],
)
def test_trap(trapped: dict[str, Check], name: str, found: str, cure: str) -> None:
    assert trapped[name].status == "trap"
    assert found in trapped[name].found
    assert cure in trapped[name].cure


def test_a_cpu_build_beside_an_nvidia_gpu(trapped: dict[str, Check]) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is no CPU build")
    assert trapped["GPU"].status == "trap"
    assert "NVIDIA H200, driver 580.95.05, beside a torch that is a CPU build" in (
        trapped["GPU"].found
    )
    assert "make distclean setup" in trapped["GPU"].cure


# ---- a torch that does not work ----


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise OSError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died of SIGSEGV"),
        ("import sys; sys.exit('no licence')", "no licence"),
    ],
)
def test_a_broken_torch_is_shown_in_one_sentence(tmp_path: Path, source: str, found: str) -> None:
    check = _examine(tmp_path, _package(tmp_path / "site", "torch", source))["torch"]
    assert check.status == "trap"
    assert found in check.found
    assert "\n" not in check.found


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    source = (
        "from types import SimpleNamespace as N\n__version__ = '1.13.1+cu117'\n"
        "version = N(cuda='11.7', hip=None)\ncuda = N(is_available=lambda: False)\n"
    )
    check = _examine(tmp_path, _package(tmp_path / "site", "torch", source))["torch"]
    assert check.status == "trap"
    assert "1.13.1+cu117, CUDA 11.7 build, in " in check.found
    assert "2.11 or newer" in check.cure


def test_without_torch_and_all_else(tmp_path: Path) -> None:
    checks = _examine(tmp_path, options=("-S",))  # without site-packages
    assert checks["torch"].status == "trap"
    assert checks["torch"].found == "not installed"
    assert checks["apex"].status == "note"
    assert "requirements-apex.txt" in checks["apex"].cure
    assert checks["notebook packages"].found.startswith("missing: jupyterlab, ")
    assert ".[notebooks]" in checks["notebook packages"].cure


def test_a_file_called_torch_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('was-run', 'w')")
    checks = _examine(tmp_path)
    assert checks["current folder"].status == "trap"
    assert str(tmp_path / "torch.py") in checks["current folder"].found
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("kind", ["without amp", "a folder of one's own"])
def test_an_apex_that_is_not_the_one(tmp_path: Path, kind: str) -> None:
    folder = _package(tmp_path / "work", "apex", "")
    _package(folder / "apex", "normalization" if kind.startswith("a") else "multi_tensor_apply", "")
    checks = _examine(folder, folder, _package(tmp_path / "site", "torch", "raise ImportError"))
    assert checks["apex"].status == "trap"
    assert checks["apex"].cure
    assert str(folder / "apex") in checks["current folder"].found


def test_a_kernel_whose_interpreter_is_gone(tmp_path: Path) -> None:
    jupyter = _kernelspec(tmp_path / "jupyter", "/no/such/python")
    broken = _package(tmp_path / "site", "torch", "raise ImportError")
    check = _examine(tmp_path, broken, JUPYTER_PATH=str(jupyter))["kernel python3"]
    assert check.status == "trap"
    assert "/no/such/python: FileNotFoundError" in check.found
    assert str(jupyter) in check.cure


# ---- how it is shown ----


def test_a_report_fits_100_columns_and_loses_no_word() -> None:
    checks = [
        Check("torch", "2.13.0, " + "a long story " * 20, "ok"),
        Check("apex", "x" * 300, "trap", "Do this " * 30),  # a path has no place to break
        Check("GPU", "none", "note"),
    ]
    text = doctor.report(checks)
    assert max(map(len, text.splitlines())) <= 100
    words = "".join(text.split())
    assert words.count("alongstory") == 20
    assert "x" * 300 in words
    assert words.count("Dothis") == 30
    assert text.endswith("1 trap, 1 note.")


def test_json_has_every_field() -> None:
    checks = [Check("GPU", "none", "note"), Check("apex", "no apex", "trap", "Install one.")]
    assert [Check(**fields) for fields in json.loads(doctor.to_json(checks))] == checks
