"""`make torch12`: which interpreter is taken, and that a build is whole, or none."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from syncbn_lab import real_torch12
from syncbn_lab.__main__ import main
from syncbn_lab.errors import InputError
from syncbn_lab.real_torch12 import VARIABLE, build, find_interpreter, ready_python

ROOT = Path(__file__).resolve().parents[1]
GOOD = "CPython 3.7.16 x86_64 64-bit venv ensurepip"
VERSIONS = {"python": "3.7.16", "torch": "1.2.0", "numpy": "1.19.5", "tqdm": "4.62.3"}
VERSIONS |= {"apex": "0.2", "git_version": "8554416"}


def _fake(
    path: Path, answer: str = f"echo {GOOD}", *, pip: str = "true", verify: str | None = None
) -> Path:
    """Write an interpreter that notes its calls, answers the probe and makes others like it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"""#!/bin/sh
PATH=/usr/bin:/bin
case "$*" in
  *"import json"*) {verify or f"echo '{json.dumps(VERSIONS)}'"} ;;
  "-c "*) {answer} ;;
  *"-m venv "*) echo "$*" >>'{path}.calls'; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  *) echo "$*" >>'{path}.calls'; {pip} ;;
esac
"""
    )
    path.chmod(0o755)
    return path


def _calls(python: Path) -> list[str]:
    return Path(f"{python}.calls").read_text().splitlines()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Machine that has no interpreter but the test's: pyenv/, conda/, miniconda3/ and bin/."""
    monkeypatch.setattr(real_torch12, "FOLDER", tmp_path / "torch-1.2")
    monkeypatch.setattr(real_torch12, "_CONDAS", [tmp_path / "miniconda3"])
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


# ---- which interpreter ----


def test_candidates_are_taken_in_order_and_at_the_end_it_is_said_how_to_get_one(
    bare: Path,
) -> None:
    order = [
        ("pyenv", "pyenv/versions/3.7.16/bin/python"),
        ("pyenv", "pyenv/versions/3.7.9/bin/python"),
        ("pyenv", "pyenv/versions/3.6.15/bin/python"),
        ("conda", "conda/bin/python3.7"),
        ("conda", "miniconda3/envs/old/bin/python3.6"),
        ("PATH", "bin/python3.7"),
        ("PATH", "bin/python3.6"),
        ("PATH", "bin/python3"),
        ("PATH", "bin/python"),
    ]
    for _, name in order:
        _fake(bare / name)
    for found_by, name in order:
        assert find_interpreter() == (bare / name, "3.7.16", found_by)
        (bare / name).unlink()
    with pytest.raises(InputError) as caught:
        find_interpreter()
    for way in ("pyenv install 3.7.16", "data/torch-1.2/environment.yml", VARIABLE, "recorded"):
        assert way in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_pyenv_on_path_has_a_root_of_its_own(bare: Path) -> None:
    _fake(bare / "elsewhere" / "bin" / "pyenv")
    python = _fake(bare / "elsewhere" / "versions" / "3.6.15" / "bin" / "python")
    (bare / "bin").mkdir()
    (bare / "bin" / "pyenv").symlink_to(bare / "elsewhere" / "bin" / "pyenv")
    assert find_interpreter().path == python


UNFIT = [
    ("exit 1", "does not answer as a Python interpreter does"),
    ("echo what is this", "does not answer as a Python interpreter does"),
    ("exec sleep 9", "did not answer within 0.5 s"),
    ("echo CPython 3.8.18 x86_64 64-bit venv ensurepip", "is CPython 3.8.18"),
    ("echo CPython 2.7.18 x86_64 64-bit", "is CPython 2.7.18"),
    ("echo PyPy 3.7.13 x86_64 64-bit venv ensurepip", "is PyPy 3.7.13"),
    ("echo CPython 3.7.16 arm64 64-bit venv ensurepip", "is a 64-bit CPython 3.7.16 for arm64"),
    ("echo CPython 3.6.15 x86_64 32-bit venv ensurepip", "is a 32-bit CPython 3.6.15 for x86_64"),
    ("echo CPython 3.7.16 x86_64 64-bit venv", "lacks ensurepip (Debian and Ubuntu have it in "),
]


