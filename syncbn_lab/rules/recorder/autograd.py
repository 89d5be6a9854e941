"""Rows of gradients: what a backward pass may give back, and what the engine refuses.

The answer of a row is the gradient that arrives at the leaf asked about.
"""

import itertools
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch

from syncbn_lab.rules.recorder.operands import DTYPES, FLOATS, SCALAR, VECTOR, Operand, Row

Call = Callable[..., Any]
_PAIRS = tuple(itertools.product(FLOATS, FLOATS))


class Given(torch.autograd.Function):
    """A copy of x (and of y); backward returns the gradients it was given beforehand."""

    @staticmethod
    def forward(ctx: Any, x: Any, unused: Any, y: Any, gradients: Any) -> Any:
        """Copy x, and keep the gradients."""
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradients that were given."""
        first, second = ctx.gradients
        return first, None, second, None


class MixedBackward(torch.autograd.Function):
    """Backward multiplies the gradient by a saved tensor of any dtype."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: Any) -> Any:
        """Copy x, and keep the factor."""
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Multiply by the factor."""
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def _leaf(dtype: str, shape: Tuple[int, ...] = VECTOR) -> Any:
    return Operand(dtype, shape, requires_grad=True).make()


def _run(output: Any, leaf: Any) -> Any:
    """Backward from a gradient of the output's own dtype; what arrives at the leaf."""
    output.backward(Operand(str(output.dtype)[6:], tuple(output.shape)).make())
    return leaf.grad


def _gradient(dtype: Optional[str], shape: Tuple[int, ...] = VECTOR) -> Any:
    return None if dtype is None else Operand(dtype, shape).make()


def _through_function(x: str, y: str, first: Any, second: Any, non_leaf: bool = False) -> Any:
    """The gradient of the first input; of the second one where the first gets None."""
    a, b = _leaf(x), _leaf(y)
    given = _gradient(*first), _gradient(*second)
    # A view of a leaf is no leaf: its gradient goes to another node, not into .grad.
    output = Given.apply(a.view(3) if non_leaf else a, 3, b, given)
    return _run(output, b if first == (None,) else a)


def functions() -> Iterator[Row]:
    """A custom Function's gradients: of a leaf and of another node, first and second input."""
    for x, got in itertools.product(FLOATS, (*FLOATS, "int64")):
        for name, non_leaf in (("leaf", False), ("non-leaf", True)):
            operands: Tuple[Any, ...] = (x, "returns " + got)

            def call(*unused: Any, x: str = x, got: str = got, non_leaf: bool = non_leaf) -> Any:
                return _through_function(x, "float32", (got,), (None,), non_leaf)

            yield Row("gradient", "Function, " + name, "autograd", operands, call)
        for y in FLOATS:
            for first in (None, x):  # None for the first: the second one's index stays 1
                operands = (x, y, f"returns {first}, {got}")

                def second(
                    *unused: Any, x: str = x, y: str = y, first: Any = first, got: str = got
                ) -> Any:
                    return _through_function(x, y, (first,), (got,))

                yield Row("gradient", "Function, two inputs", "autograd", operands, second)
    for x, got in _PAIRS:
        for shape in ((2,), (2, 3), (1, 3), SCALAR):
            operands = (x, f"returns {Operand(got, shape)}")

            def shaped(*unused: Any, x: str = x, got: str = got, shape: Any = shape) -> Any:
                return _through_function(x, "float32", (got, shape), (None,))

            yield Row("gradient", "Function, shape", "autograd", operands, shaped)

        def mixed(*unused: Any, x: str = x, got: str = got) -> Any:
            a = _leaf(x)
            return _run(MixedBackward.apply(a, Operand(got).make()), a)

        yield Row("gradient", "Function, mixed in backward", "autograd", (x, got), mixed)


def _root(x: str, g: str) -> Any:
    a = _leaf(x)
    a.clone().backward(Operand(g).make())
    return a.grad


def _roots(x: str, g: str) -> Any:
    a, b = _leaf("float32"), _leaf(x)
    outputs, gradients = [a.clone(), b.clone()], [Operand("float32").make(), Operand(g).make()]
    return torch.autograd.grad(outputs, [a, b], gradients)[1]


def _root_of_function(x: str, g: str) -> Any:
    a = _leaf(x)
    Given.apply(a, 3, _leaf(x), (Operand(x).make(), None)).backward(Operand(g).make())
    return a.grad


def _hook(x: str, g: str, on_leaf: bool = True) -> Any:
    a = _leaf(x)
    b = a.clone()

    def change(grad: Any) -> Any:
        return grad.to(DTYPES[g])

    (a if on_leaf else b).register_hook(change)
    return _run(b.clone(), a)


def _hook_mixes(x: str, g: str) -> Any:
    a = _leaf(x)
    a.register_hook(lambda grad: grad * Operand(g).make())
    return _run(a.clone(), a)


def _hook_returns_none(x: str, g: str) -> Any:
    a = _leaf(x)
    a.register_hook(lambda grad: None)
    return _run(a.clone().to(DTYPES[g]), a)


def _assign(x: str, g: str) -> Any:
    a = _leaf(x)
    a.grad = Operand(g).make()
    return a.grad


def _accumulate(x: str, g: str) -> Any:
    a = _leaf(x)
    a.grad = Operand(x).make()
    return _run(a.clone().to(DTYPES[g]), a)


