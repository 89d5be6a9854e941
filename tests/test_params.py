"""Notebook parameters: what each choice comes to, and which sentence stops a wrong one."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import syncbn_lab as lab
from syncbn_lab import params
from syncbn_lab.cases import cases
from syncbn_lab.errors import InputError
from syncbn_lab.params import DEFAULTS, choose, parameters
from syncbn_lab.run import machine

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "repro.ipynb"
NAMES = ", ".join(DEFAULTS)


def refusal(call, *arguments):
    with pytest.raises(InputError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


def chosen(**given):
    """What was chosen: opt_level, keep_batchnorm_fp32, and the case it is compared with."""
    found = choose(given)
    experiment = found.experiment
    name = found.case.case if found.case else None
    return experiment.opt_level, experiment.keep_batchnorm_fp32, name


# ---------------------------------------------------------------- choose


def test_nothing_given_is_the_first_reported_configuration():
    found = choose({})
    assert found.case.case == "apex-481-o1"
    assert found.given == {}
    for name, default in DEFAULTS.items():
        if name not in ("case", "keep_batchnorm_fp32"):
            assert getattr(found.experiment, name) == default
    assert found.experiment.keep_batchnorm_fp32 is None


@pytest.mark.parametrize(
    ("opt_level", "keep", "case"),
    [
        ("O0", None, None),  # a control
        ("O1", None, "apex-481-o1"),
        ("O2", None, "apex-481-o2"),
        ("O3", True, "apex-481-o3-keep"),  # as reported: with keep
        ("autocast-fp16", None, None),
        ("half", None, None),
    ],
)
def test_an_opt_level_is_taken_as_it_was_reported(opt_level, keep, case):
    assert chosen(opt_level=opt_level) == (opt_level, keep, case)
    assert chosen(opt_level=opt_level, keep_batchnorm_fp32="as reported") == (opt_level, keep, case)


@pytest.mark.parametrize(
    ("given", "keep"),
    [
        (True, True),  # papermill makes a bool of True
        (False, False),
        (None, None),  # and nothing at all of None
        ("True", True),  # JupyterLab and the command line keep the text
        ("true", True),
        ("False", False),
        ("false", False),
        ("None", None),
        ("none", None),
    ],
)
def test_keep_is_read_in_every_form_it_arrives_in(given, keep):
    case = "apex-481-o3-keep" if keep else None
    assert chosen(opt_level="O3", keep_batchnorm_fp32=given) == ("O3", keep, case)


@pytest.mark.parametrize(
    "value",
    [
        "maybe",
        "",
        "1",  # not a guess at True
        1,  # equal to True to Python
        0.0,
        ["True"],
    ],
)
def test_another_keep_is_refused(value):
    assert refusal(choose, {"opt_level": "O3", "keep_batchnorm_fp32": value}) == (
        f"keep_batchnorm_fp32 is {value!r}; allowed are True, False, None and 'as reported'."
    )


@pytest.mark.parametrize(
    ("case", "opt_level", "keep"),
    [
        ("apex-481-o1", "O1", None),
        ("apex-481-o2", "O2", None),
        ("apex-481-o3-keep", "O3", True),
        ("apex-481-o3-keep.yaml", "O3", True),  # the file's name, as papermill -p case completes it
    ],
)
def test_a_case_fills_in_what_was_not_given(case, opt_level, keep):
    found = choose({"case": case, "seed": 3, "rules": "installed"})
    assert found.experiment.opt_level == opt_level
    assert found.experiment.keep_batchnorm_fp32 is keep
    assert found.case.case == case.removesuffix(".yaml")
    # What was given goes first, also before the case's own rules.
    assert (found.experiment.seed, found.experiment.rules) == (3, "installed")
    # Saying again what the case says is no contradiction.
    assert choose({"case": case, "opt_level": opt_level, "keep_batchnorm_fp32": keep}).case is (
        found.case
    )


def test_a_case_of_another_layer_fills_in_every_field():
    experiment = choose({"case": "torch-half-counts"}).experiment
    assert experiment.opt_level == "half"
    assert (experiment.implementation, experiment.rules) == ("torch", "installed")
    assert (experiment.device, experiment.world_size, experiment.model) == ("cuda", 2, "layer")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"case": "apex-481-o2", "opt_level": "O3"},
            "case apex-481-o2 is opt_level O2, and opt_level was given as 'O3'; leave one of the "
            "two out.",
        ),
        (
            {"case": "apex-481-o2", "implementation": "batchnorm"},
            "case apex-481-o2 is implementation apex, and implementation was given as "
            "'batchnorm'; leave one of the two out.",
        ),
        # keep_batchnorm_fp32 is part of what was reported.
        (
            {"case": "apex-481-o3-keep", "keep_batchnorm_fp32": False},
            "case apex-481-o3-keep is O3 + keep_batchnorm_fp32=True, and keep_batchnorm_fp32 was "
            "given as False; leave one of the two out.",
        ),
        (
            {"case": "apex-481-o3-keep", "keep_batchnorm_fp32": "None"},
            "case apex-481-o3-keep is O3 + keep_batchnorm_fp32=True, and keep_batchnorm_fp32 was "
            "given as 'None'; leave one of the two out.",
        ),
        (
            {"case": "apex-481-o2", "keep_batchnorm_fp32": False},
            "case apex-481-o2 is O2, and keep_batchnorm_fp32 was given as False; leave one of the "
            "two out.",
        ),
    ],
)
def test_a_case_and_a_value_that_contradicts_it_are_refused(given, said):
    assert refusal(choose, given) == said


def test_keep_that_the_recipe_has_by_itself_is_no_contradiction():
    assert chosen(case="apex-481-o2", keep_batchnorm_fp32=True) == ("O2", True, "apex-481-o2")


def test_a_case_without_an_experiment_says_what_answers_it():
    with_one = ", ".join(case.case for case in cases() if case.configuration)
    assert refusal(choose, {"case": "apex-import-amp"}) == (
        "case apex-import-amp has no experiment: python -m syncbn_lab doctor is what answers it. "
        f"Cases with one are {with_one}."
    )


@pytest.mark.parametrize("value", ["apex-482", 5])
def test_an_unknown_case_is_refused_with_the_names(value):
    names = ", ".join(case.case for case in cases())
    assert refusal(choose, {"case": value}) == f"case is {value!r}; allowed are {names}."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"opt_level": "O7"}, "opt_level is 'O7'; allowed are O0, O1, "),
        ({"opt_level": ["O1"]}, "opt_level is ['O1']; allowed are O0, O1, "),  # not even hashable
        ({"opt_level": None}, "opt_level is None; allowed are O0, O1, "),
        ({"seed": 1.5}, "seed is 1.5; allowed is a whole number from 0 "),
        ({"revision": "newest"}, "revision is 'newest'; allowed are reported, cast-added, "),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "True"}, "keep_batchnorm_fp32=True does not "),
        ({"optlevel": "O3"}, "an experiment has no field optlevel; its fields are opt_level, "),
    ],
)
def test_a_wrong_value_is_refused_by_the_experiment(given, said):
    assert refusal(choose, given).startswith(said)


def test_the_sentence_says_what_will_run():
    assert choose({}).sentence() == (
        "O1, apex (reported), torch-1.2 rules, encoder, cpu; compared with the reported case "
        "apex-481-o1."
    )
    assert (
        choose({"opt_level": "O0"}).sentence().endswith("; a control: nothing was reported for it.")
    )


# ---------------------------------------------------------------- parameters, outside a notebook


def test_a_notebooks_variables_are_read_and_the_others_left_alone():
    namespace = {**DEFAULTS, "opt_level": "O2", "seed": 4, "In": [], "exit": None, "x": 1}
    found = parameters(namespace)
    assert found.given == {"opt_level": "O2", "seed": 4}
    assert found.case.case == "apex-481-o2"


def test_a_gpu_that_is_not_there_is_refused():
    if machine()["cuda_available"]:
        pytest.skip("there is a GPU")
    said = refusal(parameters, {**DEFAULTS, "device": "cuda"})
    assert said.startswith("device is 'cuda', but torch ")
    assert "allowed here is cpu" in said


def test_outside_ipython_nothing_was_injected():
    assert params.injected_names() == []


# ---------------------------------------------------------------- inside a real IPython shell

IN_A_SHELL = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def run(source):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = shell.run_cell(source, store_history=True)
    return result, said.getvalue()

run("import syncbn_lab as lab")
run("from syncbn_lab.params import DEFAULTS, injected_names")
run("opt_level = 'O1'  # the parameters cell sets variables too")
replies = []
for source in json.loads(sys.argv[1]):
    result, said = run(source)
    assert result.success, said
    names = run("injected_names()")[0].result
    if "word" in names:
        chosen, text = run("lab.choices(word=['one', 'two'], other=['three'])")
        given = text if chosen.error_in_exec else vars(chosen.result)
        replies.append([names, type(chosen.error_in_exec).__name__, given])
        continue
    checked, text = run("lab.parameters({**DEFAULTS, **globals()})")
    replies.append([names, type(checked.error_in_exec).__name__, text])
print(json.dumps(replies))
"""
CELLS = [
    ("x = 1", []),  # no injected cell yet
    ("# Parameters of my own plot\nwidth = 3", []),  # a comment that only begins alike
    ('# Parameters\noptlevel = "O3"\n', ["optlevel"]),  # a typing error
    ('# Parameters\nopt_level = "O7"\nseed = 2\n', ["opt_level", "seed"]),  # corrected, run again
    ('# Parameters\nopt_level: str = "O1"\nseed: int = 1.5\n', ["opt_level", "seed"]),
    ('# Parameters\nword = "two"\n', ["word"]),  # of a notebook whose parameters are words
    ('# Parameters\nword = "six"\n', ["word"]),
    ('# Parameters\nword = "two"\nname = "x"\n', ["word", "name"]),
    ("# Parameters\nIn = 5\n", ["In"]),  # takes IPython's own list of inputs away
    ("# Parameters\nget_ipython = 5\n", ["get_ipython"]),  # and its way to the shell
]


