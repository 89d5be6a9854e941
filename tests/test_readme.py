"""The README says what the kit does: its table, its commands and its paths are checked."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from papermill.inspection import inspect_notebook

from syncbn_lab.__main__ import _parser
from syncbn_lab.cases import cases, markdown_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
FENCES = re.findall(r"^```\w*\n(.*?)^```", README, re.S | re.M)
BLOCKS = [line for block in FENCES for line in block.split("\n")]
QUOTED = re.findall(r"`((?:python -m syncbn_lab|papermill|make) [^`]*)`", README)
COMMANDS = sorted(
    {
        " ".join(text.partition("#")[0].split())
        for text in [*BLOCKS, *QUOTED]
        if text.startswith(("python -m syncbn_lab", "papermill", "make "))
    }
)


def test_the_first_screen_is_the_table_of_cases() -> None:
    assert markdown_table() in README
    head = README[: README.index(markdown_table())]
    # Nothing but the title and one paragraph stands before it.
    assert len(head.splitlines()) < 12


@pytest.mark.parametrize(
    "seen",
    [
        # What the table has to answer, word for word.
        "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0",
        "expected device cuda:0 and dtype Float but got device cuda:0 and dtype Half",
        "cannot import name 'amp' from 'apex'",
        "No module named 'apex.parallel'",
        "Expected counts to have type Half",
        "running_var NaN, no error",
    ],
)
def test_every_promised_symptom_has_a_row(seen: str) -> None:
    assert any(seen in case.seen for case in cases())


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_with_its_options(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.M))
        assert words[1] in targets
        assert all(word.startswith("OPT_LEVEL=") for word in words[2:])
    elif words[0] == "papermill":
        given = [words[i + 1] for i, word in enumerate(words) if word == "-p"]
        (notebook,) = (ROOT / word for word in words if word.startswith("notebooks/"))
        assert set(given) <= set(inspect_notebook(str(notebook)))
    else:
        # argparse exits with code 2 on anything that it does not know.
        assert callable(_parser().parse_args(words[3:]).run)


def test_every_path_in_the_layout_exists() -> None:
    layout = README[README.index("## Layout") :]
    block = re.findall(r"^```\n(.*?)^```", layout, re.S | re.M)[0]
    package = ROOT / "syncbn_lab"
    for line in block.splitlines():
        if line.startswith(" "):
            for name in re.split(r"  +", line.strip())[0].split(", "):
                name = name.strip().rstrip("/")
                assert (package / name).is_dir() or (package / f"{name}.py").is_file(), name
        else:
            assert (ROOT / line.split()[0]).is_dir(), line
    for path in re.findall(r"`((?:syncbn_lab|data|notebooks|tests)/[\w./-]+)`", README):
        assert (ROOT / path).exists() or path.startswith("data/runs"), path
