"""A run in another interpreter: any Python with a torch, by its path, nothing of ours in it."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

import syncbn_lab as lab
from syncbn_lab import elsewhere
from syncbn_lab.__main__ import main
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations.apex import find_apex
from syncbn_lab.real_torch12 import find_interpreter, ready_python

PACKAGE = Path(elsewhere.__file__).parent
RECORDER = sorted(str(p.relative_to(PACKAGE)) for p in (PACKAGE / "rules/recorder").glob("*.py"))


@functools.cache
def run(python=sys.executable, **fields):
    given = {"rules": "installed", "model": "toy", **fields}
    return lab.run(Experiment(python=str(python), **given))


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def environment(folder, without=()):
    """An environment that has this one's packages, but for some, and nothing of the kit."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next((folder / "lib").glob("python3*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        kit = entry.name.lower().startswith(("syncbn", "_syncbn", "_editable_impl_syncbn"))
        if not kit and not entry.name.startswith(tuple(without)) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


# ---------------------------------------------------------------- the same run, in another process


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_another_interpreter_gives_what_this_one_gives(level):
    """The same torch, started afresh: outcome, message, place, dtypes and values."""
    there = run(opt_level=level)
    here = lab.run(Experiment(opt_level=level, model="toy", rules="installed"))
    same = ("outcome", "verdict", "message", "file", "line", "traceback_line", "phase", "module")
    for name in (*same, "dtypes", "findings", "loss", "output_dtype", "case", "source", "nodes"):
        assert getattr(there, name) == getattr(here, name), name
    assert there.environment["interpreter"] == sys.executable
    assert there.environment["apex"] == here.environment["apex"]


def test_silent_casts_are_counted_here_alone():
    assert run(opt_level="O1").silent_casts is None
    assert lab.run(Experiment(opt_level="O1", model="toy", rules="installed")).silent_casts


def test_ranks_are_joined_there_too():
    result = run(opt_level="O0", world_size=2)
    assert (result.outcome, result.verdict) == ("completed", "right")
    assert result.layers[0]["count"] == 2 * run(opt_level="O0").layers[0]["count"]


def test_policies_without_apex():
    result = run(opt_level="autocast-bf16", implementation="batchnorm")
    assert (result.outcome, result.environment["apex"]) == ("completed", None)


def test_its_parameters_are_drawn_here():
    """Another torch may draw others from the same seed."""
    losses = {run(opt_level="O0", seed=seed).loss for seed in (0, 0, 1)}
    assert len(losses) == 2


# ---------------------------------------------------------------- what that interpreter needs


def test_an_interpreter_without_apex_is_lent_this_one(tmp_path):
    python = environment(tmp_path / "env", without=["apex", "pytorch_extension"])
    result = run(python, opt_level="O2")
    here = lab.run(Experiment(opt_level="O2", model="toy", rules="installed"))
    assert (result.outcome, result.message) == (here.outcome, here.message)
    assert result.environment["apex"]["lent"]
    assert result.environment["apex"]["sha256"] == here.environment["apex"]["sha256"]
    installed = run(python, opt_level="O2", revision="installed")
    assert installed.outcome == "not runnable here"
    assert installed.reason.startswith("no apex is installed in ")


def test_an_interpreter_s_own_apex_comes_first(tmp_path):
    result = run(environment(tmp_path / "env"), opt_level="O2", revision="installed")
    assert result.environment["apex"]["location"].startswith(str(tmp_path))
    assert "lent" not in result.environment["apex"]


def test_an_interpreter_without_torch(tmp_path):
    python = environment(tmp_path / "env", without=["torch"])
    result = run(python)
    assert result.outcome == "not runnable here"
    assert result.reason == f"{python} can't import torch: No module named 'torch'"


