"""torch 1.2's contract for gradients: the dtype of what they belong to, nothing else.

Today's engine casts a gradient of the wrong dtype; torch 1.2 raised. Three places are watched:

- a custom Function: ``BackwardCFunction.apply`` is what the engine calls on every thread; what
  it returns is compared with what the node's inputs were, shape before dtype;
- a built-in node: the engine's cast reaches the dispatch mode as ``_to_copy`` with a dtype and
  nothing else, while the node is the current one. A cast that the node's own formula makes
  names layout and device too, or belongs to a node whose operation took a ``dtype=`` argument;
- the root: the same cast, with the gradient among those that backward was called with.

A tensor hook that changes the dtype is refused by today's torch in torch 1.2's own words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from .violations import Finding, innermost_frame, type_name

# Nodes of operations with a dtype= argument: torch 1.2's formulas cast back, today's leave
# that to the engine (seen: sum, mean, prod, cumsum, norm with dtype= pass on torch 1.2.0).
_OWN_CASTS = (
    "Sum",
    "Mean",
    "Prod",
    "Cumsum",
    "Cumprod",
    "Nansum",
    "LinalgVectorNorm",
    "Norm",
    "Softmax",
    "LogSoftmax",
    "ToCopy",
    "Copy",
)


def gradient_finding(
    owner: str | None, index: int, expected: torch.dtype, got: torch.dtype, device: Any
) -> Finding:
    """The message for gradient ``index`` of a node; a root has no owner."""
    text = (
        f"invalid gradient at index {index} - expected type {type_name(expected, device)} "
        f"but got {type_name(got, device)}"
    )
    return Finding(f"Function {owner} returned an {text}" if owner else text, expected, got)


def engine_frame() -> tuple[bool, FrameType | None]:
    """Whether the autograd engine itself is the caller, and its frame if this thread has one.

    True when nothing of Python stands between the engine and the operation: no frame at all on
    a worker thread, torch's own call of the engine on the calling thread.
    """
    frame = innermost_frame()
    if frame is None:
        return True, None
    code = frame.f_code
    engine = code.co_name == "_engine_run_backward" and code.co_filename.endswith("graph.py")
    return engine, frame if engine else None


# torch's own Python code that mixes dtypes where torch 1.2's did not: gradient clipping
# (its norms were Python numbers) and the gradient scaler, which torch 1.2 did not have.
_TODAYS_OWN_CODE = ("torch/nn/utils/clip_grad.py", "torch/amp/grad_scaler.py")


def in_todays_own_formula() -> bool:
    """Whether the operation belongs to a formula of today's torch that torch 1.2 had otherwise.

    A built-in node's formula is today's derivative, not torch 1.2's: only what it returns is
    judged.
    """
    frame = innermost_frame()
    if frame is not None and frame.f_code.co_filename.endswith(_TODAYS_OWN_CODE):
        return True
    return torch._C._current_autograd_node() is not None and engine_frame()[0]


def engine_cast(
    tensor: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[Finding, str, int | None] | None:
    """The violation behind a ``_to_copy``, as (finding, operation, index), if it is one."""
    dtype = kwargs.get("dtype")
    if len(kwargs) != 1 or dtype is None or dtype == tensor.dtype:
        return None
    from_engine, frame = engine_frame()
    if not from_engine:
        return None
    if frame is not None:
        roots = frame.f_locals.get("t_outputs", ())
        gradients = (frame.f_locals.get("args") or ((),))[0]
        for index, (root, gradient) in enumerate(zip(roots, gradients, strict=False)):
            if gradient is tensor and root.dtype == dtype:
                finding = gradient_finding(None, index, dtype, tensor.dtype, tensor.device)
                return finding, "backward", index
    node: Any = torch._C._current_autograd_node()
    if node is None or isinstance(node, BackwardCFunction):
        return None
    name = node.name()
    if name.removesuffix("s").rstrip("0123456789").removesuffix("Backward") in _OWN_CASTS:
        return None
    for index, metadata in enumerate(_input_metadata(node)):
        if metadata is None or metadata.dtype != dtype:
            continue
        if tuple(metadata.shape) == tuple(tensor.shape):
            finding = gradient_finding(name, index, dtype, tensor.dtype, metadata.device)
            return finding, name, index
    return None


def _input_metadata(node: Any) -> list[Any]:
    """What the engine knows of each tensor input of a node: shape, dtype, device; else None."""
    known: list[Any] = []
    for following, number in node.next_functions:
        metadata = getattr(following, "_input_metadata", None)
        known.append(metadata[number] if metadata else None)
    return known


def _expandable(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a gradient of shape ``to`` may be summed down to ``shape``."""
    if len(shape) > len(to):
        return False
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return all(a in (1, b) for a, b in pairs)


def function_findings(node: Any, returned: Any) -> list[tuple[Finding, torch.Tensor, int]]:
    """What is wrong with the gradients that a custom Function returned, in the engine's order.

    A wrong shape ends the search: the engine raises there, in words that have not changed.
    """
    gradients = returned if isinstance(returned, (tuple, list)) else (returned,)
    # next_functions counts tensor inputs, gradients count every input of forward; the inputs
    # that require a gradient are the same ones in the same order in both.
    wanted = [g for g, needed in zip(gradients, node.needs_input_grad, strict=False) if needed]
    metadata = _input_metadata(node)
    numbers = [i for i, (following, _) in enumerate(node.next_functions) if following is not None]
    findings = []
    for number, gradient in zip(numbers, wanted, strict=False):
        known = metadata[number]
        if not isinstance(gradient, torch.Tensor) or known is None:
            continue
        if not _expandable(tuple(known.shape), tuple(gradient.shape)):
            break
        if gradient.dtype != known.dtype:
            finding = gradient_finding(
                node.name(), number, known.dtype, gradient.dtype, known.device
            )
            findings.append((finding, gradient, number))
    return findings


def assigned_gradient(tensor: torch.Tensor, gradient: Any) -> Finding | None:
    """``tensor.grad = gradient`` of another dtype."""
    if not isinstance(gradient, torch.Tensor) or gradient.dtype == tensor.dtype:
        return None
    return Finding("assigned grad has data of a different type", tensor.dtype, gradient.dtype)


class ApplyWatch:
    """Counts the contexts that need ``BackwardCFunction.apply`` watched; the last one restores.

    The engine looks ``apply`` up on every call, also on worker threads; who is told is decided
    by the rules that are in force on that thread, so other threads see no difference.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._original: Callable[..., Any] | None = None

    def start(self, around: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any]) -> None:
        """Begin to call ``around(original apply, node, gradients)`` in place of ``apply``."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            original = BackwardCFunction.apply
            self._original = original

            def apply(node: Any, *gradients: Any) -> Any:
                return around(original, node, gradients)

            BackwardCFunction.apply = apply  # type: ignore[method-assign]

    def stop(self) -> None:
        """End it for one user."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                BackwardCFunction.apply = self._original  # type: ignore[method-assign,assignment]
                self._original = None
