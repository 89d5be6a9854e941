"""The package's front: every public name is there, and nothing heavy loads with it."""

import importlib
import subprocess
import sys
import types

import pytest

import syncbn_lab as lab


@pytest.mark.parametrize("name", lab.__all__)
def test_every_public_name_resolves(name):
    assert getattr(lab, name) is not None
    assert name in dir(lab)


def test_the_public_names_are_sorted_and_single():
    assert lab.__all__ == sorted(set(lab.__all__))


def test_run_and_cases_stay_functions_after_their_modules_are_imported():
    for name in ("run", "cases"):
        module = importlib.import_module(f"syncbn_lab.{name}")
        assert isinstance(module, types.ModuleType)
        assert isinstance(getattr(lab, name), types.FunctionType)
        assert getattr(lab, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^syncbn_lab has no attribute 'optlevel'$"):
        _ = lab.optlevel
    assert not hasattr(lab, "rum")


def test_a_star_import_brings_the_public_names():
    namespace = {}
    exec("from syncbn_lab import *", namespace)
    assert set(lab.__all__) <= set(namespace)


IMPORTS = """
import sys
import syncbn_lab as lab
import syncbn_lab.run, syncbn_lab.cases, syncbn_lab.params
lab.Experiment(); lab.cases(); lab.find_case("apex-481-o1")
assert callable(lab.run) and callable(lab.cases)
heavy = {"torch", "numpy", "pandas", "matplotlib", "apex", "IPython"} & set(sys.modules)
print(*sorted(heavy))
"""


def test_importing_the_package_and_making_experiments_loads_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_an_input_error_shows_its_sentence_in_place_of_a_traceback():
    error = lab.InputError("seed is 1.5; allowed is a whole number.")
    assert isinstance(error, ValueError)
    assert error._render_traceback_() == ["InputError: seed is 1.5; allowed is a whole number."]