def test_nothing_of_this_environment_leaks(tmp_path, monkeypatch):
    """PYTHONPATH and the like are about this Python; a torch found so is the wrong one."""
    python = environment(tmp_path / "env", without=["torch"])
    monkeypatch.setenv("PYTHONPATH", sysconfig.get_paths()["purelib"])
    assert run(python).outcome == "not runnable here"


def test_a_script_that_starts_an_interpreter(tmp_path):
    """As for a container: it gets the path and the arguments, and no environment at all."""
    wrapper = script(tmp_path / "in-container", f'exec env -i {sys.executable} "$@"')
    assert run(wrapper, opt_level="O0").outcome == "completed"


@pytest.mark.parametrize("command", ["exit 0", "exit 3", "echo nothing of a Python; exit 1"])
def test_what_is_no_python(tmp_path, command):
    result = run(script(tmp_path / "other", command))
    assert result.outcome == "not runnable here"
    assert "it has to be a Python 3.6 or newer, or start one" in result.reason
    assert ("It said: nothing of a Python" in result.reason) == ("echo" in command)


def test_an_interpreter_that_hangs_or_dies_is_an_outcome(tmp_path):
    assert run(script(tmp_path / "hangs", "sleep 60"), time_limit=0.5).outcome == "timed out"
    died = run(script(tmp_path / "dies", "kill -SEGV $$"))
    assert (died.outcome, "SIGSEGV" in died.reason) == ("died", True)


def test_an_interrupted_run_leaves_nothing(tmp_path):
    """Ctrl-C: neither a process of the other interpreter nor a temporary folder stays behind."""
    hangs = script(tmp_path / "hangs", "exec sleep 987")
    command = [sys.executable, "-m", "syncbn_lab", "run", "--python", str(hangs), "--model", "toy"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    surroundings = {**os.environ, "TMPDIR": str(temporary)}
    client = subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, text=True)
    left = [1]
    try:
        _until(lambda: list(temporary.glob("syncbn-lab-*/rank0.work")) and _running("sleep 987"))
        client.send_signal(signal.SIGINT)
        assert client.wait(20) == 130
        _until(lambda: not _running("sleep 987"))
        left = list(temporary.glob("syncbn-lab-*"))
    finally:
        client.kill()
    assert left == []
    assert client.stderr.read() == "syncbn_lab: interrupted\n"


def test_what_an_interpreter_leaves_running_is_ended(tmp_path):
    run(script(tmp_path / "leaves", "sleep 986 & exit 1"))
    _until(lambda: not _running("sleep 986"))


def _running(command):
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return any(line.strip() == command for line in listed.splitlines())


def _until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("file", ["amp/__init__.py", "parallel/sync_batchnorm_kernel.py"])
def test_a_broken_apex_there_is_said(tmp_path, file):
    python = environment(tmp_path / "env", without=["apex", "pytorch_extension"])
    folder = next((tmp_path / "env/lib").glob("python3*/site-packages")) / "apex"
    shutil.copytree(find_apex().location, folder)
    (folder / file).write_text("raise ImportError('half installed')\n")
    result = run(python, opt_level="O2")
    assert result.outcome == "not runnable here"
    assert result.reason == (
        f"{folder}/__init__.py can't be imported: ImportError: half installed."
    )


def test_wrong_interpreters_are_refused_before_any_work():
    with pytest.raises(InputError, match="python is '/no/such/python', which is no executable"):
        run("/no/such/python")
    for wrong in ("", 3):
        with pytest.raises(InputError, match="allowed is the path of an interpreter, or None"):
            Experiment(python=wrong, rules="installed")
    with pytest.raises(InputError, match=r"rules='torch-1\.2' does not go with another"):
        Experiment(python=sys.executable)


