"""The record of a real torch 1.2: whole, of today's recorder, and found by what rests on it."""

import json
import pickle
import re
import subprocess
import sys

import pytest
import torch

from syncbn_lab.errors import InputError
from syncbn_lab.implementations.apex import find_apex
from syncbn_lab.messages import NAME, PAIR, VERBATIM
from syncbn_lab.real_torch12 import ready_python
from syncbn_lab.rules import Torch12RuleError, describe_rules, record, torch12_rules
from syncbn_lab.rules.recorder import answers

_LISTS = """
import json
from syncbn_lab.implementations import stand_ins
stand_ins.install("cpu")
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
found = [name for name, _ in functional_overrides.BANNED_FUNCS]
for lists in (functional_overrides, tensor_overrides, torch_overrides):
    for which in ("FP16_FUNCS", "FP32_FUNCS", "CASTS", "SEQUENCE_CASTS"):
        found += getattr(lists, which, [])
print(json.dumps(found))
"""
RULES = {row["rule"] for row in describe_rules()}


@pytest.fixture(scope="module")
def kept():
    return record.read_record()


def test_the_record_is_of_a_real_torch_1_2(kept):
    assert kept.provenance["torch"] == "1.2.0"
    assert re.fullmatch("[0-9a-f]{40}", kept.provenance["torch_git_version"])
    assert kept.provenance["python"].startswith("CPython 3.")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept.provenance["date"])
    assert kept.provenance["platform"]


def test_the_record_is_of_this_recorder(kept):
    """After a change of the recorder: `python -m syncbn_lab torch12 --record data/torch-1.2`."""
    assert kept.provenance["recorder_sha256"] == answers.recorder_hash()


def test_every_row_is_recorded_in_its_order(kept):
    asked = answers.rows()
    assert [str(row) for row in asked] == list(kept.answers)
    assert len(asked) >= 800
    assert {row.rule for row in asked} <= RULES | {"scalar", "conversion"}
    # truth-only is judged by rows of all and any, which stand with the other reductions
    assert RULES - {row.rule for row in asked} == {"truth-only"}


def test_what_was_asked_for_is_there(kept):
    rows = list(kept.answers.values())
    assert {row.form for row in rows} == {"out of place", "in place", "out=", "autograd"}
    names = " ".join(kept.answers)
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64", "int32", "uint8", "bool"):
        assert f"{dtype}[3]" in names
        assert f"{dtype}[]" in names
    assert "add_(float16[3], float32[])" in kept.answers
    assert "__mul__(int64[3], 2.5)" in kept.answers
    outcomes = {row.outcome for row in rows}
    assert outcomes == {answers.RESULT, answers.ERROR, answers.NO_KERNEL}
    for row in rows:
        assert bool(row.message) == (row.outcome != answers.RESULT) == bool(row.error_type)
        assert bool(row.result_dtype) == (row.outcome == answers.RESULT)
        # Neither places in torch's sources nor this machine's paths.
        assert not re.search(r"frame #|/pytorch/|\.cpp|/home|/root", row.message), row


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("add(float16[3], float32[3])", "expected device cpu and dtype Float but got device cpu"),
        ("add(float32[3], float16[])", "float32"),
        ("mul_(int64[3], 2.5)", "int64"),
        ("__truediv__(int64[3], int64[3])", "int64"),
        ("conv2d(float16[1,2,5,5], float16[3,2,3,3])", "_thnn_conv2d_forward not supported on CPU"),
        (
            "Function, leaf(float16, returns float32)",
            "Function GivenBackward returned an invalid gradient at index 0 - expected type "
            "torch.HalfTensor but got torch.FloatTensor",
        ),
    ],
)
def test_telling_rows(kept, row, said):
    answer = kept.answers[row]
    assert (answer.message or answer.result_dtype).startswith(said)


def test_every_function_of_amps_lists_has_a_row(kept):
    """apex.amp patches these functions to cast their operands: each one's rule was asked."""
    if find_apex().status != "usable":
        pytest.skip("no apex here to read the lists of")
    # In a process of its own: what apex imports needs stand-ins.
    said = subprocess.run([sys.executable, "-c", _LISTS], capture_output=True, text=True)
    listed = set(json.loads(said.stdout.splitlines()[-1]))
    known = {re.split(r"[ (]", name.removeprefix("F."))[0] for name in kept.answers}
    # cpu converts nothing; the others are names that today's and torch 1.2's Python don't call.
    assert listed - known <= {"cpu", "__div__", "__rdiv__", "__idiv__", "__matmul__"}
    assert len(listed) > 80


