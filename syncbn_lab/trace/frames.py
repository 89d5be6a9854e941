"""Which tensors the functions of a file were given, and which they held when they ended.

A profile function sees every call and return, backward included, as long as backward runs on
the calling thread (on a GPU: ``torch.autograd.set_multithreading_enabled(False)``). A function
that raises is seen too, with what it held at that moment.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any

import torch

from syncbn_lab.trace.place import describe_tensor


@dataclasses.dataclass
class FrameRecord:
    """One call of one watched function."""

    file: str
    function: str
    """Qualified name, such as "SyncBatchnormFunction.backward"."""
    line: int
    """The line it returned from, or was executing when it raised."""
    arguments: dict[str, dict[str, Any]]
    """Its tensor arguments when it was called."""
    tensors: dict[str, dict[str, Any]]
    """Its tensor variables when it ended; a module's parameters and buffers as "self.…"."""


class FrameRecorder:
    """Context manager: a ``FrameRecord`` for every call of a function in the watched files.

    ``on_return`` is called with the frame of each, for a caller that wants values.
    """

    def __init__(
        self, files: Collection[str], on_return: Callable[[FrameType], None] | None = None
    ) -> None:
        self.records: list[FrameRecord] = []
        self._files = frozenset(files)
        self._on_return = on_return
        self._arguments: dict[int, dict[str, dict[str, Any]]] = {}
        self._previous: Any = None

    def __enter__(self) -> FrameRecorder:
        self._previous = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.setprofile(self._previous)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name.startswith("<"):
            return
        if event == "call":
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._arguments[id(frame)] = _tensors({n: frame.f_locals.get(n) for n in names})
        elif event == "return":
            self.records.append(
                FrameRecord(
                    file=code.co_filename,
                    function=code.co_qualname,
                    line=frame.f_lineno,
                    arguments=self._arguments.pop(id(frame), {}),
                    tensors=_tensors(frame.f_locals),
                )
            )
            if self._on_return is not None:
                self._on_return(frame)


def _tensors(variables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name, value in variables.items():
        if isinstance(value, torch.Tensor):
            found[name] = describe_tensor(value)
        elif isinstance(value, torch.nn.Module) and name == "self":
            owned = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
            for attribute, tensor in owned:
                found[f"self.{attribute}"] = describe_tensor(tensor)
    return found
