"""``torch12_rules()``: today's torch made to obey torch 1.2's dtype rules.

>>> import torch
>>> with torch12_rules():
...     torch.ones(3, dtype=torch.half) + torch.ones(3)
Traceback (most recent call last):
    ...
syncbn_lab.rules.violations.Torch12RuleError: expected device cpu and dtype Float but got ...

Three layers work together, because none sees everything:

- a **dispatch mode** sees every operation with its operands before promotion;
- a **function mode** sees what today's torch would refuse earlier in words of its own
  (convolutions with a bias, prelu, ``.grad = …``) and Python-level formulas that have changed;
- **autograd** (``gradients.py``): the engine's silent cast of a gradient.

What is not reached:

- ``i64[3] * f32[]`` where the 0-dim tensor requires grad: torch 1.2 gave int64, here autograd
  has already decided on a floating result when the mode is asked, and today's dtype stays;
- code that leaves the thread (a thread of one's own, DataParallel): modes are per thread. The
  engine's worker threads inherit them;
- a ``.grad`` or a parameter whose dtype is changed through ``.data`` between two backwards;
- infinite and NaN numbers with integers: the dtype is torch 1.2's, where it refused some;
- modules that today's torch computes in another way: ``MultiheadAttention``, LSTM; ``normal`` with
  two dtypes; a 0-dim target of a loss that requires grad;
- values: where torch 1.2 computed another number with the same dtype, today's number stays;
- when shape and dtype are both wrong in place, torch 1.2 spoke of the shape, here the dtype;
- a few things that today's torch refuses or allows for other reasons: ``x - True``, ``addcdiv``
  of integers, ``scatter_`` with a 0-dim source, integer convolutions, int32 indices in square
  brackets, ``scatter_``, ``index_add_`` and embeddings, uint8 targets of ``nll_loss``, ``kl_div``
  of integers, triangular solves, ``out=`` of a comparison or of a function of one tensor;
- gradient clipping and the gradient scaler are today's own code and not judged: torch 1.2
  clipped mixed models, with norms that were Python numbers;
- convolutions with a bias, prelu and ``.grad = …`` inside a hook that backward calls keep
  today's wording, since backward runs with the function mode switched off (inside a custom
  Function's backward it is switched on again);
- functions whose own formula mixes dtypes inside today's C++: ``ctc_loss`` with tensor lengths
  and ``quantile`` are refused, though torch 1.2 took the one and did not have the other;
- code compiled by ``torch.compile``.

``data/torch-1.2/rules.csv`` is what a real torch 1.2.0 on a CPU answered; ``comparison.py``
holds every row of it against these rules and lists what differs, and a raised message names the
row it rests on. Half is in it wherever torch 1.2 checked dtypes before it looked for a kernel;
elsewhere half is the rule of the other dtypes applied. CUDA was never run on a real torch 1.2
here. bfloat16 could be stored in torch 1.2 and was taken for uint8 in sums; it is given half's
rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import InputError
from ..trace.frames import current_line
from . import gradients
from .adapt import adapted, reversed_division
from .describe import basis_of
from .plan import Plan
from .record import evidence_for
from .table import TABLE, bind, plan_for
from .violations import (
    Finding,
    Torch12RuleError,
    Violation,
    describe_operands,
    short_name,
    tensors_in,
    user_frame,
)

_TO_COPY = torch.ops.aten._to_copy.default
_PLANS: dict[Any, Plan | None] = {}


class Rules:
    """What one ``with torch12_rules()`` yields: the violations noted so far, in order."""

    def __init__(self, on_violation: str) -> None:
        self.on_violation = on_violation
        self.violations: list[Violation] = []
        self._noted_above = False

    @property
    def raising(self) -> bool:
        """Whether a violation raises; otherwise it is only noted."""
        return self.on_violation == "raise"

    def report(
        self,
        rule: str,
        operation: str,
        finding: Finding,
        operands: list[torch.Tensor],
        *,
        result: Any = None,
        result_dtype: torch.dtype | None = None,
        index: int | None = None,
        backward: bool | None = None,
    ) -> Torch12RuleError:
        """Note a violation; the error is for the caller to raise, or not."""
        frame = user_frame()
        produced = tensors_in([result] if isinstance(result, torch.Tensor) else result or ())
        shapes = produced or operands
        if backward is None:
            backward = torch._C._current_autograd_node() is not None
        if produced:
            result_dtype = produced[0].dtype
        violation = Violation(
            rule=rule,
            operation=operation,
            message=finding.message,
            operands=describe_operands(operands),
            result_dtype=short_name(result_dtype),
            phase="backward" if backward else "forward",
            file=frame.f_code.co_filename if frame else None,
            line=current_line(frame) if frame else None,
            gradient_index=index,
            expected=short_name(finding.expected),
            got=short_name(finding.got),
            numel=max((t.numel() for t in shapes), default=0),
        )
        self.violations.append(violation)
        # Where nothing is raised nobody asks, and the record need not be read.
        recorded = evidence_for(rule, operation, finding.message) if self.raising else None
        return Torch12RuleError(violation, basis_of(rule), recorded)


class _DispatchRules(TorchDispatchMode):
    """The layer that sees operations."""

    def __init__(self, rules: Rules, functions: _FunctionRules) -> None:
        super().__init__()
        self.rules = rules
        self.functions = functions

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else every call goes through torch._dynamo, which takes seconds to import.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            plan = _PLANS[func]
        except KeyError:
            plan = _PLANS[func] = plan_for(func)
        if plan is None:
            if func is _TO_COPY:
                self._engine_cast(args[0], kwargs)
            return func(*args, **kwargs)
        if plan.plain(args, kwargs) and not plan.always and "dtype" not in kwargs:
            return func(*args, **kwargs)
        return self._governed(plan, func, args, kwargs)

    def _governed(self, plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation whose dtypes differ or are not floating."""
        rules = self.rules
        if rules._noted_above or gradients.in_todays_own_formula():
            return func(*args, **kwargs)
        arguments = plan.arguments(args, kwargs)
        finding = plan.check(plan, arguments)
        if finding is None:
            if rules.raising:
                func, args, kwargs = adapted(plan, func, args, kwargs)
            return func(*args, **kwargs)
        operands = tensors_in((*args, *kwargs.values()))
        if rules.raising:
            today = _today(plan, operands)
            raise rules.report(plan.rule, plan.operation, finding, operands, result_dtype=today)
        result = func(*args, **kwargs)
        rules.report(plan.rule, plan.operation, finding, operands, result=result)
        return result

    def _engine_cast(self, tensor: torch.Tensor, kwargs: Any) -> None:
        found = gradients.engine_cast(tensor, kwargs)
        if found is None:
            return
        finding, operation, index = found
        error = self.rules.report(
            "gradient",
            operation,
            finding,
            [tensor],
            result_dtype=finding.expected,
            index=index,
            backward=True,
        )
        if self.rules.raising:
            raise error


