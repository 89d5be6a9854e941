"""The shifted dtype pair: (float, double) where (half, float) is meant, in a child's process."""

import pytest
import torch

import syncbn_lab as lab
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations import pair


def run(**fields):
    return lab.run(Experiment(model="toy", dtype_pair="float-double", **fields))


def test_nothing_is_shifted_without_being_asked():
    assert pair.shifted(torch.float16) is torch.float16
    assert pair.type_name("torch.cuda.FloatTensor") == "torch.cuda.FloatTensor"
    assert pair.amp_arguments("O2") == {}
    assert torch.ones(1).half().dtype is torch.float16


@pytest.fixture
def shifted(monkeypatch):
    """As after ``install``, without what it does to torch."""
    monkeypatch.setattr(pair, "_installed", [True])


def test_names_and_dtypes_move_up_one(shifted):
    assert pair.shifted(torch.float16) is torch.float32
    assert pair.shifted(torch.float32) is torch.float64
    assert pair.shifted(torch.int64) is torch.int64
    assert pair.type_name("torch.cuda.FloatTensor") == "torch.cuda.HalfTensor"
    assert pair.type_name("torch.cuda.DoubleTensor") == "torch.cuda.FloatTensor"
    assert pair.type_name("torch.cuda.LongTensor") == "torch.cuda.LongTensor"


@pytest.mark.parametrize(
    ("level", "model_type"),
    [("O0", torch.float64), ("O1", None), ("O2", torch.float32), ("O3", torch.float32)],
)
def test_what_amp_is_told(shifted, level, model_type):
    arguments = pair.amp_arguments(level)
    assert arguments.get("cast_model_type") is model_type
    assert arguments["cast_model_outputs"] is torch.float64


@pytest.mark.parametrize(
    ("fields", "half_run"),
    [
        ({"opt_level": "O1"}, {"opt_level": "O1"}),
        ({"opt_level": "O2"}, {"opt_level": "O2"}),
        ({"opt_level": "O3"}, {"opt_level": "O3"}),
        ({"opt_level": "O1", "rules": "installed"}, {"opt_level": "O1", "rules": "installed"}),
        (
            {"opt_level": "half", "implementation": "batchnorm"},
            {"opt_level": "half", "implementation": "batchnorm"},
        ),
    ],
)
def test_a_shifted_run_is_the_half_run_one_higher(fields, half_run):
    up = {"float16": "float32", "float32": "float64"}
    shifted, half = run(**fields), lab.run(Experiment(model="toy", **half_run))
    assert shifted.outcome == half.outcome
    assert (shifted.file, shifted.line, shifted.phase) == (half.file, half.line, half.phase)
    assert {role: t["dtype"] for role, t in shifted.dtypes.items()} == {
        role: up[t["dtype"]] for role, t in half.dtypes.items()
    }
    if half.message:
        assert shifted.messages_match == "but for the dtype pair"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype_pair": "double"}, "dtype_pair is 'double'; allowed are half-float, float-double"),
        ({"dtype_pair": "float-double", "opt_level": "autocast-fp16"}, "O0, O1, O2, O3 and half"),
        ({"dtype_pair": "float-double", "opt_level": "bf16"}, "bf16 can't be run with the dtype"),
        ({"dtype_pair": "float-double", "device": "cuda"}, "is for a CPU: device='cpu'"),
        ({"rules": "recorded", "dtype_pair": "float-double"}, "shifts the dtype pair by itself"),
        ({"rules": "recorded", "device": "cuda"}, "a real torch 1.2 on a CPU"),
        ({"rules": "recorded", "opt_level": "autocast-bf16"}, "autocast-bf16 can't be run with"),
    ],
)
def test_what_can_t_be_shifted_is_refused(fields, said):
    with pytest.raises(InputError, match=said):
        Experiment(**fields)
