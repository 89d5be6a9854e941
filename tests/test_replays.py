"""The reported configurations in a real torch 1.2: recorded, live, and beside our own runs."""

import dataclasses
import json
import re
import subprocess

import pytest

import syncbn_lab as lab
from syncbn_lab import elsewhere, real_torch12, recorded, replays
from syncbn_lab.experiment import Experiment
from syncbn_lab.locations import data_folder

KEPT = recorded.read_replays()
FILE = data_folder("torch-1.2") / "replays.json"
BY_EXPERIMENT = {r.experiment: r for r in KEPT.results}
GRADIENT = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.FloatTensor but got torch.DoubleTensor"
)
LINE_109 = "expected device cpu and dtype Double but got device cpu and dtype Float"


def replay_of(**fields):
    return Experiment(rules="recorded", **fields)


def test_the_record_is_of_a_real_torch_1_2_and_of_this_child():
    """After a change of the child: `python -m syncbn_lab torch12 --record data/torch-1.2`."""
    assert KEPT.provenance["torch"] == "1.2.0"
    assert KEPT.provenance["recorder_sha256"] == elsewhere.modules_hash()
    assert all(r.environment["torch"] == "1.2.0" for r in KEPT.results)
    assert all(r.environment["torch_git_version"].startswith("8554416a") for r in KEPT.results)


def test_every_configuration_and_revision_is_recorded():
    assert [r.experiment for r in KEPT.results] == recorded.replayed()
    assert len(KEPT.results) == 2 * 3 * 6


def test_the_record_holds_no_source_and_no_path():
    text = FILE.read_text(encoding="utf-8")
    assert not re.search(r"site-packages|/home|/root|/tmp|\.venv|self\.momentum|def forward", text)
    assert all(not r["place"]["statement"] for r in json.loads(text)["replays"] if r["place"])


@pytest.mark.parametrize("model", ["encoder", "toy"])
@pytest.mark.parametrize(
    ("configuration", "phase", "file", "line", "message"),
    [
        ({"opt_level": "O1"}, "backward", "sync_batchnorm_kernel.py", 87, GRADIENT),
        ({"opt_level": "O2"}, "forward", "sync_batchnorm.py", 109, LINE_109),
        (
            {"opt_level": "O3", "keep_batchnorm_fp32": True},
            "forward",
            "sync_batchnorm.py",
            109,
            LINE_109,
        ),
    ],
    ids=["O1", "O2", "O3 keep"],
)
def test_the_reported_errors_in_a_real_torch_1_2(model, configuration, phase, file, line, message):
    replay = BY_EXPERIMENT[replay_of(model=model, **configuration)]
    assert replay.outcome == "reproduced"
    assert replay.message == message
    assert replay.messages_match == "but for the dtype pair"
    assert replay.source == "raised by torch 1.2.0"
    assert (replay.phase, replay.file, replay.line) == (phase, f"apex/parallel/{file}", line)
    if phase == "forward":
        # Python 3.7 names the statement's last line by itself.
        assert replay.traceback_line == 109
        assert replay.dtypes["input"]["dtype"] == "float32"
        assert replay.dtypes["running_mean"]["dtype"] == "float64"
    else:
        assert replay.dtypes["grad_input"]["dtype"] == "float64"


def test_the_others_run_and_the_oldest_revisions_behave_as_known():
    for replay in KEPT.results:
        experiment = replay.experiment
        if experiment.revision == "cast-added":
            assert "must be Tensor, not NoneType" in replay.message
        elif not (experiment.keeps_batchnorm_fp32 or experiment.opt_level == "O1"):
            assert replay.outcome == "completed"
        elif experiment.revision == "return-fixed" and experiment.opt_level == "O1":
            assert replay.outcome == "completed"
            assert "y is float64 where float32 belongs" in replay.findings[0]
        elif experiment.revision == "return-fixed":
            assert replay.file == "torch/nn/modules/conv.py"


# ---------------------------------------------------------------- beside our own runs


@pytest.fixture(scope="module")
def compared():
    return replays.compare()


def test_our_runs_agree_with_every_replay(compared):
    unexplained = [
        (one.replay.experiment.describe(), one.differences)
        for one in compared
        if not one.agrees and one.reason is None
    ]
    assert unexplained == []
    assert len(compared) == 36
    assert sum(one.agrees for one in compared) == 32


def test_the_words_of_a_convolution_alone_differ(compared):
    differ = [one for one in compared if not one.agrees]
    assert {tuple(one.differences) for one in differ} == {("message",)}
    assert {one.replay.experiment.revision for one in differ} == {"return-fixed"}
    assert all("cuDNN" in one.reason for one in differ)


def test_a_run_that_differs_is_told(monkeypatch):
    replay = BY_EXPERIMENT[replay_of(opt_level="O2", model="toy")]
    wrong = dataclasses.replace(replay, message="something else", line=108)
    (one,) = replays.compare([wrong])
    assert one.differences == {"message": ("something else", LINE_109), "line": (108, 109)}
    assert one.reason is None


# ---------------------------------------------------------------- the real one, live

LIVE = pytest.mark.skipif(
    real_torch12.ready_python() is None,
    reason="no real torch 1.2 here (`make torch12`): the record stands",
)


@LIVE
def test_the_real_torch_1_2_still_does_what_is_recorded():
    for experiment in recorded.replayed():
        live = replays._stored(lab.run(experiment))
        kept = replays._stored(BY_EXPERIMENT[experiment])
        for fields in (live, kept):
            # Own builds and other processors: numbers may differ in their last digits.
            for name in ("loss", "findings", "reason", "verdict", "environment"):
                fields.pop(name)
        assert live == kept, experiment.describe()


@LIVE
def test_live_ranks_are_synchronized():
    result = lab.run(replay_of(opt_level="O0", model="toy", world_size=2))
    assert (result.outcome, result.environment["torch"]) == ("completed", "1.2.0")
    assert len({str(layer["count"]) for layer in result.layers}) == 2


@LIVE
def test_its_cpu_adds_up_one_value_after_the_other():
    """Why some replays that complete are `degraded` there: bit for bit the sum of a loop."""
    code = (
        "import torch; x = torch.full((1024, 16), 0.1); total = torch.zeros(16)\n"
        "for row in x: total += row\n"
        "print(bool((total == x.sum(0)).all()), abs(float(total[0]) - 102.4) > 1e-4)\n"
    )
    python = real_torch12.ready_python()
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "True"]