def _today(plan: Plan, operands: list[torch.Tensor]) -> torch.dtype | None:
    """The dtype that today's torch gives to an elementwise operation, without running it."""
    if plan.rule == "comparison":
        return torch.bool
    if plan.rule not in ("elementwise", "elementwise-same", "pow", "where", "cat"):
        return None
    if plan.in_place:
        return operands[0].dtype
    operands = [t for t in operands if plan.base != "where" or t.dtype != torch.bool]
    if not operands:
        return None
    dtype = operands[0].dtype
    for tensor in operands[1:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype), tensor)
    return dtype


class _FunctionRules(TorchFunctionMode):
    """The layer that sees Python-level functions."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        if handler is None:
            return func(*args, **kwargs)
        return handler(self, func, args, kwargs)


Handler = Callable[[_FunctionRules, Any, tuple[Any, ...], Any], Any]


def _checked(base: str, names: list[str]) -> Handler:
    """Judge a function by a row of the table before today's torch looks at it."""
    plan = bind(TABLE[base], base, base, False, names, names)

    def handler(mode: _FunctionRules, func: Any, args: Any, kwargs: Any) -> Any:
        rules = mode.rules
        arguments = plan.arguments(args, kwargs)
        tensors = tensors_in(arguments.get(name) for name in names)
        if (
            not tensors
            or plan.plain(args, kwargs)
            or torch.is_autocast_enabled(tensors[0].device.type)  # casts below this layer
            or gradients.in_todays_own_formula()
        ):
            return func(*args, **kwargs)
        finding = plan.check(plan, arguments)
        if finding is None:
            return func(*args, **kwargs)
        operation = getattr(func, "__name__", base)
        if rules.raising:
            raise rules.report(plan.rule, operation, finding, tensors)
        before, rules._noted_above = rules._noted_above, True
        result = None
        try:
            result = func(*args, **kwargs)
        finally:
            rules._noted_above = before
            rules.report(plan.rule, operation, finding, tensors, result=result)
        return result

    return handler


def _reversed(mode: _FunctionRules, func: Any, args: Any, kwargs: Any) -> Any:
    """An integer tensor under a number (``5 / tensor``) stayed integer."""
    tensor = args[0]
    if not mode.rules.raising or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return func(*args, **kwargs)
    if isinstance(args[1], torch.Tensor):
        return func(*args, **kwargs)
    return reversed_division(tensor, args[1])


