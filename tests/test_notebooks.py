"""The notebooks, run through papermill as a user does, and judged by what they recorded."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import venv
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from syncbn_lab.params import DEFAULTS
from syncbn_lab.real_torch12 import ready_python
from syncbn_lab.results import MEDIA_TYPE, read_results

pytestmark = pytest.mark.notebook
ROOT = Path(__file__).resolve().parents[1]
REPRO = ROOT / "notebooks" / "repro.ipynb"
RULES = ROOT / "notebooks" / "rules.ipynb"
RULES_RUNS = {
    "rules": [],
    "one rule": ["-p", "rule", "gradient"],
    "no such rule": ["-p", "rule", "gradients"],
    "no such parameter": ["-p", "operation", "add"],
}
LINE_109 = "expected device cpu and dtype Float but got device cpu and dtype Half"
GRADIENT = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.HalfTensor but got torch.FloatTensor"
)
NEXT_CONV = "Input type (float) and bias type (c10::Half) should be the same"

GOOD = {
    "O1": ["-p", "opt_level", "O1"],
    "O2 by its case": ["-p", "case", "apex-481-o2"],
    "O3": ["-p", "opt_level", "O3"],
    "O3 without keep": ["-p", "opt_level", "O3", "-p", "keep_batchnorm_fp32", "None"],
    "O0": ["-p", "opt_level", "O0"],
    "plain": ["-p", "opt_level", "O2", "-p", "implementation", "batchnorm"],
    # Nothing can be compared here: the layer gives None in every configuration.
    "cast-added": ["-p", "opt_level", "O2", "-p", "revision", "cast-added", "-p", "model", "toy"],
    "return-fixed, today": [
        *("-p", "opt_level", "O2", "-p", "revision", "return-fixed"),
        *("-p", "rules", "installed", "-p", "model", "toy"),
    ],
}
# A real torch 1.2, live or as recorded, in repro.ipynb; and the comparison with it.
RECORDED = ["-p", "rules", "recorded", "-p", "opt_level", "O2"]
NAMES = ", ".join(DEFAULTS)
# Parameters, and the sentence that the output must end in.
BAD = {
    "an unknown name": (["-p", "optlevel", "O3"], f"optlevel is no parameter .* are {NAMES}"),
    "an unknown level": (["-p", "opt_level", "O7"], "opt_level is 'O7'; allowed are O0, O1, O2"),
    "neither true nor false": (
        ["-p", "keep_batchnorm_fp32", "maybe"],
        "keep_batchnorm_fp32 is 'maybe'; allowed are True, False, None",
    ),
    "what apex refuses": (
        ["-p", "opt_level", "O1", "-p", "keep_batchnorm_fp32", "True"],
        "does not go with O1.*batchnorm functions are automatically patched to run in FP32",
    ),
    "an unknown case": (["-p", "case", "apex-999"], "case is 'apex-999'; allowed are apex-481-o1"),
    "an unknown revision": (
        ["-p", "revision", "newest"],
        "revision is 'newest'; allowed are reported, cast-added, return-fixed, installed",
    ),
    "half a seed": (["-p", "seed", "1.5"], "seed is 1.5; allowed is a whole number"),
    "a reserved name": (["-p", "In", "5"], f"In is no parameter .* are {NAMES}"),
    "a name that Python needs": (["-p", "globals", "5"], "globals is no parameter"),
    "no GPU": (["-p", "device", "cuda"], "device is 'cuda', but torch .* allowed here is cpu"),
}


def _papermill(
    folder: Path,
    name: str,
    arguments: list[str],
    python: str = sys.executable,
    notebook: Path = REPRO,
):
    out = folder / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}.ipynb"
    command = [python, "-m", "papermill", "--no-progress-bar", str(notebook), str(out), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=_environment(), timeout=300
    )
    return done, out


def _environment() -> dict[str, str]:
    return {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _environment_without_apex(folder: Path) -> str:
    """A real virtual environment with all that is installed here except apex."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    for source in (Path(path) for path in site.getsitepackages()):
        for entry in source.iterdir() if source.is_dir() else []:
            apex = entry.name == "apex" or entry.name.startswith(("pytorch_extension", "apex-"))
            if not apex and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def _add_pyramid_apex(folder: Path) -> None:
    """What `pip install apex` leaves: an `apex` that has nothing to do with NVIDIA's."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    (target / "apex").mkdir()
    (target / "apex" / "__init__.py").write_text(
        "from pyramid.session import UnencryptedCookieSessionFactoryConfig\n"
    )
    metadata = target / "apex-0.9.10.dev0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10.dev0\n"
        "Summary: Pyramid starter\nRequires-Dist: pyramid\n"
    )
    (metadata / "RECORD").write_text("apex/__init__.py,,\n")


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory):
    """Every run of this file, two at a time; a test waits for the one it is about."""
    folder = tmp_path_factory.mktemp("notebooks")

    def without_apex(name: str, spoil: bool):
        home = folder / name
        python = _environment_without_apex(home)
        if spoil:
            _add_pyramid_apex(home)
        return _papermill(folder, f"{name}-run", ["-p", "opt_level", "O2"], python)

    with ThreadPoolExecutor(2) as pool:
        runs: dict[str, Future] = {
            name: pool.submit(_papermill, folder, name, arguments)
            for name, arguments in GOOD.items()
        }
        runs |= {
            name: pool.submit(_papermill, folder, name, arguments)
            for name, (arguments, _) in BAD.items()
        }
        runs["recorded"] = pool.submit(_papermill, folder, "recorded", RECORDED)
        for name, arguments in RULES_RUNS.items():
            runs[name] = pool.submit(_papermill, folder, name, arguments, notebook=RULES)
        runs["no apex"] = pool.submit(without_apex, "no-apex", False)
        runs["the wrong apex"] = pool.submit(without_apex, "wrong-apex", True)
        yield runs


@pytest.fixture(scope="session")
def recorded(started):
    def wait(name: str) -> dict:
        done, out = started[name].result()
        assert done.returncode == 0, done.stderr[-3000:]
        return read_results(out)

    return wait


@pytest.mark.parametrize("name", ["O2 by its case", "O3"])
def test_the_forward_errors(recorded, name: str) -> None:
    results = recorded(name)
    keep = True if name == "O3" else None
    expected = {
        "case": "apex-481-o3-keep" if keep else "apex-481-o2",
        "opt_level": "O3" if keep else "O2",
        "keep_batchnorm_fp32": keep,
        "outcome": "reproduced",
        "verdict": "not judged",
        "phase": "forward",
        "line": 109,
        "traceback_line": 108,
        "message": LINE_109,
        "expected_message": LINE_109.replace("cpu", "cuda:0"),
        "source": "raised by our rule",
        "messages_match": "but for the device",
        "fixed_outcome": None,
    }
    assert {name: results[name] for name in expected} == expected
    assert results["file"].endswith("apex/parallel/sync_batchnorm.py")
    assert results["today"]["outcome"] == "different error"
    assert results["today"]["message"] == NEXT_CONV
    assert results["control"] == {
        "implementation": "batchnorm",
        "outcome": "completed",
        "verdict": "right",
        "message": None,
    }
    assert results["apex"]["status"] == "usable"
    assert results["torch"].startswith("2.")


def test_the_backward_error(recorded) -> None:
    results = recorded("O1")
    assert (results["outcome"], results["phase"]) == ("reproduced", "backward")
    assert results["message"] == GRADIENT
    assert results["messages_match"] == "but for the device"
    assert results["dtypes"]["grad_input"]["dtype"] == "float32"
    assert results["dtypes"]["input"]["dtype"] == "float16"
    today = results["today"]
    assert (today["outcome"], today["verdict"]) == ("completed", "degraded")
    # The encoder has six batch norm layers, and each gradient is cast.
    assert today["silent_casts"] == 6


@pytest.mark.parametrize("name", ["O0", "O3 without keep", "plain"])
def test_controls_complete_and_speak_of_no_report(recorded, name: str) -> None:
    results = recorded(name)
    assert results["outcome"] == "completed"
    reports = ("case", "expected_message", "messages_match", "message")
    assert [results[field] for field in reports] == [None] * 4
    if name != "O3 without keep":
        assert results["verdict"] == "right"
    else:
        assert results["verdict"] in ("degraded", "wrong")


def test_apexs_own_repairs(recorded) -> None:
    added = recorded("cast-added")
    assert added["outcome"] == "different error"
    assert added["messages_match"] == "no"
    assert "NoneType" in added["message"]
    fixed = recorded("return-fixed, today")
    assert (fixed["outcome"], fixed["message"]) == ("different error", NEXT_CONV)
    assert fixed["source"].startswith("raised by torch 2.")


def test_a_real_torch_1_2_in_repro(recorded) -> None:
    results = recorded("recorded")
    assert (results["outcome"], results["line"]) == ("reproduced", 109)
    assert results["message"] == LINE_109.replace("Float", "Double").replace("Half", "Float")
    assert results["messages_match"] == "but for the dtype pair"
    live = ready_python() is not None
    assert results["source"] == ("raised by torch 1.2.0" if live else "recorded")
    assert results["torch"] == "1.2.0"
    assert results["today"]["message"] == NEXT_CONV
    assert results["control"]["outcome"] == "not applicable"


def test_the_rules_against_a_real_torch_1_2(recorded) -> None:
    results = recorded("rules")
    assert results["provenance"]["torch"] == "1.2.0"
    assert results["agree"] > 8000
    assert results["comparable"] == results["agree"] + results["differ_for_known_reason"]
    assert results["differ_unexplained"] == results["replays_unexplained"] == []
    assert (results["replays"], results["replays_agree"]) == (36, 32)
    assert results["reproduced"] == ["apex-481-o1", "apex-481-o2", "apex-481-o3-keep"]
    assert 0 < recorded("one rule")["rows"] < results["rows"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no such rule", "rule is 'gradients'; allowed are all, elementwise, "),
        ("no such parameter", "operation is no parameter .* its parameters are rule, torch12"),
    ],
)
def test_the_rules_notebook_refuses_what_it_does_not_know(started, name: str, sentence: str):
    done, _ = started[name].result()
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"^InputError: {sentence}", last), last


@pytest.mark.parametrize("name", GOOD)
def test_no_cell_failed_and_every_claim_stands_in_the_page(started, name: str) -> None:
    done, out = started[name].result()
    assert done.returncode == 0, done.stderr[-3000:]
    notebook = nbformat.read(out, as_version=4)
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert sum(MEDIA_TYPE in o.get("data", {}) for o in outputs) == 1
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 1
    text = "\n".join(o.get("data", {}).get("text/markdown", "") for o in outputs)
    assert "was never run on a real torch 1.2" in text
    assert read_results(out)["outcome"] in text


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_sentence_and_exit_code_1(started, name: str) -> None:
    done, _ = started[name].result()
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("InputError: ")
    assert re.search(BAD[name][1], last), last


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no apex", "no apex is installed"),
        ("the wrong apex", "Pyramid"),
    ],
)
def test_without_the_right_apex_nothing_runs(started, name: str, sentence: str) -> None:
    done, _ = started[name].result()
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("InputError: ")
    assert sentence in last
    assert "requirements-apex.txt" in last


def test_the_notebook_runs_from_its_own_folder_too(tmp_path: Path) -> None:
    # JupyterLab starts a kernel in the notebook's folder, papermill in the caller's.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "papermill", "--no-progress-bar", "repro.ipynb"),
            *(str(tmp_path / "out.ipynb"), "-p", "opt_level", "O2", "-p", "model", "toy"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT / "notebooks",
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_results(tmp_path / "out.ipynb")["outcome"] == "reproduced"


def test_functions_in_a_notebook_are_short() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        imports = [line for cell in code for line in cell.splitlines() if "syncbn_lab" in line]
        assert imports == ["import syncbn_lab as lab"], path.name
        for cell in code:
            assert all(len(body.splitlines()) <= 5 for body in re.findall(r"def .*", cell, re.S))