@pytest.fixture(scope="module")
def replies():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_SHELL, json.dumps([source for source, _ in CELLS])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_injected_names_are_those_of_the_latest_injected_cell(replies):
    assert [reply[0] for reply in replies] == [names for _, names in CELLS]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (2, f"optlevel is no parameter of this notebook; its parameters are {NAMES}."),
        (3, "opt_level is 'O7'; allowed are O0, O1, O2, O3, autocast-fp16, "),
        (4, "seed is 1.5; allowed is a whole number from 0 to 9223372036854775807."),
        (6, "word is 'six'; allowed are one, two."),
        (7, "name is no parameter of this notebook; its parameters are word, other."),
        (8, f"In is no parameter of this notebook; its parameters are {NAMES}."),
        (9, f"get_ipython is no parameter of this notebook; its parameters are {NAMES}."),
    ],
)
def test_a_wrong_parameter_ends_in_one_sentence_without_a_traceback(replies, cell, said):
    _, kind, text = replies[cell]
    assert kind == "InputError"
    assert text.strip().startswith(f"InputError: {said}")
    assert "\n" not in text.strip()


def test_words_are_chosen_among_those_allowed(replies):
    assert replies[5][1:] == ["NoneType", {"word": "two", "other": "three"}]


def test_outside_a_notebook_the_first_words_are_chosen():
    assert vars(lab.choices(word=["one", "two"])) == {"word": "one"}


# ---------------------------------------------------------------- the notebook agrees


def _parameters_cell():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    (cell,) = (c for c in notebook["cells"] if "parameters" in c["metadata"].get("tags", []))
    return "".join(cell["source"])


def test_the_parameters_cell_has_these_names_defaults_and_types():
    source = _parameters_cell()
    tree = ast.parse(source)
    found = {node.target.id: ast.literal_eval(node.value) for node in tree.body}
    assert found == DEFAULTS
    assert list(found) == list(DEFAULTS)
    for node in tree.body:
        # Plain types only: papermill drops the others from its help.
        assert node.annotation.id == type(DEFAULTS[node.target.id]).__name__
    for line in source.splitlines():
        # One parameter a line, with its help behind it.
        assert re.fullmatch(r"\w+: \w+ = .+  # \S.+", line), line


def test_papermill_lists_every_parameter_with_type_and_help():
    from papermill.inspection import inspect_notebook

    listed = inspect_notebook(str(NOTEBOOK))
    assert list(listed) == list(DEFAULTS)
    for name, default in DEFAULTS.items():
        assert listed[name]["inferred_type_name"] == type(default).__name__
        assert ast.literal_eval(listed[name]["default"]) == default
        assert len(listed[name]["help"]) > 3
