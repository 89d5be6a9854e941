"""Operands of a row, their making, and the row itself."""

import itertools
from typing import Any, Callable, Iterator, List, NamedTuple, Sequence, Tuple

import torch

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
ALL = tuple(DTYPES)
FLOATS = ("float16", "float32", "float64")
SOME = (*FLOATS, "int64")
VECTOR, SCALAR = (3,), ()


class NotMadeError(Exception):
    """A tensor of this dtype can't be made by this torch."""


class Operand(NamedTuple):
    """A tensor operand: its dtype, its shape, and its values from the first one on in steps."""

    dtype: str
    shape: Tuple[int, ...] = VECTOR
    first: float = 2.0
    step: float = 1.0
    requires_grad: bool = False

    def __str__(self) -> str:
        sizes = ",".join(str(size) for size in self.shape)
        return "{}[{}]{}".format(self.dtype, sizes, " requiring grad" if self.requires_grad else "")

    def make(self) -> torch.Tensor:
        """Make the tensor; a NotMadeError says that this torch can't."""
        count = 1
        for size in self.shape:
            count *= size
        values = [self.first + self.step * number for number in range(count)]
        if self.dtype == "bool":
            values = [float(number % 2 == 0) for number in range(count)]
        if self.dtype in ("int64", "int32", "uint8"):
            values = [int(value) for value in values]
        try:
            tensor = torch.tensor(values, dtype=_SOURCE.get(self.dtype, torch.float32))
            tensor = tensor.reshape(self.shape).to(DTYPES[self.dtype])
            return tensor.requires_grad_() if self.requires_grad else tensor
        except (RuntimeError, TypeError) as error:
            raise NotMadeError(str(error)) from error


# Integers are made as integers: a float32 on the way would hide what the conversion does.
_SOURCE = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


class Row(NamedTuple):
    """One question to a torch: this operation on these operands."""

    rule: str
    """Which of our rules it belongs to, as ``describe_rules`` names them; "conversion" and
    "scalar" for what was always allowed."""
    operation: str
    form: str
    """"out of place", "in place", "out=" or "autograd"."""
    operands: Tuple[Any, ...]
    """``Operand``, or a Python number, bool or dtype name."""
    call: Callable[..., Any]
    """Called with the operands made; answers what the operation gave."""

    def __str__(self) -> str:
        """The row's name: "add(float32[3], float64[3])"."""
        return "{}({})".format(self.operation, ", ".join(str(operand) for operand in self.operands))

    def ask(self) -> Any:
        """Make the operands and call the operation."""
        made = [o.make() if isinstance(o, Operand) else o for o in self.operands]
        return self.call(*made)


def grid(
    rule: str,
    operation: str,
    call: Callable[..., Any],
    dtypes: Sequence[Sequence[str]],
    shapes: Sequence[Sequence[Tuple[int, ...]]] = ((VECTOR, VECTOR),),
    form: str = "out of place",
    first: float = 2.0,
    step: float = 1.0,
) -> Iterator[Row]:
    """Rows of one operation: every combination of the operands' dtypes, in every shape."""
    for combination in itertools.product(*dtypes):
        for each in shapes:
            operands = tuple(Operand(d, s, first, step) for d, s in zip(combination, each))
            yield Row(rule, operation, form, operands, call)


def numbered(rows: Iterator[Row]) -> List[Row]:
    """The rows as a list, each with a name of its own."""
    found, names = [], set()
    for row in rows:
        name = str(row)
        if name in names:
            raise ValueError(f"two rows are called {name}")
        names.add(name)
        found.append(row)
    return found
