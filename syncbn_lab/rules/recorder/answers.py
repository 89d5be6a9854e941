"""What a torch answers to the rows, and the file that keeps it."""

import csv
import datetime
import hashlib
import os
import platform
import re
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, TextIO

import torch

from syncbn_lab.rules.recorder import autograd, elementwise, network
from syncbn_lab.rules.recorder.operands import NotMadeError, Row, numbered

RESULT, ERROR, NO_KERNEL, NOT_MADE = "result", "error", "no kernel", "operand can't be made"
COLUMNS = ("row", "rule", "form", "outcome", "result_dtype", "error_type", "message")

# How torch 1.2 says that a CPU kernel is missing for a dtype, whatever the dtypes' rules are.
_MISSING = re.compile(r"not implemented for '|not supported on \w+Type for ")
# Behind the first line, or in brackets, an error's text names places in torch's C++ sources.
_CPP_PLACE = re.compile(r"\s*(?:\([^()]* at /\S+:\d+\)|at /\S+:\d+)\s*$")


class Answer(NamedTuple):
    """What a torch said to one row."""

    row: str
    rule: str
    form: str
    outcome: str
    result_dtype: str = ""
    error_type: str = ""
    message: str = ""


def rows() -> List[Row]:
    """Every row, in the order of the record."""

    def each() -> Any:
        for room in (
            elementwise.pairs,
            elementwise.triples,
            elementwise.numbers,
            elementwise.fills,
            elementwise.conversions,
            elementwise.singles,
            network.products,
            network.losses,
            network.indexing,
            autograd.functions,
            autograd.engine,
            autograd.nodes,
        ):
            yield from room()

    return numbered(each())


def ask(row: Row) -> Answer:
    """Ask this process's torch one row."""
    known = str(row), row.rule, row.form
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = row.ask()
    except NotMadeError as error:
        return Answer(*known, outcome=NOT_MADE, message=_first_line(error))
    except Exception as error:
        text = _first_line(error)
        outcome = NO_KERNEL if _MISSING.search(text) else ERROR
        kind = "RuntimeError" if isinstance(error, RuntimeError) else type(error).__name__
        return Answer(*known, outcome=outcome, error_type=kind, message=text)
    return Answer(*known, outcome=RESULT, result_dtype=_dtype(given))


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return _CPP_PLACE.sub("", text)


def _dtype(given: Any) -> str:
    if isinstance(given, (tuple, list)) and given:
        given = given[0]
    return str(given.dtype)[6:] if isinstance(given, torch.Tensor) else type(given).__name__


def recorder_hash() -> str:
    """sha256 over the files of this package: what was asked, and how it was written down."""
    folder = os.path.dirname(os.path.abspath(__file__))
    total = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                total.update(name.encode() + b"\0" + file.read() + b"\0")
    return total.hexdigest()


def provenance() -> Dict[str, str]:
    """Which torch answered, where, when, and which questions it was asked."""
    return {
        "torch": torch.__version__,
        "torch_git_version": torch.version.git_version,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": f"{platform.system()} {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "recorder_sha256": recorder_hash(),
    }


def write(file: TextIO, said: Callable[[str], None] = lambda text: None) -> None:
    """Ask every row and write the record: provenance in lines that start with #, then CSV."""
    for name, value in provenance().items():
        file.write(f"# {name}: {value}\n")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    asked = rows()
    for number, row in enumerate(asked):
        if number % 1000 == 0:
            said(f"{number} of {len(asked)} rows")
        writer.writerow(ask(row))
