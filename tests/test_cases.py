"""The reported cases: every file loads, and a message is told from its neighbours."""

import dataclasses

import pytest
import yaml

from syncbn_lab.cases import (
    Case,
    _load,
    cases,
    find_case,
    markdown_table,
    reported_for,
)
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.locations import data_folder
from syncbn_lab.messages import match_message
from syncbn_lab.policies import POLICIES

# The public report, word for word (NVIDIA/apex, issue 481).
O1 = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.cuda.HalfTensor but got torch.cuda.FloatTensor"
)
O2 = "expected device cuda:0 and dtype Float but got device cuda:0 and dtype Half"


def test_every_file_is_a_case():
    files = sorted(path.stem for path in data_folder("reported").glob("*.yaml"))
    assert [case.case for case in cases()] == files
    assert len(files) >= 7


@pytest.mark.parametrize(
    ("name", "seen", "phase", "place"),
    [
        ("apex-481-o1", O1, "backward", (None, None)),
        ("apex-481-o2", O2, "forward", ("apex/parallel/sync_batchnorm.py", 109)),
        ("apex-481-o3-keep", O2, "forward", ("apex/parallel/sync_batchnorm.py", 109)),
    ],
)
def test_the_three_cases_say_what_the_report_says(name, seen, phase, place):
    case = find_case(name)
    assert case.seen == seen
    assert case.phase == phase
    assert (case.file, case.line) == place
    assert case.error_type == "RuntimeError"
    assert case.date == "2019-09-07"
    assert case.environment["torch"] == "1.2"
    assert find_case(f"{name}.yaml") is case


def test_every_case_is_told_whole_and_in_one_line_each():
    for case in cases():
        for field in dataclasses.fields(Case):
            value = getattr(case, field.name)
            if isinstance(value, str):
                assert value == " ".join(value.split()), (case.case, field.name)


def test_an_unknown_case_is_refused_with_the_names():
    with pytest.raises(InputError) as caught:
        find_case("apex-482")
    names = ", ".join(case.case for case in cases())
    assert str(caught.value) == f"case is 'apex-482'; allowed are {names}."


# ---------------------------------------------------------------- broken files

WHOLE = {
    "case": "broken",
    "title": "t",
    "report": "r",
    "seen": "s",
    "cause": "c",
    "cure": "u",
    "command": "m",
}


def _refusal(tmp_path, text):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "broken.yaml").write_bytes(content)
    with pytest.raises(InputError) as caught:
        _load(tmp_path)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("broken.yaml ")
    assert said.endswith(".")
    return said


def test_a_whole_file_is_taken(tmp_path):
    (tmp_path / "broken.yaml").write_text(yaml.safe_dump(WHOLE))
    (case,) = _load(tmp_path)
    assert case.experiment is None
    assert case.date is None


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("empty", [None, ""])  # not there, and there without a value
def test_a_missing_field_is_named(tmp_path, name, empty):
    fields = {k: v for k, v in WHOLE.items() if k != name}
    if empty is not None:
        fields[name] = empty
    said = _refusal(tmp_path, yaml.safe_dump(fields))
    assert said.startswith(f"broken.yaml is not a case: it lacks {name}; a case has case, title, ")
    assert said.endswith(
        "may have date, environment, configuration, phase, error_type, file, line."
    )


@pytest.mark.parametrize("name", ["sean", 5])  # a typing error, and a key that is no text
def test_an_unknown_field_is_named(tmp_path, name):
    said = _refusal(tmp_path, yaml.safe_dump({**WHOLE, name: "x"}, sort_keys=False))
    assert said.startswith(f"broken.yaml is not a case: it has unknown {name}; a case has case, ")


def test_a_name_that_is_not_the_files_is_refused(tmp_path):
    assert _refusal(tmp_path, yaml.safe_dump({**WHOLE, "case": "other"})) == (
        "broken.yaml calls itself 'other'; its name must be the same."
    )


@pytest.mark.parametrize("text", ["", "[1, 2]", "just words", "5"])  # all of them YAML, no table
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    assert _refusal(tmp_path, text) == ("broken.yaml is not a case: it holds no table of fields.")


@pytest.mark.parametrize(
    "text",
    [
        "case: [broken",  # a bracket left open; PyYAML's own message has several lines
        "case: broken\n\ttitle: t",  # a tab
        b"case: \xff\xfe",  # not UTF-8
    ],
)
def test_a_file_that_is_no_yaml_is_refused(tmp_path, text):
    assert _refusal(tmp_path, text).startswith("broken.yaml can't be read as YAML: ")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("seen", 5, "text"),
        ("error_type", ["RuntimeError"], "text"),
        ("environment", "torch 1.2", "a table"),
        ("configuration", "O1", "a table"),
        ("line", "109", "a whole number"),
        ("line", True, "a whole number"),  # a bool is an int to Python
    ],
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path, name, value, kind):
    assert _refusal(tmp_path, yaml.safe_dump({**WHOLE, name: value})) == (
        f"broken.yaml is not a case: {name} is {value!r}, and has to be {kind}."
    )