def test_a_record_that_is_none(tmp_path):
    with pytest.raises(InputError, match=r"the record gone.csv can't be read: No such file"):
        record.read_record(tmp_path / "gone.csv")
    with pytest.raises(InputError, match="this is no record: its columns are not row, rule, "):
        record.parse("a,b\n1,2\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "exit code 3."),
        ("echo 0 of 9 rows >&2; kill -FPE $$", "it was killed by SIGFPE."),
        ("echo no torch >&2; exit 1", "exit code 1; it said: no torch."),
    ],
)
def test_an_interpreter_that_can_t_be_asked(tmp_path, command, said):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{command}\n")
    python.chmod(0o755)
    with pytest.raises(InputError) as caught:
        record.ask_there(python)
    assert str(caught.value) == f"{python} could not record its torch's rules: {said}"


def test_the_row_of_the_very_operation_is_named_where_there_is_one():
    half, single = torch.ones(1, 1, 3, 3).half(), torch.ones(1, 1, 3, 3)
    conv2d = _raised(lambda: torch.nn.functional.conv2d(single, half))
    assert conv2d.recorded.row.startswith("conv2d(float32[")
    l1 = _raised(lambda: torch.nn.functional.l1_loss(half, single))
    assert l1.recorded.row == "l1_loss(float32[3], float64[3])"


# ---------------------------------------------------------------- evidence


def _raised(operation):
    with pytest.raises(Torch12RuleError) as caught, torch12_rules():
        operation()
    return caught.value


def test_a_message_names_the_row_it_rests_on():
    error = _raised(lambda: torch.ones(3).half() + torch.ones(3))
    assert error.recorded == record.Evidence(
        "add(float16[3], float32[3])",
        "expected device cpu and dtype Float but got device cpu and dtype Half",
        VERBATIM,
    )
    assert error.recorded.message == str(error)
    (note,) = error.__notes__
    assert note.endswith(
        "; a real torch 1.2.0 on a CPU said exactly this for add(float16[3], float32[3])"
    )
    assert pickle.loads(pickle.dumps(error)).recorded == error.recorded


def test_the_report_s_own_messages_rest_on_rows():
    """As on CUDA: the record's are a CPU's."""
    line_109 = "expected device cuda:0 and dtype Float but got device cuda:0 and dtype Half"
    assert record.evidence_for("elementwise", "add", line_109).match == VERBATIM
    gradient = (
        "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
        "type torch.cuda.HalfTensor but got torch.cuda.FloatTensor"
    )
    evidence = record.evidence_for("gradient", "SyncBatchnormFunctionBackward", gradient)
    assert (evidence.row, evidence.match) == ("Function, leaf(float16, returns float32)", NAME)
    assert evidence.sentence().endswith(
        "said the same of another name for Function, leaf(float16, returns float32)"
    )


def test_other_dtypes_in_the_same_order_are_evidence_of_a_kind():
    message = "Expected object of scalar type Int but got scalar type Long for argument #2 'mat2'"
    evidence = record.evidence_for("matmul", "mm", message)
    assert evidence.match == PAIR
    assert evidence.message.endswith("for argument #2 'mat2'")
    assert "with other dtypes for mm(" in evidence.sentence()


def test_no_row_no_evidence(monkeypatch):
    assert record.evidence_for("matmul", "mm", "something else altogether") is None
    # The rule counts: a comparison's message says nothing for a product.
    message = "Expected object of scalar type Half but got scalar type Float for argument #2 'mat2'"
    assert record.evidence_for("matmul", "mm", message) is not None
    assert record.evidence_for("comparison", "lt", message) is None


def test_rules_hold_where_there_is_no_record(monkeypatch, tmp_path):
    """The core alone, without data."""
    monkeypatch.setattr(record, "data_folder", lambda name: tmp_path)
    record.read_record.cache_clear()
    record._errors.cache_clear()
    try:
        error = _raised(lambda: torch.ones(3).half() + torch.ones(3))
        assert error.recorded is None
        assert str(error).startswith("expected device cpu and dtype Float")
    finally:
        record.read_record.cache_clear()
        record._errors.cache_clear()


def test_noted_violations_need_no_record(monkeypatch):
    def asked(*arguments):
        raise AssertionError("nobody shows evidence for what is only noted")

    monkeypatch.setattr("syncbn_lab.rules.torch12.evidence_for", asked)
    with torch12_rules(on_violation="record") as noted:
        torch.ones(3).half() + torch.ones(3)
    assert len(noted.violations) == 1


# ---------------------------------------------------------------- the real one, live


@pytest.mark.skipif(
    ready_python() is None, reason="no real torch 1.2 here (`make torch12`): the record stands"
)
def test_the_real_torch_1_2_still_says_what_is_recorded(kept):
    live = record.parse(record.ask_there(ready_python()))
    assert live.provenance["torch"] == "1.2.0"
    assert live.answers == kept.answers