def _full(mode: _FunctionRules, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.full gave the default dtype, whatever the number."""
    if mode.rules.raising and kwargs.get("dtype") is None and kwargs.get("out") is None:
        kwargs = {**kwargs, "dtype": torch.get_default_dtype()}
    return func(*args, **kwargs)


def _set(mode: _FunctionRules, func: Any, args: Any, kwargs: Any) -> Any:
    """tensor.grad = value."""
    if func == _GRAD_SETTER:
        finding = gradients.assigned_gradient(*args)
        if finding is not None:
            error = mode.rules.report("gradient", "grad", finding, tensors_in(args), backward=False)
            if mode.rules.raising:
                raise error
    return func(*args, **kwargs)


_GRAD_SETTER = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_HANDLERS: dict[str, Handler] = {
    **{
        f"conv{transposed}{dims}d": _checked("convolution", ["input", "weight", "bias"])
        for dims in (1, 2, 3)
        for transposed in ("", "_transpose")
    },
    "prelu": _checked("prelu", ["input", "weight"]),
    "linear": _checked("linear", ["input", "weight", "bias"]),
    "bilinear": _checked("bilinear", ["input1", "input2", "weight", "bias"]),
    "tensordot": _checked("mm", ["self", "mat2"]),
    **dict.fromkeys(("matmul", "__matmul__"), _checked("matmul", ["self", "other"])),
    "grid_sample": _checked("grid_sample", ["input", "grid"]),
    "ger": _checked("ger", ["self", "vec2"]),
    "cosine_similarity": _checked("cosine_similarity", ["x1", "x2"]),
    "l1_loss": _checked("l1_loss", ["input", "target"]),
    "mse_loss": _checked("F.mse_loss", ["input", "target"]),
    "smooth_l1_loss": _checked("F.smooth_l1_loss", ["input", "target"]),
    "soft_margin_loss": _checked("soft_margin_loss", ["input", "target"]),
    "cosine_embedding_loss": _checked("cosine_embedding_loss", ["input1", "input2", "target"]),
    "full": _full,
    "__rdiv__": _reversed,
    "__rtruediv__": _reversed,
    "__set__": _set,
}


def _function_applied(apply: Callable[..., Any], node: Any, given: tuple[Any, ...]) -> Any:
    """Run a custom Function's backward and judge what it returns, by all rules in force here.

    ``Tensor.backward`` runs with function modes switched off: they are switched on again.
    """
    dispatch = range(torch._C._len_torch_dispatch_stack())
    stack = [torch._C._get_dispatch_stack_at(i) for i in dispatch]
    in_force = [mode for mode in stack if isinstance(mode, _DispatchRules)]
    if not in_force:
        return apply(node, *given)
    functions = range(torch._C._len_torch_function_stack())
    present = [torch._C._get_function_stack_at(i) for i in functions]
    with contextlib.ExitStack() as again:
        for mode in in_force:
            if mode.functions not in present:
                again.enter_context(mode.functions)
        returned = apply(node, *given)
    for finding, gradient, index in gradients.function_findings(node, returned):
        for mode in reversed(in_force):  # the innermost first
            error = mode.rules.report(
                "gradient",
                node.name(),
                finding,
                [gradient],
                result_dtype=finding.expected,
                index=index,
                backward=True,
            )
            if mode.rules.raising:
                raise error
    return returned


_WATCH = gradients.ApplyWatch()


@contextlib.contextmanager
def torch12_rules(*, on_violation: str = "raise") -> Iterator[Rules]:
    """Obey torch 1.2's dtype rules, as on CUDA, in the body of the ``with`` statement.

    Args:
        on_violation: ``raise`` (the default): what torch 1.2 refused raises
            ``Torch12RuleError`` with its words, and what it allowed gives its result dtype.
            ``record``: today's own rules stay in force entirely; every violation is noted, in
            order, in ``.violations`` of the yielded object.

    Raises:
        InputError: ``on_violation`` is something else.

    Explicit conversions (``x.to(dtype)``, ``.half()``, ``copy_``, autocast's casts) are always
    allowed, indices are never judged. The module's docstring says what is out of reach.
    """
    if on_violation not in ("raise", "record"):
        raise InputError(f"on_violation must be 'raise' or 'record', not {on_violation!r}.")
    rules = Rules(on_violation)
    functions = _FunctionRules(rules)
    _WATCH.start(_function_applied)
    try:
        with functions, _DispatchRules(rules, functions):
            yield rules
    finally:
        _WATCH.stop()