def test_unfit_candidates_are_passed_over(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_torch12, "_PROBE_SECONDS", 0.5)
    for patch, (answer, _) in enumerate(UNFIT, start=10):
        _fake(bare / "pyenv" / "versions" / f"3.7.{patch}" / "bin" / "python", answer)
    broken = bare / "bin" / "python3.7"
    broken.parent.mkdir()
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    (bare / "bin" / "python3.6").write_text("not executable")
    python = _fake(bare / "bin" / "python3")
    assert find_interpreter() == (python, "3.7.16", "PATH")
    python.unlink()
    with pytest.raises(InputError, match=r"lacks ensurepip \(Debian .* python3\.7-venv\)"):
        find_interpreter()  # one that only lacks a package is named


@pytest.mark.parametrize(("answer", "fault"), UNFIT, ids=[fault for _, fault in UNFIT])
def test_an_explicit_one_is_refused_though_another_would_do(
    bare: Path, monkeypatch: pytest.MonkeyPatch, answer: str, fault: str
) -> None:
    monkeypatch.setattr(real_torch12, "_PROBE_SECONDS", 0.5)
    _fake(bare / "bin" / "python3.7")
    given = _fake(bare / "given", answer)
    with pytest.raises(InputError) as caught:
        find_interpreter(str(given))
    assert str(caught.value).startswith(f"{given} {fault}")
    assert str(caught.value).endswith("; allowed is a 64-bit x86 CPython 3.7 or 3.6.")


def test_an_explicit_one_that_is_not_there(bare: Path) -> None:
    _fake(bare / "bin" / "python3.7")
    with pytest.raises(InputError, match=r"^/no/such/python is no executable file; allowed is "):
        find_interpreter("/no/such/python")


def test_an_explicit_one_by_path_or_by_name(bare: Path) -> None:
    python = _fake(bare / "bin" / "python3.6")
    assert find_interpreter(str(python)) == (python, "3.7.16", "given")
    assert find_interpreter("python3.6").path == python


def test_this_interpreter_is_too_new() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("there is no torch 1.2.0 for this machine")
    with pytest.raises(InputError) as caught:
        find_interpreter(sys.executable)
    version = platform.python_version()
    assert str(caught.value) == (
        f"{sys.executable} is CPython {version}; allowed is a 64-bit x86 CPython 3.7 or 3.6."
    )


