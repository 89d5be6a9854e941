"""Rows of elementwise operations, Python numbers, conversions and reductions."""

from typing import Any, Callable, Dict, Iterator

import torch
import torch.nn.functional as F

from syncbn_lab.rules.recorder.operands import (
    ALL,
    DTYPES,
    FLOATS,
    SCALAR,
    SOME,
    VECTOR,
    Operand,
    Row,
    grid,
)

Call = Callable[..., Any]

# The dimensions of two operands; an output in place must have the broadcast shape.
_ANY = ((VECTOR, VECTOR), (VECTOR, SCALAR), (SCALAR, VECTOR), (SCALAR, SCALAR))
_IN_PLACE = ((VECTOR, VECTOR), (VECTOR, SCALAR), (SCALAR, SCALAR))
_BROADCAST = (((2, 3), (3,)), ((2, 3), (1,)), ((0,), (0,)))


def _iadd(a: Any, b: Any) -> Any:
    a += b
    return a


def _isub(a: Any, b: Any) -> Any:
    a -= b
    return a


def _imul(a: Any, b: Any) -> Any:
    a *= b
    return a


def _itruediv(a: Any, b: Any) -> Any:
    a /= b
    return a


def _mask(like: Any) -> Any:
    return Operand("bool", tuple(like.shape)).make()


