"""Our rules held against the record of a real torch 1.2, row by row."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_lab import inputs, models
from syncbn_lab.errors import InputError
from syncbn_lab.rules import checks, comparison, record
from syncbn_lab.rules.comparison import AGREES, DIFFERS, KNOWN, NOT_COMPARABLE
from syncbn_lab.rules.recorder import answers
from syncbn_lab.rules.recorder.answers import Answer
from syncbn_lab.rules.table import plan_for


@pytest.fixture(scope="module")
def compared():
    return comparison.compare()


def _unexplained(compared):
    return [one.recorded.row for one in compared if one.agreement == DIFFERS and not one.reason]


def test_no_row_differs_without_a_reason(compared):
    assert _unexplained(compared) == []


def test_every_row_of_the_record_is_compared(compared):
    assert [one.recorded.row for one in compared] == list(record.read_record().answers)
    assert all(one.ours.row == one.recorded.row for one in compared)


def test_most_rows_are_comparable_and_agree(compared):
    """Figures of the README: a rule that is lost, or a reason that swallows rows, shows here."""
    count = {
        agreement: sum(one.agreement == agreement for one in compared)
        for agreement in (AGREES, DIFFERS, NOT_COMPARABLE)
    }
    assert count == {AGREES: 8926, DIFFERS: 532, NOT_COMPARABLE: 2870}
    said = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for figure in (len(compared), count[AGREES] + count[DIFFERS], count[AGREES], count[DIFFERS]):
        assert f"{figure:,}" in said


def test_float_and_double_differ_in_conv_s_words_alone(compared):
    """The pair that torch 1.2's CPU computes with, and so the one that says most."""
    whole = re.compile(r"float16|int|bool|True|__ipow__|__getitem__")
    pair = [one for one in compared if not whole.search(one.recorded.row)]
    assert len(pair) > 1500
    differ = [one for one in pair if one.agreement != AGREES]
    assert {one.recorded.rule for one in differ} <= {"conv", "gradient"}
    assert all(one.recorded.outcome == one.ours.outcome for one in differ)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.rows)
def test_every_known_difference_is_met(compared, known):
    assert any(
        re.match(known.rows, one.recorded.row) and one.reason == known.reason
        for one in compared
        if one.agreement == DIFFERS
    )


def test_a_row_without_a_kernel_counts_for_neither_side(compared):
    for one in compared:
        if one.agreement == NOT_COMPARABLE:
            assert one.recorded.outcome == answers.NO_KERNEL
            assert one.reason is None


# ---------------------------------------------------------------- a rule deliberately broken


def test_a_broken_outcome_is_named(monkeypatch):
    """A mixed sum that is let through."""
    monkeypatch.setattr(checks, "iterator", lambda inputs, output: None)
    found = _unexplained(comparison.compare(rule="elementwise"))
    assert "mul(float32[3], float64[3])" in found
    assert "add(float16[3], float32[3])" in found


def test_a_broken_word_is_named(monkeypatch):
    right = checks._object_text
    monkeypatch.setattr(checks, "_object_text", lambda e, g, where: right(g, e, where))
    found = _unexplained(comparison.compare(rule="matmul"))
    assert "mm(float32[2,3], float64[3,2])" in found


def test_a_broken_convolution_is_no_matter_of_words(monkeypatch):
    """A known difference explains words, never an outcome."""
    monkeypatch.setattr(
        comparison,
        "ask",
        lambda row: Answer(str(row), row.rule, row.form, answers.RESULT, "float32"),
    )
    found = _unexplained(comparison.compare(rule="conv"))
    assert "conv3d(float32[1,2,3,3,3], float64[3,2,2,2,2])" in found


def test_a_broken_gradient_rule_is_named(monkeypatch):
    monkeypatch.setattr("syncbn_lab.rules.gradients.function_findings", lambda node, returned: [])
    found = _unexplained(comparison.compare(rule="gradient"))
    assert "Function, leaf(float16, returns float32)" in found


def test_a_broken_dtype_is_named(monkeypatch):
    """int64 times 2.5 stayed int64."""
    monkeypatch.setattr(
        "syncbn_lab.rules.torch12.adapted", lambda plan, func, args, kwargs: (func, args, kwargs)
    )
    assert "__mul__(int64[3], 2.5)" in _unexplained(comparison.compare(rule="scalar"))


# ---------------------------------------------------------------- what the rows cover


class _Operations(TorchDispatchMode):
    """Names of the operations that one of our rules governs, as they are called."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if plan_for(func) is not None:
            self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_what_a_convolutional_network_does_was_asked():
    """Every governed operation of a training step of the encoder is met by some row."""
    x, labels, _ = inputs.load("noise", "encoder", seed=0)
    model = models.build("encoder", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with _Operations() as network:
        loss = models.loss_function("encoder", labels)(model(x))
        loss.backward()
        optimizer.step()
    with _Operations() as asked:
        for row in answers.rows():
            answers.ask(row)
    # A node's formula is today's: torch 1.2's own is judged by what it returns.
    governed = {name for name in network.seen if not name.endswith("_backward")}
    assert len(governed) > 5
    assert governed <= asked.seen


# ---------------------------------------------------------------- one rule, and live


def test_one_rule_alone():
    kept, found = comparison.compare_with("recorded", "cat")
    assert kept is record.read_record()
    assert {one.recorded.rule for one in found} == {"cat"}


def test_live_without_a_torch_1_2(monkeypatch):
    def none():
        raise InputError("no real torch 1.2 is here")

    monkeypatch.setattr(comparison, "require_python", none)
    with pytest.raises(InputError, match=r"no real torch 1\.2 is here"):
        comparison.compare_with("live")
