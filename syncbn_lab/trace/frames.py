"""Which tensors the functions of a file were given, and which they held when they ended.

A profile function sees every call and return, backward included, as long as backward runs on
the calling thread (on a GPU: ``torch.autograd.set_multithreading_enabled(False)``; torch before
1.6 has it on a thread of its own everywhere, so there the function itself has to be wrapped,
``on_any_thread``). A function that raises is seen too, with what it held at that moment.
"""

import functools
import linecache
import sys
from types import CodeType, FrameType
from typing import Any, Callable, Collection, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

Variables = Dict[str, Dict[str, Any]]
"""Dtype, device and shape of tensors by name."""


class FrameRecord(NamedTuple):
    """One call of one watched function."""

    file: str
    function: str
    """Qualified name, such as "SyncBatchnormFunction.backward"."""
    line: int
    """The line it returned from, or was executing when it raised."""
    arguments: Variables
    """Its tensor arguments when it was called."""
    tensors: Variables
    """Its tensor variables when it ended; a module's parameters and buffers as "self.…"."""


class FrameRecorder:
    """Context manager: a ``FrameRecord`` for every call of a function in the watched files.

    ``on_return`` is called with the frame of each, for a caller that wants values.
    """

    def __init__(
        self, files: Collection[str], on_return: Optional[Callable[[FrameType], None]] = None
    ) -> None:
        self.records: List[FrameRecord] = []
        self._files = frozenset(files)
        self._on_return = on_return
        self._arguments: Dict[int, Variables] = {}
        self._previous: Any = None

    def __enter__(self) -> "FrameRecorder":
        self._previous = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._previous)

    def on_any_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, recorded too where a thread that Python did not start calls it."""

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            previous = sys.getprofile()
            sys.setprofile(self._profile)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(previous)

        return recorded

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name.startswith("<"):
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._arguments[id(frame)] = variables({n: frame.f_locals.get(n) for n in names})
        elif event == "return":
            self.records.append(
                FrameRecord(
                    file=code.co_filename,
                    function=function_name(frame),
                    line=frame.f_lineno,
                    arguments=self._arguments.pop(id(frame), {}),
                    tensors=variables(frame.f_locals),
                )
            )
            if self._on_return is not None:
                self._on_return(frame)


def describe_tensor(value: torch.Tensor) -> Dict[str, Any]:
    """Dtype, device and shape of a tensor as plain values."""
    return {
        "dtype": str(value.dtype)[len("torch.") :],
        "device": str(value.device),
        "shape": list(value.shape),
    }


def variables(held: Dict[str, Any]) -> Variables:
    """The tensors among variables, and those that a module among them owns, as "module.name"."""
    found: Variables = {}
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            found[name] = describe_tensor(value)
        elif isinstance(value, torch.nn.Module):
            owned = dict(vars(value))
            owned.update(value.named_parameters(recurse=False))
            owned.update(value.named_buffers(recurse=False))
            for attribute, tensor in owned.items():
                if isinstance(tensor, torch.Tensor):
                    found[f"{name}.{attribute}"] = describe_tensor(tensor)
    return found


def function_name(frame: FrameType) -> str:
    """Qualified name of a frame's function; before Python 3.11 as far as the module shows it."""
    code = frame.f_code
    if hasattr(code, "co_qualname"):
        return str(code.co_qualname)
    for value in list(frame.f_globals.values()):
        member = vars(value).get(code.co_name) if isinstance(value, type) else None
        member = getattr(member, "__func__", member)  # of a static or class method
        member = getattr(member, "__wrapped__", member)
        if getattr(member, "__code__", None) is code:
            return f"{value.__qualname__}.{code.co_name}"
    return code.co_name


def end_line(code: CodeType, lasti: int) -> Optional[int]:
    """Last source line of the instruction at byte offset ``lasti``; None where unknown."""
    if not hasattr(code, "co_positions"):
        return None
    positions = list(code.co_positions())
    index = lasti // 2
    if not 0 <= index < len(positions):
        return None
    return positions[index][1]


def current_line(frame: FrameType) -> int:
    """The line that a frame is at, counted by statement."""
    return end_line(frame.f_code, frame.f_lasti) or frame.f_lineno


def failing_frame(
    error: BaseException, targets: Collection[str] = (), skipped: Tuple[str, ...] = ()
) -> Optional[Dict[str, Any]]:
    """Where ``error`` was raised, as plain values for ``place.place_in``.

    The innermost frame in one of the ``targets`` counts; without one, the innermost frame of a
    file whose path does not start with one of ``skipped``. None when there is no such frame.
    """
    frames = list(_frames(error))
    chosen = [entry for entry in frames if entry[0].f_code.co_filename in targets]
    if not chosen:
        chosen = [e for e in frames if not e[0].f_code.co_filename.startswith(skipped)]
    if not chosen:
        return None
    frame, lasti, raw = chosen[-1]
    code = frame.f_code
    line = end_line(code, lasti)
    if line is None and sys.version_info < (3, 8):
        line = raw  # these Pythons name the last line of the failing expression themselves
    held = dict(frame.f_globals)
    held.update(frame.f_locals)
    return {
        "file": code.co_filename,
        "function": function_name(frame),
        "line": line,
        "traceback_line": raw,
        "source": "".join(linecache.getlines(code.co_filename, frame.f_globals)),
        "tensors": variables(held),
    }


def _frames(error: BaseException) -> Iterator[Tuple[FrameType, int, int]]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next
