"""The place of an error, on small functions whose every line is known.

A raw traceback names the first line of a statement; the place names the last one of the failing
instruction, which is the number that Python 3.6 and 3.7 report.
"""

import json
import sys
import textwrap
import traceback

import pytest
import torch

from syncbn_lab.trace.frames import current_line, end_line, failing_frame
from syncbn_lab.trace.place import place_in, statement_at


@pytest.fixture
def module(tmp_path):
    """Compiles a source of its own file and gives back its globals; line 1 is the first line."""

    def make(source, name="case.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(source).lstrip("\n"))
        found = {"__name__": name, "torch": torch}
        exec(compile(file.read_text(), str(file), "exec"), found)
        return found

    return make


def failure(function, *arguments):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which error it is does not matter here
        function(*arguments)
    return caught.value


def place_of(error, *arguments):
    """The place, by way of the plain values that a child sends."""
    frame = failing_frame(error, *arguments)
    return None if frame is None else place_in(json.loads(json.dumps(frame)))


def raw_line(error):
    """What this Python's own traceback says."""
    return traceback.extract_tb(error.__traceback__)[-1].lineno


A, B = torch.ones(2), torch.ones(3, dtype=torch.float64)  # shapes that do not add

BACKSLASH = r"""
def f(a, b):
    scale = 2
    total = a * scale + \
        (1 - scale) * b
    return total
"""
PARENTHESES = """
def f(a, b):
    return (
        a
        +
        b
    )
"""
CALL = """
def f(a, b):
    c = torch.add(
        a,
        b,
    )
    return c
"""


@pytest.mark.parametrize(
    ("source", "raw", "line", "lines"),
    [
        (BACKSLASH, 3, 4, (3, 4)),  # as lines 108 and 109 of the report
        (PARENTHESES, 3, 5, (2, 6)),  # the sum spans 3 to 5, the statement 2 to 6
        (CALL, 2, 5, (2, 5)),  # a call ends with its bracket
        ("def f(a, b):\n    return a + b\n", 2, 2, (2, 2)),  # one line: nothing to choose
    ],
)
def test_the_place_is_the_end_of_the_failing_span_and_not_the_raw_line(
    module, source, raw, line, lines
):
    error = failure(module(source)["f"], A, B)
    assert raw_line(error) == raw
    place = place_of(error)
    assert place.traceback_line == raw
    assert place.line == line
    assert place.statement_lines == lines
    assert place.function == "f"
    first, last = lines
    assert place.statement == "\n".join(source.strip("\n").splitlines()[first - 1 : last])
    assert place.operands == {
        "a": {"dtype": "float32", "device": "cpu", "shape": [2]},
        "b": {"dtype": "float64", "device": "cpu", "shape": [3]},
    }


def test_the_line_depends_on_which_operation_of_a_statement_fails(module):
    source = """
    def f(a, b, c):
        return (
            a * b
            + c
        )
    """
    f = module(source)["f"]
    ones = torch.ones(2)
    assert place_of(failure(f, A, B, ones)).line == 3  # the product
    assert place_of(failure(f, ones, ones, B)).line == 4  # the sum
    # Both raw tracebacks say the same.
    assert raw_line(failure(f, A, B, ones)) == raw_line(failure(f, ones, ones, B)) == 3


def test_where_the_span_is_not_known_there_is_no_end_line():
    def f():
        return 1

    assert end_line(f.__code__, -1) is None
    assert end_line(f.__code__, 10**6) is None


def test_without_positions_the_raw_line_counts(module):
    # As `python -X no_debug_ranges` compiles, and code made by hand.
    def f(a, b):
        return a + b

    code = f.__code__
    stripped = code.replace(co_linetable=_without_columns(code))
    f.__code__ = stripped
    error = failure(f, A, B)
    assert place_of(error).line == raw_line(error)


def _without_columns(code):
    """A line table whose entries have lines and no columns (kind 13 of Python's locations)."""
    table = bytearray()
    line = code.co_firstlineno
    for position in _runs(code):
        number, units = position
        delta = number - line
        line = number
        table += bytes([0x80 | (13 << 3) | (units - 1)])
        table += _signed(delta)
    return bytes(table)


def _runs(code):
    """(line, code units) of each stretch of at most 8 units, which is what an entry holds."""
    lines = [position[0] or code.co_firstlineno for position in code.co_positions()]
    runs = []
    for line in lines:
        if runs and runs[-1][0] == line and runs[-1][1] < 8:
            runs[-1][1] += 1
        else:
            runs.append([line, 1])
    return runs


def _signed(value):
    number = (-value << 1) | 1 if value < 0 else value << 1
    out = bytearray()
    while number >= 64:
        out.append(64 | (number & 63))
        number >>= 6
    out.append(number)
    return bytes(out)


# ---------------------------------------------------------------- which frame


def test_the_innermost_frame_of_a_target_counts(module):
    inner = module("def inner(a, b):\n    return a + b\n", "inner.py")
    middle = module("def middle(g, a, b):\n    return g(a, b)\n", "middle.py")
    outer = module("def outer(f, g, a, b):\n    return f(g, a, b)\n", "outer.py")
    error = failure(outer["outer"], middle["middle"], inner["inner"], A, B)
    files = {n: m[n].__code__.co_filename for n, m in (("inner", inner), ("middle", middle))}
    assert place_of(error).file == files["inner"]
    assert place_of(error, {files["middle"]}).function == "middle"
    assert place_of(error, {files["middle"], files["inner"]}).function == "inner"
    # A target that is not on the way changes nothing.
    assert place_of(error, {"elsewhere.py"}).function == "inner"
    # A skipped file is passed over, unless it is a target.
    assert place_of(error, (), (files["inner"],)).function == "middle"
    assert place_of(error, {files["inner"]}, (files["inner"],)).function == "inner"


def test_no_frame_outside_what_is_skipped(module):
    f = module("def f(a, b):\n    return a + b\n")["f"]
    error = failure(f, A, B)
    assert place_of(error, (), (f.__code__.co_filename, __file__)) is None


def test_an_error_that_was_never_raised_has_no_place():
    assert place_of(ValueError("x")) is None


def test_code_without_a_source_file_has_a_place_all_the_same():
    found = {}
    exec(compile("def f(a, b):\n    return a + b\n", "<no file>", "exec"), found)
    place = place_of(failure(found["f"], A, B))
    assert (place.file, place.line, place.statement) == ("<no file>", 2, "")
    assert place.operands == {}


def test_a_nested_function_is_named_and_reads_what_it_encloses(module):
    source = """
    def f(a, b):
        def inner():
            return a + b
        return inner()
    """
    place = place_of(failure(module(source)["f"], A, B))
    assert place.function == "f.<locals>.inner"
    assert (place.line, place.statement.strip()) == (3, "return a + b")
    assert list(place.operands) == ["a", "b"]


# ---------------------------------------------------------------- operands


LAYER = r"""
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.weight = torch.nn.Parameter(torch.ones(3).half())
        self.momentum = 0.1
        self.note = "text"

    def forward(self, mean):
        unused = self.weight
        self.running_mean = self.momentum * mean + \
            (1 - self.momentum) * self.running_mean
        return unused
"""


def test_operands_are_the_statements_tensors_by_the_names_it_uses(module):
    place = place_of(failure(module(LAYER)["Layer"]().forward, torch.ones(2).double()))
    assert place.line == 12
    assert place.traceback_line == 11
    # In order of appearance; not weight, which another statement uses.
    assert list(place.operands) == ["mean", "self.running_mean"]
    assert place.operands["mean"] == {"dtype": "float64", "device": "cpu", "shape": [2]}
    assert place.operands["self.running_mean"] == {
        "dtype": "float32",
        "device": "cpu",
        "shape": [3],
    }


def test_what_a_statement_assigns_is_no_operand(module):
    source = """
    def f(a, b):
        c = torch.zeros(7)
        c = a + b
    """
    assert list(place_of(failure(module(source)["f"], A, B)).operands) == ["a", "b"]


def test_what_an_augmented_assignment_changes_is_one(module):
    source = """
    def f(a, b):
        a += b
    """
    assert list(place_of(failure(module(source)["f"], A, B)).operands) == ["a", "b"]


def test_a_tensor_of_the_file_itself_is_an_operand(module):
    source = """
    B = torch.ones(3)
    def f(a):
        return a + B
    """
    assert list(place_of(failure(module(source)["f"], A)).operands) == ["a", "B"]


# ---------------------------------------------------------------- statements


SOURCE = """\
import os
x = [
    1,
    2,
]
with open(
    "a",
) as first, open(b) as second:  # opens two
    # a comment

    y = first.z + \\
        second
    if y: w = self.v
for i in range(
    n
):
    pass
def g(
    a=default,
):
    return (
        a
    )
try:
    t = 1
except make(kind):
    u = 2
else:
    o = 3
match subject:
    case {"k": value}:
        q = value
@decorated
class C(Base): pass
class D:
    @first
    def m(self): ...
"""


@pytest.mark.parametrize(
    ("line", "lines", "names"),
    [
        (1, (1, 1), []),
        (2, (2, 5), []),
        (4, (2, 5), []),  # the middle of a list
        # A block statement is its header alone, without comments and body.
        (6, (6, 8), ["open", "b"]),
        (7, (6, 8), ["open", "b"]),
        (11, (11, 12), ["first.z", "first", "second"]),
        (12, (11, 12), ["first.z", "first", "second"]),
        (13, (13, 13), ["self.v", "self"]),  # on one line with its if: the statement itself
        (14, (14, 16), ["range", "n"]),
        (17, (17, 17), []),
        (18, (18, 20), ["default"]),
        (22, (21, 23), ["a"]),
        # The line between two blocks is meant by itself.
        (26, (26, 26), ["make", "kind"]),
        (28, (28, 28), []),
        (30, (30, 30), ["subject"]),
        (32, (32, 32), ["value"]),
        (35, (35, 35), []),  # up to the decorator of what it holds
        (999, (999, 999), []),  # not in the file
    ],
)
def test_the_statement_at_a_line(line, lines, names):
    first, last, found = statement_at(SOURCE, line)
    assert (first, last) == lines
    assert found == names


def test_a_file_that_does_not_parse_has_lines_all_the_same():
    assert statement_at("def f(:\n  pass", 2) == (2, 2, [])
    assert statement_at("", 5) == (5, 5, [])


def test_the_header_of_a_with_block_that_fails(module):
    source = """
    def f(a, b):
        with torch.autograd.profiler.record_function(
            a + b,
        ):
            c = torch.zeros(1)
            return c * a
    """
    place = place_of(failure(module(source)["f"], A, B))
    assert place.line == 3
    assert place.statement_lines == (2, 4)
    assert place.statement.strip().endswith("):")
    assert list(place.operands) == ["a", "b"]


def test_the_current_line_of_a_frame_counts_by_statement_too(module):
    source = """
    def f(note):
        return (
            1 +
            note()
        )
    """
    lines = []

    def note():
        frame = sys._getframe(1)
        lines.append((frame.f_lineno, current_line(frame)))
        return 1

    module(source)["f"](note)
    assert lines == [(4, 4)]  # the call stands on one line

    source = source.replace("note()", "note(\n            )")
    lines.clear()
    module(source)["f"](note)
    assert lines == [(4, 5)]
