"""What torch 1.2 allowed and today's torch refuses or promotes, done torch 1.2's way.

Only dtypes are restored: the number behind a Python scalar or a 0-dim tensor is cast to the
dtype of the tensors before the operation, as torch 1.2 did, and a quotient of integers is cut
off. Nothing here is called when the computation is in a floating dtype of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import checks
from .plan import Plan

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], Mapping[str, Any]]


def _as_number(value: Any, dtype: torch.dtype) -> Any:
    """A Python number as the tensors' integer dtype holds it: 2.5 is 2."""
    if not isinstance(value, (int, float)):
        return value
    if dtype == torch.bool:
        return bool(value)
    # C++ leaves the conversion of what no integer holds to the processor: the lowest, on x86.
    return int(value) if math.isfinite(value) else torch.iinfo(dtype).min


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """An operand in the dtype of the computation."""
    if isinstance(value, torch.Tensor):
        if value.dtype == dtype or value.dim() > 0:
            return value
        return torch.ops.aten._to_copy.default(value, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return value
    return _as_number(value, dtype)


def _target(plan: Plan, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype torch 1.2 computed in."""
    if plan.check is checks.elementwise:
        output = arguments["self"] if plan.in_place else arguments.get("out")
        operands = [arguments.get(name) for name in plan.inputs] + [output]
        tensors = [t for t in operands if isinstance(t, torch.Tensor)]
        return checks.common_dtype(tensors) if tensors else None
    for name in (plan.reference, *plan.inputs):
        if isinstance(value := arguments.get(name), torch.Tensor):
            return value.dtype
    return None


def _differentiable(values: Iterable[Any]) -> bool:
    """Whether autograd is recording one of these."""
    tensors = (v for v in values if isinstance(v, torch.Tensor))
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def adapted(plan: Plan, overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> Call:
    """The same call with its numbers cast to the dtype that torch 1.2 computed in."""
    arguments = plan.arguments(args, kwargs)
    dtype = _target(plan, arguments)
    names = set(plan.numbers)
    if plan.check is checks.elementwise:
        if dtype is None:
            return overload, args, kwargs
        if plan.base != "lerp" and (dtype.is_floating_point or dtype.is_complex):
            return overload, args, kwargs  # as today; only lerp would refuse
        names |= set(plan.inputs)
        if not dtype.is_floating_point and _differentiable(arguments.get(n) for n in plan.inputs):
            return overload, args, kwargs  # out of reach: autograd expects a floating result
    if dtype is None or not names:
        return overload, args, kwargs
    args = tuple(
        _cast(value, dtype) if name in names else value
        for name, value in zip(plan.names, args, strict=False)
    )
    kwargs = {k: _cast(v, dtype) if k in names else v for k, v in kwargs.items()}
    quotient = plan.base == "div" and "rounding_mode" not in arguments
    if quotient and not (dtype.is_floating_point or dtype.is_complex):
        return _integer_division(plan, overload, args, kwargs)
    return overload, args, kwargs


def _integer_division(plan: Plan, overload: torch._ops.OpOverload, args: Any, kwargs: Any) -> Call:
    """A quotient of integers stayed integer and was cut off towards zero."""
    div, div_ = torch.ops.aten.div, torch.ops.aten.div_
    by_number = not isinstance(args[1], torch.Tensor) and overload._overloadname == "Scalar"
    if plan.in_place:
        overload = div_.Scalar_mode if by_number else div_.Tensor_mode
    elif "out" in kwargs:
        overload = div.out_mode
    else:
        overload = div.Scalar_mode if by_number else div.Tensor_mode
    return overload, args, {**kwargs, "rounding_mode": "trunc"}


def reversed_division(tensor: torch.Tensor, number: Any) -> torch.Tensor:
    """A number over an integer tensor: torch 1.2 went through double and came back."""
    return (tensor.double().reciprocal() * number).to(tensor.dtype)
