"""Which tensors a function was given and which it held, forward and backward."""

import sys
import textwrap

import pytest
import torch

from syncbn_lab.trace.frames import FrameRecorder

SOURCE = """
import torch

def double(x, *, shift=None):
    y = x.half()
    x = y * 2
    return x

def fails(x):
    y = x.half()
    raise ValueError("no")

def outer(x):
    return double(double(x), shift=x.double())

def encloses(x):
    def inner():
        return x
    return inner()

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("running_mean", torch.zeros(2).double())
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return Square.apply(x) * self.weight

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad_input = 2.0 * x.double() * grad_output
        return grad_input
"""


@pytest.fixture
def watched(tmp_path):
    """A module with a file of its own."""
    file = tmp_path / "watched.py"
    file.write_text(textwrap.dedent(SOURCE))
    found = {"__name__": "watched"}
    exec(compile(file.read_text(), str(file), "exec"), found)
    found["file"] = str(file)
    return found


def line_of(text):
    return textwrap.dedent(SOURCE).splitlines().index(text) + 1


def dtypes(tensors):
    return {name: tensor["dtype"] for name, tensor in tensors.items()}


def test_arguments_at_the_call_and_tensors_at_the_end(watched):
    with FrameRecorder({watched["file"]}) as frames:
        watched["double"](torch.ones(3))
    (record,) = frames.records
    assert record.function == "double"
    assert record.file == watched["file"]
    assert record.line == line_of("    return x")
    # x was float32 when it came, and was another tensor when the function ended.
    assert record.arguments == {"x": {"dtype": "float32", "device": "cpu", "shape": [3]}}
    assert dtypes(record.tensors) == {"x": "float16", "y": "float16"}


def test_an_argument_by_name_is_an_argument_too(watched):
    with FrameRecorder({watched["file"]}) as frames:
        watched["double"](torch.ones(3), shift=torch.ones(1).double())
    assert dtypes(frames.records[0].arguments) == {"x": "float32", "shift": "float64"}


def test_an_argument_that_an_inner_function_uses_is_seen(watched):
    with FrameRecorder({watched["file"]}) as frames:
        watched["encloses"](torch.ones(3))
    inner, outer = frames.records
    assert inner.function == "encloses.<locals>.inner"
    assert inner.arguments == {}
    assert dtypes(outer.arguments) == {"x": "float32"}


def test_records_stand_in_the_order_in_which_functions_ended(watched):
    with FrameRecorder({watched["file"]}) as frames:
        watched["outer"](torch.ones(3))
    assert [record.function for record in frames.records] == ["double", "double", "outer"]
    # Each call keeps its own arguments.
    assert [dtypes(record.arguments)["x"] for record in frames.records] == [
        "float32",
        "float16",
        "float32",
    ]


def test_a_function_that_raises_is_seen_with_what_it_held(watched):
    with FrameRecorder({watched["file"]}) as frames, pytest.raises(ValueError, match="no"):
        watched["fails"](torch.ones(3))
    (record,) = frames.records
    assert record.function == "fails"
    assert record.line == line_of('    raise ValueError("no")')
    assert dtypes(record.tensors) == {"x": "float32", "y": "float16"}


def test_a_modules_own_tensors_and_the_backward_of_a_function(watched):
    layer = watched["Layer"]()
    x = torch.ones(2, requires_grad=True)
    with FrameRecorder({watched["file"]}) as frames:
        layer(x).sum().backward()
    assert [record.function for record in frames.records] == [
        "Square.forward",
        "Layer.forward",
        "Square.backward",
    ]
    _, forward, backward = frames.records
    # Parameters and buffers of the module itself, not of the modules in it.
    assert dtypes(forward.tensors) == {
        "self.weight": "float32",
        "self.running_mean": "float64",
        "x": "float32",
    }
    assert dtypes(backward.arguments) == {"grad_output": "float32"}
    assert dtypes(backward.tensors) == {
        "x": "float32",
        "grad_output": "float32",
        "grad_input": "float64",
    }
    assert backward.line == line_of("        return grad_input")


def test_files_that_are_not_watched_leave_no_record(watched):
    with FrameRecorder({"other.py"}) as frames:
        watched["double"](torch.ones(3))
    assert frames.records == []


def test_on_return_is_called_with_each_frame(watched):
    seen = []

    def note(frame):
        seen.append((frame.f_code.co_name, frame.f_locals["y"].tolist()))

    with FrameRecorder({watched["file"]}, on_return=note):
        watched["double"](torch.ones(1))
        with pytest.raises(ValueError, match="no"):
            watched["fails"](torch.ones(1))
    assert seen == [("double", [1.0]), ("fails", [1.0])]


def test_the_previous_profile_function_is_restored(watched):
    def other(frame, event, argument):
        pass

    before = sys.getprofile()
    sys.setprofile(other)
    try:
        with FrameRecorder({watched["file"]}):
            assert sys.getprofile() is not other
        assert sys.getprofile() is other
        with pytest.raises(ValueError, match="no"), FrameRecorder({watched["file"]}):
            watched["fails"](torch.ones(1))
        assert sys.getprofile() is other
    finally:
        sys.setprofile(before)


def test_after_the_block_nothing_more_is_recorded(watched):
    with FrameRecorder({watched["file"]}) as frames:
        watched["double"](torch.ones(1))
    watched["double"](torch.ones(1))
    assert len(frames.records) == 1