def test_a_name_on_path_will_do(monkeypatch, tmp_path):
    script(tmp_path / "my-python", f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run("my-python", opt_level="O0").outcome == "completed"


# ---------------------------------------------------------------- Python 3.6


def test_only_the_named_modules_run_there():
    """What another interpreter loads of ours is what MODULES says, and so what is held to 3.6."""
    code = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('elsewhere', {elsewhere.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "module._stand_for_package()\n"
        "from syncbn_lab import child\n"
        "from syncbn_lab.rules.recorder import answers\n"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items()\n"
        "                  if n.startswith('syncbn_lab') and getattr(m, '__file__', None)]))\n"
    )
    said = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {str(Path(file).relative_to(PACKAGE)) for file in json.loads(said.stdout)}
    recorder = {file for file in loaded if file.startswith("rules/recorder/")}
    assert loaded - recorder | {"elsewhere.py"} == set(elsewhere.MODULES)
    assert recorder == set(RECORDER)


def test_they_keep_to_python_3_6():
    vermin = Path(sysconfig.get_path("scripts"), "vermin")
    files = [PACKAGE / module for module in (*elsewhere.MODULES, *RECORDER)]
    command = [vermin, "-t=3.6-", "--no-tips", "--eval-annotations", *files]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    # An import that Python 3.6 refuses, and vermin takes for backported.
    assert not [file for file in files if "from __future__ import annotations" in file.read_text()]


def test_a_real_old_python_compiles_them():
    """Where torch 1.2's Python 3.7 or 3.6 is found; a syntax error would end every run there."""
    try:
        python = find_interpreter().path
    except InputError as error:
        pytest.skip(str(error))
    files = [str(PACKAGE / module) for module in (*elsewhere.MODULES, *RECORDER)]
    code = "import sys; [compile(open(f, 'rb').read(), f, 'exec') for f in sys.argv[1:]]"
    subprocess.run([python, "-c", code, *files], check=True)


# ---------------------------------------------------------------- the command line


def test_two_interpreters_make_one_table(capsys, tmp_path):
    other = script(tmp_path / "other", f'exec {sys.executable} "$@"')
    command = ["run", "--opt-level", "O2", "--model", "toy", "--python", sys.executable]
    assert main([*command, "--python", str(other)]) == 0
    table = capsys.readouterr().out
    (torch_line,) = [line for line in table.splitlines() if line.startswith("torch ")]
    version = run(opt_level="O0").environment["torch"]
    assert torch_line.count(version) == 2
    assert "interpreter" in table
    assert "different error" in table


def test_a_terminal_without_lines_gets_escapes():
    code = "import syncbn_lab.__main__ as m; m.main(['cases', 'apex-481-o1']); print(chr(0x2502))"
    surroundings = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, capture_output=True, text=True
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.endswith("\\u2502\n")


def test_several_runs_as_json_are_a_list(capsys):
    command = ["run", "--model", "toy", "--opt-level", "O0", "--json"]
    assert main([*command, "--python", sys.executable, "--python", sys.executable]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["experiment"]["python"] for one in found] == [sys.executable] * 2
    assert [one["experiment"]["rules"] for one in found] == ["installed"] * 2


def test_versions_in_a_frame():
    frame = lab.tables.versions(run(opt_level="O1"), run(opt_level="O2"))
    assert list(frame["outcome"]) == ["completed", "different error"]
    assert frame.index.name == "torch"


@pytest.mark.skipif(ready_python() is None, reason="no real torch 1.2 here (`make torch12`)")
def test_two_torches_make_one_table(capsys):
    command = ["run", "--opt-level", "O2", "--model", "toy", "--dtype-pair", "float-double"]
    assert main([*command, "--python", str(ready_python()), "--python", sys.executable]) == 0
    table = capsys.readouterr().out
    assert "1.2.0" in table
    assert "raised by torch 1.2.0" in table
    assert "expected device cpu and dtype Double" in table


@pytest.mark.skipif(ready_python() is None, reason="no real torch 1.2 here (`make torch12`)")
def test_a_torch_without_half_arithmetic_says_what_to_do():
    result = run(ready_python(), opt_level="O2")
    assert result.outcome == "different error"
    assert "no half arithmetic on its CPU: dtype_pair='float-double'" in result.reason