_ARITHMETIC: Dict[str, Call] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "__add__": lambda a, b: a + b,
    "__sub__": lambda a, b: a - b,
    "__mul__": lambda a, b: a * b,
    "__truediv__": lambda a, b: a / b,
    "add alpha=2": lambda a, b: torch.add(a, b, alpha=2),
    "rsub": lambda a, b: torch.rsub(a, b),
}
_ARITHMETIC_IN_PLACE: Dict[str, Call] = {
    "add_": lambda a, b: a.add_(b),
    "sub_": lambda a, b: a.sub_(b),
    "mul_": lambda a, b: a.mul_(b),
    "div_": lambda a, b: a.div_(b),
    "__iadd__": _iadd,
    "__isub__": _isub,
    "__imul__": _imul,
    "__itruediv__": _itruediv,
    "add_ alpha=2": lambda a, b: a.add_(b, alpha=2),
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_SAME: Dict[str, Call] = {
    "atan2": torch.atan2,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "max": lambda a, b: torch.max(a, b),
    "min": lambda a, b: torch.min(a, b),
    "dist": torch.dist,
}
_SAME_IN_PLACE: Dict[str, Call] = {
    "atan2_": lambda a, b: a.atan2_(b),
    "fmod_": lambda a, b: a.fmod_(b),
    "remainder_": lambda a, b: a.remainder_(b),
}
_BITS: Dict[str, Call] = {
    "__and__": lambda a, b: a & b,
    "__or__": lambda a, b: a | b,
    "__xor__": lambda a, b: a ^ b,
}


def pairs() -> Iterator[Row]:
    """Two operands, elementwise."""
    for name, call in _ARITHMETIC.items():
        dtypes = ALL if hasattr(torch, name) and name != "rsub" else SOME
        yield from grid("elementwise", name, call, (dtypes, dtypes), _ANY)
    for name in ("add", "mul"):
        yield from grid("elementwise", name, _ARITHMETIC[name], (FLOATS, FLOATS), _BROADCAST)
    for name, call in _ARITHMETIC_IN_PLACE.items():
        yield from grid("elementwise", name, call, (SOME, SOME), _IN_PLACE, "in place")
    yield from grid("elementwise", "lerp", lambda a, b: torch.lerp(a, b, 0.5), (SOME, SOME), _ANY)
    for name in _COMPARISONS:
        dtypes = ALL if name in ("lt", "eq") else SOME
        yield from grid("comparison", name, getattr(torch, name), (dtypes, dtypes), _ANY)
    for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        yield from grid("comparison", name, getattr(torch.Tensor, name), (SOME, SOME), _ANY)
    for name in ("lt_", "eq_"):
        call = getattr(torch.Tensor, name)
        yield from grid("comparison", name, call, (SOME, SOME), _IN_PLACE, "in place")
    yield from grid("comparison", "equal", torch.equal, (SOME, SOME))
    for name, call in _SAME.items():
        yield from grid("elementwise-same", name, call, (SOME, SOME), _ANY)
    for name, call in _SAME_IN_PLACE.items():
        yield from grid("elementwise-same", name, call, (SOME, SOME), _IN_PLACE, "in place")
    for name, call in _BITS.items():
        whole = ("int64", "int32", "uint8", "bool")
        yield from grid("elementwise-same", name, call, (whole, whole), _ANY)
    yield from grid("pow", "pow", torch.pow, (SOME, SOME), _ANY)
    yield from grid("pow", "__pow__", lambda a, b: a**b, (SOME, SOME), _ANY)
    yield from grid("pow", "pow_", lambda a, b: a.pow_(b), (SOME, SOME), _IN_PLACE, "in place")
    yield from grid("pow", "__ipow__", torch.Tensor.__ipow__, (SOME, SOME), _IN_PLACE, "in place")
    cross = torch.cross
    yield from grid("elementwise-same", "cross", lambda a, b: cross(a, b, 0), (SOME, SOME))


def triples() -> Iterator[Row]:
    """Three operands, and results that exist already."""
    three = ((VECTOR, VECTOR, VECTOR),)
    for name in ("addcmul", "addcdiv"):
        yield from grid("elementwise", name, getattr(torch, name), (SOME, SOME, SOME), three)
        call = getattr(torch.Tensor, name + "_")
        yield from grid("elementwise", name + "_", call, (FLOATS,) * 3, three, "in place")
    for name in ("add", "sub", "mul", "div"):

        def call(a: Any, b: Any, out: Any, name: str = name) -> Any:
            return getattr(torch, name)(a, b, out=out)

        yield from grid("elementwise", name + " out=", call, (SOME, SOME, SOME), three, "out=")
    lerp = lambda a, b, weight: torch.lerp(a, b, weight)  # noqa: E731
    yield from grid("elementwise", "lerp", lerp, (FLOATS,) * 3, three)
    where = lambda condition, a, b: torch.where(condition, a, b)  # noqa: E731
    shapes = tuple((VECTOR, *two) for two in _ANY)
    for mask in ("bool", "uint8"):
        yield from grid("where", "where", where, ((mask,), SOME, SOME), shapes)


_NUMBER: Dict[str, Call] = {
    "__add__": lambda a, s: a + s,
    "__radd__": lambda a, s: s + a,
    "__sub__": lambda a, s: a - s,
    "__rsub__": lambda a, s: s - a,
    "__mul__": lambda a, s: a * s,
    "__rmul__": lambda a, s: s * a,
    "__truediv__": lambda a, s: a / s,
    "__rtruediv__": lambda a, s: s / a,
    "__floordiv__": lambda a, s: a // s,
    "__mod__": lambda a, s: a % s,
    "__pow__": lambda a, s: a**s,
    "__rpow__": lambda a, s: s**a,
    "add_": lambda a, s: a.add_(s),
    "sub_": lambda a, s: a.sub_(s),
    "mul_": lambda a, s: a.mul_(s),
    "div_": lambda a, s: a.div_(s),
    "pow_": lambda a, s: a.pow_(s),
    "add alpha=": lambda a, s: torch.add(a, a, alpha=s),
    "fmod": lambda a, s: torch.fmod(a, s),
    "__lt__": lambda a, s: a < s,
    "__eq__": lambda a, s: a == s,
    "__ge__": lambda a, s: a >= s,
    "clamp": lambda a, s: a.clamp(s, 3),
    "clamp min=": lambda a, s: a.clamp(min=s),
    "fill_": lambda a, s: a.fill_(s),
    "masked_fill": lambda a, s: a.masked_fill(_mask(a), s),
    "__setitem__": lambda a, s: (a.__setitem__(Ellipsis, s), a)[1],
    "full_like": torch.full_like,
    "lerp": lambda a, s: torch.lerp(a, a, s),
    "threshold": lambda a, s: F.threshold(a, s, s),
    "leaky_relu": lambda a, s: F.leaky_relu(a, s),
}


def numbers() -> Iterator[Row]:
    """A tensor and a Python number: numbers never promote."""
    for name, call in _NUMBER.items():
        for dtype in ALL:
            for shape in (VECTOR, SCALAR):
                for number in (2, 2.5, True):
                    operands = (Operand(dtype, shape), number)
                    form = "in place" if name.endswith("_") and "__" not in name else "out of place"
                    yield Row("scalar", name, form, operands, call)


def fills() -> Iterator[Row]:
    """Tensors made of a Python number."""
    for number in (2, 2.5, True):
        yield Row("scalar", "full", "out of place", (number,), lambda s: torch.full((3,), s))
        for dtype in ALL:
            call = lambda s, name: torch.full((3,), s, dtype=DTYPES[name])  # noqa: E731
            yield Row("scalar", "full dtype=", "out of place", (number, dtype), call)


def conversions() -> Iterator[Row]:
    """What converts on purpose is always allowed."""
    calls: Dict[str, Call] = {
        "copy_": lambda a, b: a.copy_(b),
        "type_as": lambda a, b: a.type_as(b),
        "to": lambda a, b: a.to(b.dtype),
        "type": lambda a, b: a.type(b.dtype),
        "__setitem__": lambda a, b: (a.__setitem__(Ellipsis, b), a)[1],
    }
    for name, call in calls.items():
        yield from grid("conversion", name, call, (ALL, ALL))
    for name in ("half", "float", "double", "long", "int", "byte", "bool"):
        yield from grid("conversion", name, getattr(torch.Tensor, name), (ALL,), ((VECTOR,),))


_NAMES = """
abs acos asin atan ceil cos cosh digamma erf erfc erfinv exp expm1 floor frac lgamma log log10
log1p log2 neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
"""
_REDUCTIONS = ("sum", "mean", "prod", "std", "var", "max", "min", "norm", "argmax", "all", "any")


def _reduction(name: str) -> Call:
    return lambda a: getattr(torch, name)(a) if hasattr(torch, name) else getattr(a, name)()


def _with_dtype(name: str, target: str) -> Call:
    along = name in ("cumsum", "cumprod", "softmax", "log_softmax")

    def call(a: Any, *unused: Any) -> Any:
        function = getattr(torch, name)
        return function(a, 0, dtype=DTYPES[target]) if along else function(a, dtype=DTYPES[target])

    return call


def singles() -> Iterator[Row]:
    """One operand: functions and reductions, with and without ``dtype=``."""
    one = ((VECTOR,), (SCALAR,))
    for name in _NAMES.split():
        yield from grid("floating-only", name, getattr(torch, name), (ALL,), one, first=0.25)
    for name in ("sqrt_", "exp_", "sigmoid_", "relu_", "abs_", "zero_"):
        call = getattr(torch, name, None) or getattr(torch.Tensor, name)
        yield from grid("floating-only", name, call, (ALL,), one, "in place")
    for name in _REDUCTIONS:
        yield from grid("floating-only", name, _reduction(name), (ALL,), (*one, ((2, 3),)))
    for name in ("sum", "mean", "var", "std", "max"):
        call = _along(name)
        yield from grid("floating-only", name + " dim=1", call, (ALL,), (((2, 3),),))
    yield from grid("floating-only", "norm dim=0", lambda a: torch.norm(a, 2, 0), (ALL,))
    renorm = lambda a: torch.renorm(a, 2, 0, 1)  # noqa: E731
    yield from grid("floating-only", "renorm", renorm, (ALL,), (((2, 3),),))
    for name in ("cumsum", "cumprod", "logsumexp", "softmax", "log_softmax"):
        call = _first_dimension(name)
        yield from grid("floating-only", name, call, (ALL,), ((VECTOR,),))
    for name in ("sum", "mean", "prod", "cumsum", "cumprod", "softmax", "log_softmax"):
        for dtype in ALL:
            for target in (*FLOATS, "bfloat16", "int64"):
                operands = (Operand(dtype), target)
                call = _with_dtype(name, target)
                yield Row("floating-only", name + " dtype=", "out of place", operands, call)


def _along(name: str) -> Call:
    def call(a: Any) -> Any:
        answer = getattr(torch, name)(a, 1)
        return answer[0] if isinstance(answer, tuple) else answer

    return call


def _first_dimension(name: str) -> Call:
    return lambda a: getattr(torch, name)(a, 0)
