"""rules="recorded" without a real torch 1.2: the recorded replay is shown, and says so."""

import sys

import pytest

import syncbn_lab as lab
from syncbn_lab import real_torch12, recorded, replays
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment

LINE_109 = "expected device cpu and dtype Double but got device cpu and dtype Float"


def replay_of(**fields):
    return Experiment(rules="recorded", **fields)


@pytest.fixture
def without_torch12(monkeypatch):
    monkeypatch.setattr(real_torch12, "ready_python", lambda: None)


def test_without_a_torch_1_2_the_record_is_shown_and_says_so(without_torch12):
    result = lab.run(replay_of(opt_level="O2"))
    assert (result.outcome, result.message, result.source) == ("reproduced", LINE_109, "recorded")
    assert "Recorded on" in result.reason
    assert "`make torch12`" in result.reason
    # The statement comes from the apex that is here, rebuilt.
    assert "self.running_mean" in result.place["statement"]
    assert result.place["statement"] in result.source_text
    assert result.experiment == replay_of(opt_level="O2")


def test_a_recorded_backward_shows_its_statement(without_torch12):
    result = lab.run(replay_of(opt_level="O1"))
    assert result.place["statement"].strip().startswith("return grad_input")


def test_a_recorded_run_that_completed_has_no_source(without_torch12):
    result = lab.run(replay_of(opt_level="O3"))
    assert (result.outcome, result.source) == ("completed", None)


def test_keep_batchnorm_fp32_spelled_out_is_the_same_replay(without_torch12):
    assert lab.run(replay_of(opt_level="O2", keep_batchnorm_fp32=True)).message == LINE_109


def test_the_installed_revision_is_known_by_its_name(without_torch12):
    result = lab.run(replay_of(opt_level="O2", revision="installed"))
    assert result.file == "torch/nn/modules/conv.py"


def test_what_was_not_recorded_can_t_be_run_here(without_torch12):
    result = lab.run(replay_of(opt_level="O2", seed=1))
    assert result.outcome == "not runnable here"
    assert "no replay of this experiment is recorded: recorded are O1, O2, O3 +" in result.reason
    with pytest.raises(InputError, match=r"no real torch 1\.2 is here; `make torch12` makes"):
        replays.compare_with("live")


@pytest.mark.parametrize(
    "configuration",
    [{"opt_level": "O1"}, {"opt_level": "O2"}, {"opt_level": "O3", "keep_batchnorm_fp32": True}],
)
def test_plain_batch_norm_can_t_be_shifted(configuration):
    result = lab.run(replay_of(implementation="batchnorm", **configuration))
    assert result.outcome == "not applicable"
    assert "on CUDA alone" in result.reason


def test_another_torch_is_not_taken_for_1_2(monkeypatch):
    monkeypatch.setenv(real_torch12.VARIABLE, sys.executable)
    with pytest.raises(InputError, match=r"has torch 2\..*; allowed is torch 1\.2\.0"):
        lab.run(replay_of(opt_level="O3", model="toy"))


def test_a_record_that_is_none(tmp_path):
    broken = tmp_path / "replays.json"
    broken.write_text("{}")
    for path in (broken, tmp_path / "gone.json"):
        with pytest.raises(InputError, match=f"the recorded replays, {path.name}, can't be read"):
            recorded.read_replays(path)
