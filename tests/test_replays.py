"""The reported configurations in a real torch 1.2: recorded, live, and beside our own runs."""

import dataclasses
import json
import re

import pytest

import syncbn_lab as lab
from syncbn_lab import elsewhere, real_torch12, replays
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.locations import data_folder

KEPT = replays.read_replays()
FILE = data_folder("torch-1.2") / "replays.json"
BY_EXPERIMENT = {r.experiment: r for r in KEPT.results}
GRADIENT = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.FloatTensor but got torch.DoubleTensor"
)
LINE_109 = "expected device cpu and dtype Double but got device cpu and dtype Float"


def recorded(**fields):
    return Experiment(rules="recorded", **fields)


def test_the_record_is_of_a_real_torch_1_2_and_of_this_child():
    """After a change of the child: `python -m syncbn_lab torch12 --record data/torch-1.2`."""
    assert KEPT.provenance["torch"] == "1.2.0"
    assert KEPT.provenance["recorder_sha256"] == elsewhere.modules_hash()
    assert all(r.environment["torch"] == "1.2.0" for r in KEPT.results)
    assert all(r.environment["torch_git_version"].startswith("8554416a") for r in KEPT.results)


def test_every_configuration_and_revision_is_recorded():
    assert [r.experiment for r in KEPT.results] == replays.replayed()
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
    replay = BY_EXPERIMENT[recorded(model=model, **configuration)]
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
    replay = BY_EXPERIMENT[recorded(opt_level="O2", model="toy")]
    wrong = dataclasses.replace(replay, message="something else", line=108)
    (one,) = replays.compare([wrong])
    assert one.differences == {"message": ("something else", LINE_109), "line": (108, 109)}
    assert one.reason is None


# ---------------------------------------------------------------- rules="recorded"


@pytest.fixture
def without_torch12(monkeypatch):
    monkeypatch.setattr(real_torch12, "ready_python", lambda: None)


def test_without_a_torch_1_2_the_record_is_shown_and_says_so(without_torch12):
    result = lab.run(recorded(opt_level="O2"))
    assert (result.outcome, result.message, result.source) == ("reproduced", LINE_109, "recorded")
    assert "Recorded on" in result.reason
    assert "`make torch12`" in result.reason
    # The statement comes from the apex that is here, rebuilt.
    assert "self.running_mean" in result.place["statement"]
    assert result.place["statement"] in result.source_text
    assert result.experiment == recorded(opt_level="O2")


def test_a_recorded_backward_shows_its_statement(without_torch12):
    result = lab.run(recorded(opt_level="O1"))
    assert result.place["statement"].strip().startswith("return grad_input")


def test_a_recorded_run_that_completed_has_no_source(without_torch12):
    result = lab.run(recorded(opt_level="O3"))
    assert (result.outcome, result.source) == ("completed", None)


def test_keep_batchnorm_fp32_spelled_out_is_the_same_replay(without_torch12):
    assert lab.run(recorded(opt_level="O2", keep_batchnorm_fp32=True)).message == LINE_109


def test_the_installed_revision_is_known_by_its_name(without_torch12):
    result = lab.run(recorded(opt_level="O2", revision="installed"))
    assert result.file == "torch/nn/modules/conv.py"


def test_what_was_not_recorded_can_t_be_run_here(without_torch12):
    result = lab.run(recorded(opt_level="O2", seed=1))
    assert result.outcome == "not runnable here"
    assert "no replay of this experiment is recorded: recorded are O1, O2, O3 +" in result.reason
    with pytest.raises(InputError, match=r"no real torch 1\.2 is here; `make torch12` makes"):
        replays.compare_with("live")


@pytest.mark.parametrize(
    "configuration",
    [{"opt_level": "O1"}, {"opt_level": "O2"}, {"opt_level": "O3", "keep_batchnorm_fp32": True}],
)
def test_plain_batch_norm_can_t_be_shifted(configuration):
    result = lab.run(recorded(implementation="batchnorm", **configuration))
    assert result.outcome == "not applicable"
    assert "on CUDA alone" in result.reason


def test_a_record_that_is_none(tmp_path):
    broken = tmp_path / "replays.json"
    broken.write_text("{}")
    for path in (broken, tmp_path / "gone.json"):
        with pytest.raises(InputError, match=f"the recorded replays, {path.name}, can't be read"):
            replays.read_replays(path)


# ---------------------------------------------------------------- the real one, live

LIVE = pytest.mark.skipif(
    real_torch12.ready_python() is None,
    reason="no real torch 1.2 here (`make torch12`): the record stands",
)


@LIVE
def test_the_real_torch_1_2_still_does_what_is_recorded():
    for experiment in replays.replayed():
        live = replays._stored(lab.run(experiment))
        kept = replays._stored(BY_EXPERIMENT[experiment])
        for fields in (live, kept):
            # Own builds and other processors: numbers may differ in their last digits.
            for name in ("loss", "findings", "reason", "verdict", "environment"):
                fields.pop(name)
        assert live == kept, experiment.describe()


@LIVE
def test_live_ranks_are_synchronized():
    result = lab.run(recorded(opt_level="O0", model="toy", world_size=2))
    assert (result.outcome, result.environment["torch"]) == ("completed", "1.2.0")
    assert len({str(layer["count"]) for layer in result.layers}) == 2