def test_the_real_search_finds_a_python_3_7_or_3_6_if_one_is_here() -> None:
    try:
        found = find_interpreter()
    except InputError as error:
        pytest.skip(str(error))
    told = subprocess.run([found.path, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"Python {found.version}\n"
    assert re.match(r"3\.[67]\.", found.version)


@pytest.mark.parametrize("machine", ["Linux aarch64", "Windows AMD64"])
def test_a_machine_without_wheels(
    bare: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    monkeypatch.setattr(platform, "system", lambda: machine.split()[0])
    monkeypatch.setattr(platform, "machine", lambda: machine.split()[1])
    _fake(bare / "bin" / "python3.7")
    with pytest.raises(InputError, match=f"alone, and this is {machine}; everything else works"):
        build()
    assert not real_torch12.FOLDER.exists()


# ---- what is ready ----


def test_without_variable_and_stamp_nothing_is_ready(bare: Path) -> None:
    assert ready_python() is None
    _fake(real_torch12.FOLDER / "bin" / "python")  # of a build that was cut off
    assert ready_python() is None


def test_a_stamp_without_its_interpreter_is_not_ready(bare: Path) -> None:
    """As when the pyenv version that it links to was removed."""
    (real_torch12.FOLDER / "bin").mkdir(parents=True)
    (real_torch12.FOLDER / real_torch12._STAMP).write_text("{}")
    (real_torch12.FOLDER / "bin" / "python").symlink_to(bare / "gone")
    assert ready_python() is None


def test_the_variable_names_an_interpreter(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _fake(bare / "real")
    (bare / "link").symlink_to(real)
    monkeypatch.chdir(bare)
    monkeypatch.setenv(VARIABLE, "link")
    assert ready_python() == bare / "link"  # whole, and the link itself
    monkeypatch.setenv(VARIABLE, "")
    assert ready_python() is None


@pytest.mark.parametrize("given", ["/no/such/python", "/", __file__])
def test_the_variable_names_nothing_of_use(
    bare: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(InputError, match=f"^{VARIABLE} is {given}, which is no executable file; "):
        ready_python()


# ---- the build ----


def test_a_build_says_what_it_will_download_and_is_not_repeated(bare: Path) -> None:
    python = _fake(bare / "bin" / "python3.7")
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:
            assert not Path(f"{python}.calls").exists()  # said before anything is done

    made = build(say=say)
    assert made == real_torch12.FOLDER / "bin" / "python" == ready_python()
    assert "749 MB" in said[0]
    assert str(real_torch12.FOLDER) in said[0]
    assert f"3.7.16 (PATH: {python})" in said[0]
    venv, torch, apex = _calls(python)
    assert venv == f"-I -m venv {real_torch12.FOLDER}"
    assert "torch==1.2.0 numpy<1.20 tqdm<4.63" in torch
    assert torch.startswith("-I -m pip --disable-pip-version-check install ")
    requirements = ROOT / "requirements-apex.txt"
    assert apex.endswith(f"--no-deps --require-hashes --requirement {requirements}")
    stamp = json.loads((real_torch12.FOLDER / real_torch12._STAMP).read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", stamp.pop("date"))
    assert stamp == VERSIONS

    said.clear()
    assert build(say=said.append) == made
    assert said == [
        f"{real_torch12.FOLDER} is there, with python 3.7.16, torch 1.2.0, numpy 1.19.5, apex 0.2."
    ]
    assert len(_calls(python)) == 3


def test_an_interrupted_build_is_begun_anew(bare: Path) -> None:
    python = _fake(bare / "bin" / "python3.7", pip=f"kill -INT {os.getpid()}; exec sleep 9")
    with pytest.raises(KeyboardInterrupt):
        build(say=lambda _: None)
    assert ready_python() is None
    (real_torch12.FOLDER / "lib").mkdir()
    (real_torch12.FOLDER / "lib" / "half a file").touch()

    _fake(python)
    said: list[str] = []
    build(say=said.append)
    assert said[0] == f"{real_torch12.FOLDER} is of a build that was not finished: beginning anew."
    assert ready_python() is not None
    assert not (real_torch12.FOLDER / "lib").exists()


@pytest.mark.parametrize(
    ("pip", "told"),
    [
        (
            "echo 'WARNING: slow' >&2; echo 'ERROR: No matching distribution.' >&2; exit 1",
            r"Could not install torch 1\.2\.0: ERROR: No matching distribution\. Mend that and ",
        ),
        ("printf 'a\\nb\\n\\nc\\n' >&2; exit 1", r"install torch 1\.2\.0: b c\. Mend"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "SIGKILL, as when memory is out"),
        ("case $* in *apex*) exit 1; esac", "Could not install apex: "),
    ],
)
def test_a_failing_pip_ends_in_one_sentence(bare: Path, pip: str, told: str) -> None:
    _fake(bare / "bin" / "python3.7", pip=pip)
    with pytest.raises(InputError, match=told) as caught:
        build(say=lambda _: None)
    assert "\n" not in str(caught.value)
    assert ready_python() is None


def test_what_was_installed_has_to_work(bare: Path) -> None:
    verify = "printf 'Traceback\\nAssertionError: its torch is 1.3.0\\n' >&2; exit 1"
    _fake(bare / "bin" / "python3.7", verify=verify)
    with pytest.raises(InputError, match=r"that work: AssertionError: its torch is 1\.3\.0"):
        build(say=lambda _: None)
    assert ready_python() is None


def test_a_foreign_folder_is_left_alone(bare: Path) -> None:
    _fake(bare / "bin" / "python3.7")
    (real_torch12.FOLDER / "precious").mkdir(parents=True)
    with pytest.raises(InputError, match="is there, and not of this kit's making"):
        build(say=lambda _: None)
    assert [path.name for path in real_torch12.FOLDER.iterdir()] == ["precious"]


def test_a_file_in_the_folder_s_place(bare: Path) -> None:
    _fake(bare / "bin" / "python3.7")
    real_torch12.FOLDER.write_text("a file")
    with pytest.raises(InputError, match="can't be written: File exists"):
        build(say=lambda _: None)
    assert real_torch12.FOLDER.read_text() == "a file"


def test_two_builds_at_once(bare: Path) -> None:
    """The second is refused as long as the first one, or a pip that outlived it, writes."""
    _fake(bare / "bin" / "python3.7")
    with real_torch12._own_folder(), pytest.raises(InputError, match="Another build is under way"):
        build(say=lambda _: None)
    build(say=lambda _: None)


def test_a_full_disk_is_said_before_anything_is_downloaded(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = _fake(bare / "bin" / "python3.7")
    monkeypatch.setattr(real_torch12, "_FREE_GB", {"3.7": 1e9, "3.6": 1e9})
    with pytest.raises(InputError, match=r"torch 1\.2\.0 needs 1e\+09 GB free in "):
        build(say=lambda _: None)
    assert not Path(f"{python}.calls").exists()


def test_children_see_nothing_of_the_caller_s_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV", "PIP_TARGET", "PIP_CONSTRAINT")
    for name in hidden:
        monkeypatch.setenv(name, "/nowhere")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    answer = real_torch12._child([sys.executable, "-c", code], capture_output=True)
    seen = json.loads(answer.stdout)
    assert not set(hidden[:-1]) & set(seen)
    assert seen["PIP_CONSTRAINT"] == os.devnull  # goes before a configuration file
    assert seen["PATH"] == os.environ["PATH"]


# ---- an interpreter of one's own, and the command line ----


def test_the_variable_s_interpreter_is_examined_and_nothing_is_made(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = _fake(bare / "mine")
    monkeypatch.setenv(VARIABLE, str(python))
    assert main(["torch12"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{python}, which {VARIABLE} names, has python 3.7.16, torch 1.2.0")
    assert second == str(python)
    assert not real_torch12.FOLDER.exists()

    assert main(["torch12", "--python", str(python)]) == 1
    assert f"{VARIABLE} names {python}, so none is made" in capsys.readouterr().err


@pytest.mark.parametrize("verify", ["true", "exit 1", "echo no JSON"])
def test_the_variable_s_interpreter_without_torch(
    bare: Path, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    monkeypatch.setenv(VARIABLE, str(_fake(bare / "mine", verify=verify)))
    with pytest.raises(InputError, match=r"mine has no torch 1\.2\.0 and apex that work: ."):
        build()


def test_the_command_line_refuses_in_one_line(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["torch12", "--python", "/no/such/python"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("syncbn_lab: /no/such/python is no executable file; allowed is")
    assert printed.err.count("\n") == 1


def test_in_a_checkout_it_stands_beside_the_kit_s_own_and_git_ignores_it() -> None:
    assert real_torch12.FOLDER.parent == ROOT
    assert f"/{real_torch12.FOLDER.name}/" in (ROOT / ".gitignore").read_text().splitlines()
    assert (
        real_torch12.FOLDER.name
        in re.findall(r"^\trm -rf (.*)", (ROOT / "Makefile").read_text(), re.M)[-1]
    )


def test_the_conda_file_names_the_same_packages() -> None:
    conda = yaml.safe_load((ROOT / "data" / "torch-1.2" / "environment.yml").read_text())
    *_, part = conda["dependencies"]
    apex = re.findall(r"^pytorch-extension\S+", (ROOT / "requirements-apex.txt").read_text(), re.M)
    assert part == {"pip": [*real_torch12._PACKAGES, *apex]}
    assert "python=3.7" in conda["dependencies"]


# ---- the real one ----


@pytest.mark.skipif(ready_python() is None, reason="no torch 1.2 here: `make torch12` brings it")
def test_the_finished_environment_has_torch_1_2_and_apex() -> None:
    python = ready_python()
    assert python is not None
    code = (
        "import torch, apex.amp, apex.parallel.sync_batchnorm as s; "
        "print(torch.__version__, (torch.ones(2) + 1).tolist(), s.SyncBatchNorm.__name__)"
    )
    answer = real_torch12._child([python, "-I", "-c", code], capture_output=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "1.2.0 [2.0, 2.0] SyncBatchNorm\n"
