"""Every field of an experiment is checked when it is made; the sentence says what is allowed."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest

from syncbn_lab.errors import InputError
from syncbn_lab.experiment import (
    DEVICES,
    INPUTS,
    MODELS,
    RULES,
    Experiment,
    experiment_from_dict,
)
from syncbn_lab.implementations import IMPLEMENTATIONS
from syncbn_lab.implementations.revisions import REVISION_NAMES
from syncbn_lab.policies import POLICIES

CHOICES = {
    "opt_level": list(POLICIES),
    "implementation": list(IMPLEMENTATIONS),
    "revision": list(REVISION_NAMES),
    "rules": list(RULES),
    "device": list(DEVICES),
    "model": list(MODELS),
    "input": list(INPUTS),
}


def refusal(**fields):
    with pytest.raises(InputError) as caught:
        Experiment(**fields)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "value",
    [
        "O7",  # a word that is none of them
        "",  # nothing typed
        "o1 ",  # near, but neither case nor blanks are guessed at
        None,  # papermill -p name None
        True,  # papermill -p name True
        3,  # papermill -p name 3
        ["O1"],  # papermill -y "name: [O1]": not even hashable
        "two\nlines",  # must not break the sentence
    ],
)
def test_a_choice_that_is_not_allowed_is_refused_with_the_list(name, value):
    assert refusal(**{name: value}) == f"{name} is {value!r}; allowed are " + (
        f"{', '.join(CHOICES[name])}."
    )


@pytest.mark.parametrize("name", CHOICES)
def test_every_listed_choice_is_taken(name):
    for value in CHOICES[name]:
        assert getattr(Experiment(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("world_size", 1, 16), ("seed", 0, 2**63 - 1), ("steps", 1, 10**6)],
)
def test_whole_numbers_are_whole_and_in_range(name, low, high):
    # Both ends are taken, their neighbours are not.
    assert getattr(Experiment(**{name: low}), name) == low
    assert getattr(Experiment(**{name: high}), name) == high
    for value in (
        low - 1,
        high + 1,
        1.5,  # papermill passes it on as a float
        1.0,  # a float too, however whole
        True,  # a bool is an int to Python
        "1",  # text
        None,
        float("nan"),
    ):
        assert refusal(**{name: value}) == (
            f"{name} is {value!r}; allowed is a whole number from {low} to {high}."
        )


@pytest.mark.parametrize(
    "value",
    [
        0,  # the lower end is open
        -1.0,
        86400,  # so is the upper one
        float("inf"),
        float("nan"),  # compares with nothing
        True,  # a bool is a number to Python
        "120",
        None,
    ],
)
def test_a_time_limit_is_a_number_of_seconds(value):
    assert refusal(time_limit=value) == (
        f"time_limit is {value!r}; allowed is a number of seconds above 0 and below 86400."
    )


def test_a_time_limit_may_be_whole_or_not():
    assert Experiment(time_limit=1).time_limit == 1
    assert Experiment(time_limit=0.5).time_limit == 0.5


@pytest.mark.parametrize("value", ["True", 1, 0, "maybe"])  # 1 == True, and is refused all the same
def test_keep_batchnorm_fp32_is_a_bool_or_none(value):
    assert refusal(opt_level="O3", keep_batchnorm_fp32=value) == (
        f"keep_batchnorm_fp32 is {value!r}; allowed are True, False and None."
    )


def _apex_frontend():
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no apex is installed")
    return (Path(spec.submodule_search_locations[0]) / "amp" / "frontend.py").read_text()


@pytest.mark.parametrize("keep", [True, False])
def test_o1_with_keep_is_refused_in_our_words_and_in_those_of_the_installed_apex(keep):
    text = refusal(opt_level="O1", keep_batchnorm_fp32=keep)
    assert text.startswith(f"keep_batchnorm_fp32={keep} does not go with O1, which patches ")
    assert "leave it out" in text
    quoted = re.fullmatch(r'.* \(apex itself says "(.*)"\)\.', text)[1]
    # apex's source writes it as adjacent literals and a format.
    literals = "".join(re.findall(r'"([^"\n]*)"', _o1_branch(_apex_frontend())))
    assert quoted == literals.format(keep)


def _o1_branch(source):
    start = source.index('elif name == "keep_batchnorm_fp32":')
    return source[source.index("warn_or_err(", start) : source.index(".format(value)", start)]


@pytest.mark.parametrize("name", ["autocast-fp16", "autocast-bf16", "half", "bf16"])
@pytest.mark.parametrize("keep", [True, False])
def test_keep_belongs_to_apexs_recipes(name, keep):
    assert refusal(opt_level=name, keep_batchnorm_fp32=keep) == (
        f"keep_batchnorm_fp32={keep} belongs to apex's O0, O2 and O3; {name} does not take it, "
        "leave it out."
    )


def test_an_experiment_is_frozen_and_replace_checks_again():
    experiment = Experiment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.seed = 1
    assert experiment.replace(seed=7).seed == 7
    assert experiment.seed == 0
    with pytest.raises(InputError, match="seed is -1; allowed is a whole number"):
        experiment.replace(seed=-1)


def test_plain_values_and_back():
    experiment = Experiment(opt_level="O3", keep_batchnorm_fp32=True, world_size=2, time_limit=3)
    assert experiment_from_dict(experiment.to_dict()) == experiment
    assert experiment_from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment


def test_an_unknown_field_is_refused_with_the_fields():
    names = ", ".join(field.name for field in dataclasses.fields(Experiment))
    with pytest.raises(InputError) as caught:
        # 5: a YAML file may have a number for a key.
        experiment_from_dict({"optlevel": "O3", "seed": 0, 5: 1})
    assert str(caught.value) == f"an experiment has no field 5, optlevel; its fields are {names}."


@pytest.mark.parametrize(
    ("opt_level", "keep", "at_work"),
    [
        ("O0", None, None),  # nothing is float16, nothing to keep
        ("O1", None, None),
        ("O2", None, True),  # apex prints it so in the report
        ("O2", False, False),
        ("O3", None, False),
        ("O3", True, True),
        ("half", None, None),
    ],
)
def test_keep_as_it_is_at_work(opt_level, keep, at_work):
    experiment = Experiment(opt_level=opt_level, keep_batchnorm_fp32=keep)
    assert experiment.keeps_batchnorm_fp32 is at_work


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_keep_at_work_is_what_the_installed_apex_sets(opt_level):
    source = _apex_frontend()
    body = source[source.index(f"class {opt_level}:") :]
    wanted = re.search(r"properties\.keep_batchnorm_fp32 = (\w+)", body)[1]
    assert str(Experiment(opt_level=opt_level).keeps_batchnorm_fp32) == wanted


def test_apex_is_needed_as_recipe_or_as_layer():
    assert Experiment(opt_level="O0", implementation="batchnorm").needs_apex
    assert Experiment(opt_level="half", implementation="apex").needs_apex
    assert not Experiment(opt_level="half", implementation="torch").needs_apex


def test_one_line_tells_an_experiment_from_its_neighbours():
    experiment = Experiment(opt_level="O3", keep_batchnorm_fp32=True, world_size=2)
    assert experiment.describe() == (
        "O3 + keep_batchnorm_fp32=True, apex (reported), torch-1.2 rules, encoder, cpu, 2 ranks"
    )
    assert Experiment(opt_level="O0", implementation="batchnorm").describe() == (
        "O0, batchnorm, torch-1.2 rules, encoder, cpu"
    )