@pytest.mark.parametrize(
    ("configuration", "said"),
    [
        ({"opt_level": "O7"}, "opt_level is 'O7'; allowed are O0, O1, "),
        ({"optlevel": "O1"}, "an experiment has no field optlevel; its fields are opt_level, "),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True does not go"),
    ],
)
def test_a_configuration_that_is_no_experiment_is_refused(tmp_path, configuration, said):
    text = _refusal(tmp_path, yaml.safe_dump({**WHOLE, "configuration": configuration}))
    assert text.startswith(f"broken.yaml has a configuration that is no experiment: {said}")


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("reported", "seen", "match"),
    [
        (O2, O2, "verbatim"),
        (O2, f"  {O2}\n", "verbatim"),  # blanks around a pasted message
        (O2, O2.replace("cuda:0", "cpu"), "but for the device"),
        (O2, O2.replace("cuda:0", "cuda:3"), "but for the device"),
        (O1, O1.replace("torch.cuda.", "torch."), "but for the device"),
        # One device in the report, two in the message: a device error, not a dtype error.
        (O2, O2.replace("cuda:0", "cpu", 1), "no"),
        (O1, O1.replace("torch.cuda.", "torch.", 1), "no"),
        # The replay on a real torch 1.2 on a CPU: (float, double) for (half, float).
        (
            O2,
            "expected device cpu and dtype Double but got device cpu and dtype Float",
            "but for the dtype pair",
        ),
        (O2, O2.replace("Float", "Double").replace("Half", "Float"), "but for the dtype pair"),
        (
            O1,
            O1.replace("cuda.Float", "Double").replace("cuda.Half", "Float"),
            "but for the dtype pair",
        ),
        (O2, O2.replace("Half", "BFloat16"), "but for the dtype pair"),
        # The swapped pair is another error: the other operand is the wider one.
        (O2, "expected device cuda:0 and dtype Half but got device cuda:0 and dtype Float", "no"),
        (O2, "expected device cpu and dtype Float but got device cpu and dtype Double", "no"),
        (
            O1,
            O1.replace("Half", "X").replace("Float", "Half").replace("X", "Float"),
            "no",
        ),
        # Two dtypes in the report, one in the message.
        (O2, "expected device cuda:0 and dtype Half but got device cuda:0 and dtype Half", "no"),
        (O1, O1.replace("index 0", "index 1"), "no"),  # another gradient
        (O2, "Input type (float) and bias type (c10::Half) should be the same", "no"),
        (O2, O2 + " somewhere", "no"),
        (O1, O2, "no"),
        (O2, None, "no"),
        (None, O2, "no"),
        (None, None, "no"),
        (O2, "", "no"),
    ],
)
def test_how_far_a_message_is_the_reported_one(reported, seen, match):
    assert match_message(reported, seen) == match


# ---------------------------------------------------------------- which case a run belongs to


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"opt_level": "O1"}, "apex-481-o1"),
        ({"opt_level": "O2"}, "apex-481-o2"),
        # What O2 does by itself, and what apex printed in the report.
        ({"opt_level": "O2", "keep_batchnorm_fp32": True}, "apex-481-o2"),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True}, "apex-481-o3-keep"),
        # Controls: no error was reported for these.
        ({"opt_level": "O0"}, None),
        ({"opt_level": "O3"}, None),
        ({"opt_level": "O3", "keep_batchnorm_fp32": False}, None),
        ({"opt_level": "O2", "keep_batchnorm_fp32": False}, None),
    ],
)
def test_a_configuration_was_reported_or_is_a_control(fields, name):
    found = reported_for(Experiment(**fields))
    assert (found.case if found else None) == name
    # Another revision, other rules or another model of it are compared with the same report…
    changed = Experiment(**fields, revision="return-fixed", rules="installed", model="toy", seed=3)
    assert reported_for(changed) is found
    # …and another layer was not reported at all.
    for layer in ("batchnorm", "torch"):
        assert reported_for(Experiment(**fields, implementation=layer)) is None


def test_recipes_that_nobody_reported_are_controls():
    for name, policy in POLICIES.items():
        if policy.kind != "apex":
            assert reported_for(Experiment(opt_level=name)) is None


def test_a_silent_fault_has_no_message_to_be_compared_with():
    silent = find_case("torch-half-counts")
    assert silent.error_type is None
    assert reported_for(silent.experiment) is None


def test_the_table_has_a_row_for_every_case():
    head, rule, *rows = markdown_table().splitlines()
    assert len(rows) == len(cases())
    for row, case in zip(rows, cases(), strict=True):
        assert case.cure in row
        assert case.command in row
        # A bar inside a cell is escaped, so every row has as many cells as the head.
        assert row.replace("\\|", "").count("|") == head.count("|") == rule.count("|")
