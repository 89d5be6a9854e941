"""Notebook parameters: read, checked, and made into an experiment before any work starts.

papermill itself only warns about a name it does not know and runs on with the default, so the
notebook reads the injected cell's source and stops on the first wrong name or value, with a
sentence that lists what is allowed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from syncbn_lab.cases import Case, cases, find_case, look_up
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment, experiment_from_dict
from syncbn_lab.implementations.apex import require_apex
from syncbn_lab.policies import POLICIES
from syncbn_lab.run import require_device, start

AS_REPORTED = "as reported"

DEFAULTS: dict[str, Any] = {
    "case": "",
    "opt_level": "O1",
    "keep_batchnorm_fp32": AS_REPORTED,
    "implementation": "apex",
    "revision": "reported",
    "rules": "torch-1.2",
    "device": "cpu",
    "world_size": 1,
    "model": "encoder",
    "seed": 0,
}
"""The parameters of repro.ipynb and their defaults; a test holds the notebook to them."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Checked parameters: what to run, and what was reported about it."""

    experiment: Experiment
    case: Case | None
    """The reported case that the run is compared with; None for a control."""
    given: dict[str, Any]
    """The parameters that somebody set, as they were given."""

    def sentence(self) -> str:
        """Say what will be run and what it is compared with."""
        against = (
            f"compared with the reported case {self.case.case}"
            if self.case
            else "a control: nothing was reported for it"
        )
        return f"{self.experiment.describe()}; {against}."


def parameters(namespace: Mapping[str, Any] | None = None) -> Parameters:
    """Check a notebook's parameters, ``lab.parameters()``, and make its experiment.

    ``namespace`` holds their values; left out, the variables of the running notebook, which
    are asked of IPython: a parameter called globals must not get in the way.

    Raises
    ------
    InputError
        On an unknown name, a value that is not allowed, values that contradict each other, a
        GPU that is not there, or an apex that is missing or is another package.
    """
    given = _given(DEFAULTS, namespace)
    chosen = choose(given)
    if chosen.experiment.needs_apex:
        require_apex()
    # From here on a run will follow, so torch may load while this process goes on.
    start()
    require_device(chosen.experiment)
    # Torch loads in its own process for some seconds; pandas and matplotlib load here meanwhile.
    with contextlib.suppress(ImportError):
        importlib.import_module("syncbn_lab.tables")
        importlib.import_module("syncbn_lab.plots")
    return chosen


def choices(**allowed: Sequence[str]) -> SimpleNamespace:
    """Check the parameters of a notebook that are each one of a few words, ``lab.choices()``.

    The first word is the default. Unknown names and other values are an InputError.
    """
    chosen = {name: words[0] for name, words in allowed.items()}
    chosen |= _given(chosen, None)
    for name, value in chosen.items():
        if value not in allowed[name]:
            raise InputError(f"{name} is {value!r}; allowed are {', '.join(allowed[name])}.")
    return SimpleNamespace(**chosen)


def _given(defaults: Mapping[str, Any], namespace: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parameters that somebody set; an unknown name is an InputError that lists the names."""
    if namespace is None:
        shell = _shell()
        namespace = {} if shell is None else shell.user_ns
    injected = injected_names()
    unknown = [name for name in injected if name not in defaults]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)} is no parameter of this notebook; its parameters are "
            f"{', '.join(defaults)}."
        )
    return {
        name: namespace[name]
        for name, default in defaults.items()
        if name in namespace and (name in injected or namespace[name] != default)
    }


def choose(given: Mapping[str, Any], defaults: Mapping[str, Any] = DEFAULTS) -> Parameters:
    """Make an experiment of the parameters that were given, and find the case it belongs to.

    A case fills in what was not given. keep_batchnorm_fp32 "as reported" is the value of the
    public report for that opt_level: True for O3, nothing for the others.
    """
    name = given.get("case") or ""
    if not isinstance(name, str):
        raise InputError(f"case is {name!r}; allowed are {', '.join(c.case for c in cases())}.")
    case = find_case(name) if name else None
    filled: dict[str, Any] = {k: v for k, v in defaults.items() if k != "case"}
    if case is not None:
        if case.configuration is None:
            raise InputError(
                f"case {case.case} has no experiment: {case.command} is what answers it. Cases "
                f"with one are {', '.join(c.case for c in cases() if c.configuration)}."
            )
        filled |= case.configuration
        _refuse_contradiction(case, given)
    filled |= {k: v for k, v in given.items() if k != "case"}
    filled["keep_batchnorm_fp32"] = _keep(filled["opt_level"], filled["keep_batchnorm_fp32"], case)
    experiment = experiment_from_dict(filled)
    if case is not None and case.experiment is not None:
        reported = case.experiment
        if experiment.keeps_batchnorm_fp32 != reported.keeps_batchnorm_fp32:
            raise InputError(
                f"case {case.case} is {reported.configuration}, and keep_batchnorm_fp32 was given "
                f"as {given['keep_batchnorm_fp32']!r}; leave one of the two out."
            )
    return Parameters(experiment, case or look_up(experiment)[0], dict(given))


def _refuse_contradiction(case: Case, given: Mapping[str, Any]) -> None:
    """A case is its opt_level and layer: another one is not that case any more."""
    for name in ("opt_level", "implementation"):
        reported = getattr(case.experiment, name)
        if name in given and given[name] != reported:
            raise InputError(
                f"case {case.case} is {name} {reported}, and {name} was given as "
                f"{given[name]!r}; leave one of the two out."
            )


def _keep(opt_level: object, value: Any, case: Case | None) -> bool | None:
    """keep_batchnorm_fp32 from what papermill, JupyterLab or a command line make of it."""
    if value == AS_REPORTED:
        if case is not None and case.configuration is not None:
            return case.configuration.get("keep_batchnorm_fp32")
        # A wrong opt_level is refused with its own sentence later.
        known = isinstance(opt_level, str) and opt_level in POLICIES
        return POLICIES[str(opt_level)].reported_keep if known else None
    if value is None or isinstance(value, bool):
        return value
    words = {"true": True, "false": False, "none": None}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise InputError(
        f"keep_batchnorm_fp32 is {value!r}; allowed are True, False, None and {AS_REPORTED!r}."
    )


def injected_names() -> list[str]:
    """Names that papermill set: read from the source of the cell it injects.

    Not from the notebook's variables: those hold In, Out, exit and many others besides. The
    latest such cell counts, for somebody who corrects it and runs it again.
    """
    for source in reversed(_cell_sources()):
        if source.startswith("# Parameters\n"):
            return _assigned(source)
    return []


def _cell_sources() -> list[str]:
    shell = _shell()
    return [] if shell is None else list(shell.history_manager.input_hist_raw)


def _shell() -> Any:
    """The running IPython; None outside one."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _assigned(source: str) -> list[str]:
    names = []
    for node in ast.parse(source).body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names
