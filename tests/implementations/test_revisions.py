"""Revisions of apex's file: identified by hash, rebuilt bit for bit, refused when unknown."""

import ast
import dataclasses
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import syncbn_lab
from syncbn_lab.errors import InputError
from syncbn_lab.implementations import revisions
from syncbn_lab.implementations.revisions import KNOWN, Edit, apply_edits, identify, rebuild

BY_NAME = {revision.name: revision for revision in KNOWN}


@pytest.fixture(scope="module")
def installed():
    spec = importlib.util.find_spec("apex")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no apex is installed")
    file = Path(spec.submodule_search_locations[0], "parallel", "sync_batchnorm.py")
    if not file.is_file() or identify(file.read_bytes()) is None:
        pytest.skip("the installed apex has no sync_batchnorm.py of a known revision")
    return file.read_bytes()


@pytest.mark.parametrize("name", ["reported", "cast-added", "return-fixed"])
def test_an_installed_file_becomes_any_earlier_revision_bit_for_bit(installed, name):
    rebuilt = rebuild(installed, name)
    assert hashlib.sha256(rebuilt).hexdigest() == BY_NAME[name].sha256
    assert identify(rebuilt) == BY_NAME[name]
    assert rebuild(rebuilt, name) == rebuilt  # from itself: nothing to do


def test_a_rebuilt_revision_can_be_rebuilt_from(installed):
    assert rebuild(rebuild(installed, "cast-added"), "reported") == rebuild(installed, "reported")


def test_installed_means_as_it_is():
    assert rebuild(b"anything at all\n", "installed") == b"anything at all\n"


@pytest.mark.parametrize("name", ["reported", "cast-added", "return-fixed"])
def test_the_target_lines_hold_the_update_of_running_mean(installed, name):
    statements = [
        node
        for node in ast.walk(ast.parse(rebuild(installed, name)))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.running_mean"
    ]
    assert [(s.lineno, s.end_lineno) for s in statements] == [BY_NAME[name].target_lines]


def test_the_reported_line_is_109():
    assert BY_NAME["reported"].target_lines[1] == 109


def test_an_unknown_file_is_refused_with_its_hash_and_a_way_on(installed):
    # Two neutral lines where the deprecation text stands: not that file, so no guessing.
    lines = installed.splitlines(keepends=True)
    unknown = b"".join([*lines[:51], b"        pass\n", b"        pass\n", *lines[51:]])
    assert identify(unknown) is None
    with pytest.raises(InputError) as caught:
        rebuild(unknown, "reported")
    message = str(caught.value)
    assert hashlib.sha256(unknown).hexdigest() in message
    assert all(revision.name in message for revision in KNOWN)
    assert "revision='installed' still runs" in message


def test_a_later_revision_cannot_be_rebuilt(installed):
    with pytest.raises(InputError, match="can't be rebuilt from an earlier file"):
        rebuild(rebuild(installed, "reported"), "return-fixed")


@pytest.mark.parametrize("name", ["", "Reported", "deprecation-text", "574fe244"])
def test_an_unknown_name_lists_what_is_allowed(name):
    with pytest.raises(InputError, match="reported, cast-added, return-fixed, installed"):
        rebuild(b"", name)


def test_a_wrong_instruction_never_hands_out_a_file(installed, monkeypatch):
    monkeypatch.setitem(revisions._EDITS, "cast-added", (Edit("delete", 1),))
    with pytest.raises(RuntimeError, match="rebuilding 'reported' gave sha256"):
        rebuild(installed, "reported")


def test_all_four_revisions_chain_from_the_deprecation_text(monkeypatch):
    # A made-up file of 136 lines in place of the one that is not installed here: every set of
    # instructions in turn, with the hashes of what each has to give.
    text = [b"line %d\n" % n for n in range(1, 137)]
    text[59 - 1] = b"    line 59\n"  # 57 once lines 52-53 are gone: the one to dedent
    text[136 - 1] = b"  return 136\n"  # 134 then: the one that becomes an assignment
    text[90 - 1] = b" out = 90\n"  # 85 in cast-added
    text[135 - 1] = b" out = 135\n"  # 130 in cast-added
    # return-fixed, cast-added and reported, cut by hand as the module's table says.
    two = text[:51] + text[53:]
    three = [*two[:55], two[56][4:], *two[59:133], b"  out = 136\n"]
    one = [*three[:68], *three[81:84], b" return 90\n", *three[85:129], b" return 135\n"]
    wanted = {"deprecation-text": text, "return-fixed": two, "cast-added": three, "reported": one}
    made_up = tuple(
        dataclasses.replace(
            revision, sha256=hashlib.sha256(b"".join(wanted[revision.name])).hexdigest()
        )
        for revision in KNOWN
    )
    monkeypatch.setattr(revisions, "KNOWN", made_up)
    for name in ("return-fixed", "cast-added", "reported"):
        assert rebuild(b"".join(text), name) == b"".join(wanted[name])


TEXT = b"one\n    two\nreturn three\n  out = four\r\n  return five"


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ((), TEXT),
        ((Edit("delete", 1),), TEXT[4:]),
        ((Edit("delete", 2, 3), Edit("delete", 1)), b"  out = four\r\n  return five"),
        ((Edit("dedent", 2),), TEXT.replace(b"    two", b"two")),
        ((Edit("return to assignment", 3),), TEXT.replace(b"return three", b"out = three")),
        # Windows line ends and a last line without one stay as they are.
        ((Edit("assignment to return", 4),), TEXT.replace(b"out = four", b"return four")),
        ((Edit("return to assignment", 5),), TEXT.replace(b"return five", b"out = five")),
    ],
)
def test_edits(edits, expected):
    assert apply_edits(TEXT, edits) == expected
    assert apply_edits(TEXT, edits[::-1]) == expected  # lines count in the file as it was


@pytest.mark.parametrize(
    "edit",
    [
        Edit("dedent", 1),
        Edit("return to assignment", 4),
        Edit("assignment to return", 3),
        Edit("delete", 6),
        Edit("delete", 0),
        Edit("delete", 3, 2),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(edit):
    with pytest.raises(ValueError, match=r"outside a file|does not fit"):
        apply_edits(TEXT, (edit,))


def test_the_module_imports_neither_torch_nor_apex():
    code = (
        "import sys, syncbn_lab.implementations.revisions;"
        "print([name for name in ('torch', 'apex') if name in sys.modules])"
    )
    root = Path(syncbn_lab.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
