"""The words of the rules: what was violated, where, and how torch 1.2 would have said it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..messages import SCALAR_TYPES
from .record import Evidence

_TORCH_FOLDER = str(Path(torch.__file__).parent) + "/"
_RULES_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class Violation:
    """One place where torch 1.2 would have refused what today's torch does."""

    rule: str
    """Short stable identifier of the rule: the ``rule`` column of ``describe_rules()``."""
    operation: str
    """The operation, or the autograd node: ``add``, ``mul_``, ``SyncBatchnormFunctionBackward``."""
    message: str
    """torch 1.2's words."""
    operands: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(dtype, device, shape) of every tensor operand, in argument order."""
    result_dtype: str | None
    """What today's torch gives instead; None if unknown."""
    phase: str
    """``forward`` or ``backward``."""
    file: str | None
    """Innermost Python frame outside torch and outside these rules; None on a worker thread."""
    line: int | None
    """That frame's line, counted by statement (``trace/frames.py``): the last line of the
    expression, as Python 3.6 and 3.7 report it."""
    gradient_index: int | None
    """Which gradient of a node, counted over its tensor inputs."""
    expected: str | None
    """The dtype that torch 1.2 would have wanted, where one can be named."""
    got: str | None
    """The dtype that it would have found."""
    numel: int
    """Elements of the tensor that is silently cast (a gradient) or produced (a result)."""


class Torch12RuleError(RuntimeError):
    """What torch 1.2 would have raised; its text is exactly torch 1.2's message.

    ``violation`` holds the facts, ``recorded`` the row of the record that they rest on; a note
    says that the error is ours.
    """

    def __init__(self, violation: Violation, basis: str, recorded: Evidence | None = None) -> None:
        super().__init__(violation.message)
        self.violation = violation
        self.basis = basis
        self.recorded = recorded
        said = f"; {recorded.sentence()}" if recorded else ""
        self.add_note(
            f"raised by syncbn_lab's torch 1.2 rules on torch {torch.__version__}; "
            f"rule: {violation.rule}; basis: {basis}{said}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what made it, so that it comes out of a worker process whole."""
        return type(self), (self.violation, self.basis, self.recorded)


@dataclass(frozen=True)
class Finding:
    """A check's verdict: torch 1.2's message and the two dtypes that it is about."""

    message: str
    expected: torch.dtype | None = None
    got: torch.dtype | None = None


def short_name(dtype: torch.dtype | None) -> str | None:
    """``float16`` for torch.float16."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def scalar_name(dtype: torch.dtype) -> str:
    """``Half`` for torch.float16."""
    name = short_name(dtype) or ""
    return SCALAR_TYPES.get(name, name)


def type_name(dtype: torch.dtype, device: torch.device | str) -> str:
    """``torch.cuda.HalfTensor`` or ``torch.HalfTensor``, from where a tensor really is.

    ``Tensor.type()`` is not asked: a stand-in for a GPU may have changed its answer.
    """
    kind = torch.device(device).type
    return f"torch.{'' if kind == 'cpu' else kind + '.'}{scalar_name(dtype)}Tensor"


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor of a call's arguments in order, lists opened one level deep."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def describe_operands(
    tensors: Iterable[torch.Tensor],
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(dtype, device, shape) of each."""
    return tuple((str(short_name(t.dtype)), str(t.device), tuple(t.shape)) for t in tensors)


def innermost_frame(start: FrameType | None = None) -> FrameType | None:
    """Innermost Python frame that is not these rules' own nor torch's way into them."""
    frame = start or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _own(name) and not name.endswith(
            ("torch/utils/_python_dispatch.py", "torch/_ops.py", "torch/overrides.py")
        ):
            return frame
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_frame() -> FrameType | None:
    """Innermost Python frame outside torch and outside these rules."""
    frame = innermost_frame(sys._getframe(1))
    while frame is not None and (
        _own(name := frame.f_code.co_filename) or name.startswith((_TORCH_FOLDER, "<frozen"))
    ):
        frame = frame.f_back
    return frame


def _own(file: str) -> bool:
    """Whether a file is one of these rules' own; the recorder's rows are user code to them."""
    return file.rpartition("/")[0] == _RULES_FOLDER