def _used_twice(x: str, g: str) -> Any:
    a = _leaf(x)
    return _run(a.to(DTYPES[g]) + a.clone().to(DTYPES[g]), a)


def _copy(x: str, g: str) -> Any:
    a, target = _leaf(x), Operand(g).make()
    target.copy_(a)
    return _run(target, a)


def _write(x: str, g: str) -> Any:
    a, target = _leaf(x), Operand(g).make()
    target[:] = a
    return _run(target, a)


def _index_put(x: str, g: str) -> Any:
    a, b = _leaf(x), _leaf(g)
    return _run(a.clone().index_put((torch.tensor([0, 1, 2]),), b), b)


def _index_put_scalar(x: str, g: str) -> Any:
    a, b = _leaf(x), _leaf(g, SCALAR)
    c = a.clone()
    c[torch.tensor([0, 1])] = b
    return _run(c, b)


def _masked_fill(x: str, g: str) -> Any:
    a, b = _leaf(x), _leaf(g, SCALAR)
    return _run(a.masked_fill(torch.tensor([True, False, True]), b), b)


def _in_place_scalar(x: str, g: str) -> Any:
    a, b = _leaf(x), _leaf(g, SCALAR)
    c = a.clone()
    c.mul_(b)
    return _run(c, b)


def _integers_times_scalar(x: str, g: str) -> Any:
    return Operand("int64").make() * _leaf(x, SCALAR) * _leaf(g, SCALAR)


def _sgd(x: str, g: str) -> Any:
    a = _leaf(x)
    optimizer = torch.optim.SGD([a], lr=0.1, momentum=0.9, weight_decay=0.1)
    _run(a.to(DTYPES[g]), a)
    optimizer.step()
    optimizer.step()
    return a.detach()


def _adam(x: str, g: str) -> Any:
    a = _leaf(x)
    optimizer = torch.optim.Adam([a], lr=0.1)
    _run(a.to(DTYPES[g]), a)
    optimizer.step()
    return a.detach()


def _clip(x: str, g: str) -> Any:
    a, b = _leaf(x), _leaf(g)
    _run(a.clone(), a)
    _run(b.clone(), b)
    torch.nn.utils.clip_grad_norm_([a, b], 1.0)
    return b.grad


_ENGINE: Dict[str, Call] = {
    "backward(gradient)": _root,
    "grad(outputs, inputs, gradients)": _roots,
    "backward(gradient) of a Function": _root_of_function,
    "hook on a leaf": _hook,
    "hook on a non-leaf": lambda x, g: _hook(x, g, on_leaf=False),
    "hook that multiplies": _hook_mixes,
    "hook that returns None": _hook_returns_none,
    ".grad = ": _assign,
    "accumulated into .grad": _accumulate,
    "used twice": _used_twice,
    "copy_ backward": _copy,
    "__setitem__ backward": _write,
    "index_put backward": _index_put,
    "__setitem__ index backward, 0-dim": _index_put_scalar,
    "masked_fill backward, 0-dim": _masked_fill,
    "mul_ backward, 0-dim": _in_place_scalar,
    "int64 mul of 0-dim requiring grad": _integers_times_scalar,
    "SGD step": _sgd,
    "Adam step": _adam,
    "clip_grad_norm_": _clip,
}


def engine() -> Iterator[Row]:
    """Roots, hooks, ``.grad``, conversions on the way, optimizers."""
    for name, call in _ENGINE.items():
        for pair in _PAIRS:
            yield Row("gradient", name, "autograd", pair, call)


def _node(operation: Call) -> Call:
    def call(a: Any, b: Any) -> Any:
        return _run(operation(a, b), b)

    return call


def _reduce(name: str, dtype: str) -> Call:
    along = name in ("cumsum", "cumprod", "softmax", "log_softmax")
    function = getattr(torch, name)

    def call(a: Any, *unused: Any) -> Any:
        keywords = {"dtype": DTYPES[dtype]}
        return _run(function(a, 0, **keywords) if along else function(a, **keywords), a)

    return call


def nodes() -> Iterator[Row]:
    """Built-in nodes: 0-dim operands, broadcasting, ``dtype=`` arguments, ``to``."""
    shapes = (
        (VECTOR, SCALAR),
        (SCALAR, VECTOR),
        (SCALAR, SCALAR),
        (VECTOR, VECTOR),
        ((2, 3), (3,)),
    )
    for name in ("add", "sub", "mul", "div", "rsub", "addcmul"):
        for (x, y), (one, two) in itertools.product(_PAIRS, shapes):
            operands: Tuple[Any, ...] = (
                Operand(x, one, requires_grad=True),
                Operand(y, two, requires_grad=True),
            )
            operation = getattr(torch, name)
            if name == "addcmul":
                operation = lambda a, b: torch.addcmul(a, b, b)  # noqa: E731
            yield Row("gradient", name + " backward", "autograd", operands, _node(operation))
    for name in ("sum", "mean", "prod", "cumsum", "cumprod", "softmax", "log_softmax"):
        for x, dtype in _PAIRS:
            operands = Operand(x, requires_grad=True), dtype
            call = _reduce(name, dtype)
            yield Row("gradient", name + " dtype= backward", "autograd", operands, call)
    for x, dtype in _PAIRS:

        def convert(a: Any, name: str) -> Any:
            return _run(a.to(DTYPES[name]), a)

        operands = Operand(x, requires_grad=True), dtype
        yield Row("gradient", "to backward", "autograd", operands, convert)
