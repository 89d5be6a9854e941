"""What torch 1.2 refused, one small check per kind of wording, chosen from ``table.py``.

A check gets the arguments of one operation by name and answers a ``Finding`` (torch 1.2
would have raised) or None. It is called only when the dtypes differ or are not floating.

Source of every wording: the operation run on torch 1.2.0 on a CPU with float, double, long,
int, uint8 and bool. Half on CUDA is the same rule applied, confirmed by the report's own
text; two wordings are CUDA's where the CPU's differ by kernel (convolution, and batch norm,
which took half input with float32 parameters there).
"""

from __future__ import annotations

import torch

from .plan import Arguments, Plan
from .violations import Finding, scalar_name, type_name

Tensor = torch.Tensor


def _device_dtype(device: torch.device, dtype: torch.dtype) -> str:
    return f"device {device} and dtype {scalar_name(dtype)}"


def _object_text(expected: torch.dtype, got: torch.dtype, where: str) -> str:
    return (
        f"Expected object of scalar type {scalar_name(expected)} "
        f"but got scalar type {scalar_name(got)} for {where}"
    )


def common_dtype(tensors: list[Tensor]) -> torch.dtype:
    """The dtype torch 1.2's TensorIterator computed in.

    Tensors with dimensions decide; those without one count only when there are no others,
    not even across categories. Python scalars never count.
    """
    deciding = [t for t in tensors if t.dim() > 0] or tensors
    dtype = deciding[0].dtype
    for tensor in deciding[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def iterator(inputs: list[Tensor], output: Tensor | None) -> Finding | None:
    """TensorIterator's rule for inputs and an output that exists already.

    The output takes part in deciding the dtype, and is judged first.
    """
    operands = inputs if output is None else [output, *inputs]
    common = common_dtype(operands)
    if output is not None and output.dtype != common:
        return Finding(
            f"output with {_device_dtype(output.device, output.dtype)} doesn't match "
            f"the desired {_device_dtype(output.device, common)}",
            expected=common,
            got=output.dtype,
        )
    if any(t.dim() > 0 for t in operands):
        for tensor in inputs:
            if tensor.dim() > 0 and tensor.dtype != common:
                return Finding(
                    f"expected {_device_dtype(tensor.device, common)} "
                    f"but got {_device_dtype(tensor.device, tensor.dtype)}",
                    expected=common,
                    got=tensor.dtype,
                )
    return None


def _bool_difference(tensors: list[Tensor]) -> Finding | None:
    """A difference with a bool tensor, even a 0-dim one, was refused before any dtype rule."""
    bools = sum(t.dtype == torch.bool for t in tensors)
    if not bools:
        return None
    start = "Subtraction, the `-` operator, with "
    if bools > 1:
        return Finding(f"{start}two bool tensors is not supported. Use the `^` operator instead.")
    return Finding(
        f"{start}a bool tensor is not supported. If you are trying to invert a mask, "
        "use the `~` or `bitwise_not()` operator instead."
    )


def elementwise(plan: Plan, arguments: Arguments) -> Finding | None:
    """Sum, difference, product, quotient: tensors with dimensions must agree."""
    inputs = [t for name in plan.inputs if isinstance(t := arguments.get(name), Tensor)]
    if plan.base in ("sub", "rsub") and (finding := _bool_difference(inputs)) is not None:
        return finding
    output = arguments["self"] if plan.in_place else arguments.get("out")
    if plan.base == "lerp" and output is None:
        # lerp allocated its result with self's dtype and the broadcast shape.
        start, dims = inputs[0], max(t.dim() for t in inputs)
        output = start if start.dim() == dims else start.reshape([1] * dims)
    finding = iterator(inputs, output)
    if finding is None and inputs:
        dtype = common_dtype(inputs if output is None else [output, *inputs])
        if plan.base == "div" and dtype == torch.bool:
            return Finding(f"\"div_{inputs[0].device.type}\" not implemented for 'Bool'")
    return finding


def logit_products(plan: Plan, arguments: Arguments) -> Finding | None:
    """binary_cross_entropy_with_logits multiplied its four tensors, in place but for the first."""
    logits, target = arguments["self"], arguments["target"]
    if target.dtype == torch.bool:  # 1 - target: both sides bool, as a number takes the tensor's
        return _bool_difference([target, target])
    products = [
        (arguments.get("pos_weight"), target, False),
        (target, logits, True),
        (logits, arguments.get("weight"), True),
    ]
    for first, second, in_place in products:
        if first is not None and second is not None:
            finding = iterator([first, second], first if in_place else None)
            if finding is not None:
                return finding
    return None


def linear(plan: Plan, arguments: Arguments) -> Finding | None:
    """With a bias, and not of two dimensions: a product, then a sum in place.

    The other cases are one ``mm`` or ``addmm``, as today, and judged there.
    """
    x, weight, bias = arguments["input"], arguments["weight"], arguments.get("bias")
    if x.dim() == 2 or bias is None:
        return None
    if weight.dtype != x.dtype:
        text = _object_text(x.dtype, weight.dtype, "argument #2 'mat2'")
        return Finding(text, x.dtype, weight.dtype)
    return iterator([x, bias], x)


def foreach(plan: Plan, arguments: Arguments) -> Finding | None:
    """Lists of tensors: every row of the lists is one elementwise operation.

    torch 1.2 had no such operations; its optimizers ran the same rows one by one.
    """
    columns = [value for name in plan.inputs if (value := arguments.get(name)) is not None]
    for row in zip(*(c for c in columns if isinstance(c, (list, tuple))), strict=False):
        tensors = [t for t in row if isinstance(t, Tensor)]
        tensors += [c for c in columns if isinstance(c, Tensor)]
        finding = iterator(tensors, tensors[0] if plan.in_place else None)
        if finding is not None:
            return finding
    return None


def same_object(plan: Plan, arguments: Arguments) -> Finding | None:
    """Kernels of the old TH library: any difference from the reference is refused.

    A tensor without dimensions is no exception. In place, the numbers count one more.
    """
    reference = arguments[plan.reference]
    if not isinstance(reference, Tensor):
        return None
    if plan.words and not reference.dtype.is_floating_point:
        return floating_only(plan, arguments)
    result = None if plan.in_place else arguments.get("out")
    if result is not None:
        wanted = torch.bool if plan.rule == "comparison" else reference.dtype
        if result.dtype != wanted:
            text = _object_text(wanted, result.dtype, "argument #0 'result'")
            return Finding(text, wanted, result.dtype)
    for name, number, old_name in plan.named:
        other = arguments.get(name)
        if not isinstance(other, Tensor) or other.dtype == reference.dtype:
            continue
        if plan.scalar_like and other.dim() == 0:
            continue
        # the result came first in place; operations that exist in place only counted it already
        place = number + (plan.in_place and plan.rule != "index")
        where = f"argument #{place} '{old_name}'"
        return Finding(
            _object_text(reference.dtype, other.dtype, where), reference.dtype, other.dtype
        )
    return None


def group_norm(plan: Plan, arguments: Arguments) -> Finding | None:
    """With weight and bias one addcmul; with one of them a product or a sum with the input."""
    x, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
    if weight is not None and bias is not None:
        return same_object(plan, arguments)
    given = [t for t in (weight, bias) if t is not None]
    return iterator([x, *given], None) if given else None


def bilinear(plan: Plan, arguments: Arguments) -> Finding | None:
    """A product of three, then a sum with the bias."""
    finding, bias = same_found(plan, arguments), arguments.get("bias")
    if finding is not None or bias is None:
        return finding
    return iterator([arguments["input1"], bias], None)


def loss_of_target(plan: Plan, arguments: Arguments) -> Finding | None:
    """A target that requires a gradient had a formula of its own: a difference, then the rest."""
    x, target = arguments["input"], arguments["target"]
    if target.requires_grad:
        return _bool_difference([x, target]) or iterator([x, target], None)
    return same_object(plan, arguments)


def same_found(plan: Plan, arguments: Arguments) -> Finding | None:
    """Kernels that read their arguments through ``data<T>``: any difference is refused."""
    reference = arguments[plan.reference]
    for name, _, _ in plan.named:
        other = arguments.get(name)
        if isinstance(other, Tensor) and other.dtype != reference.dtype:
            return _found(reference.dtype, other.dtype)
    return None


def _found(expected: torch.dtype, got: torch.dtype) -> Finding:
    text = f"expected scalar type {scalar_name(expected)} but found {scalar_name(got)}"
    return Finding(text, expected, got)


def batch_norm(plan: Plan, arguments: Arguments) -> Finding | None:
    """All of one dtype, or half input with float32 parameters and statistics.

    The exception existed on CUDA alone; it is granted on every device, because the rules
    stand for CUDA, and to bfloat16 too.
    """
    x = arguments["input"]
    # training read the statistics first, evaluation the parameters (seen on torch 1.2.0 CPU)
    statistics, parameters = ("running_mean", "running_var"), ("weight", "bias")
    training = arguments.get("training", arguments.get("train", True))
    order = (*statistics, *parameters) if training else (*parameters, *statistics)
    others = [t for name in order if isinstance(t := arguments.get(name), Tensor)]
    low_precision = x.dtype in (torch.float16, torch.bfloat16)
    if low_precision and others and all(t.dtype == torch.float32 for t in others):
        return None
    for other in others:
        if other.dtype != x.dtype:
            return _found(x.dtype, other.dtype)
    return None


def convolution(plan: Plan, arguments: Arguments) -> Finding | None:
    """Input, weight and bias of one dtype; cuDNN's wording for floating input."""
    x = arguments["input"]
    for name, number in (("weight", 2), ("bias", 4)):
        other = arguments.get(name)
        if not isinstance(other, Tensor) or other.dtype == x.dtype:
            continue
        if x.dtype.is_floating_point:
            text = (
                f"Input type ({type_name(x.dtype, x.device)}) and {name} type "
                f"({type_name(other.dtype, other.device)}) should be the same"
            )
        else:
            text = _object_text(x.dtype, other.dtype, f"argument #{number} '{name}'")
        return Finding(text, x.dtype, other.dtype)
    return None


def sequence(plan: Plan, arguments: Arguments) -> Finding | None:
    """Concatenation: the first element, or the given result, names the dtype for all."""
    elements = arguments["tensors"]
    result = arguments.get("out")
    expected = (elements[0] if result is None else result).dtype
    for index, element in enumerate(elements):
        if element.dtype != expected:
            where = f"sequence element {index} in sequence argument at position #1 'tensors'"
            return Finding(_object_text(expected, element.dtype, where), expected, element.dtype)
    return None


def put_values(plan: Plan, arguments: Arguments) -> Finding | None:
    """index_put_: the values must have self's dtype, unless they are a single 0-dim one."""
    target, values = arguments["self"], arguments["values"]
    if values.dim() > 0 and values.dtype != target.dtype:
        return Finding(
            f"expected {_device_dtype(target.device, target.dtype)} "
            f"but got {_device_dtype(values.device, values.dtype)}",
            target.dtype,
            values.dtype,
        )
    return None


def matmul_3d_1d(plan: Plan, arguments: Arguments) -> Finding | None:
    """Matmul of a batch and a vector went through ``mm``; today it goes through ``mv``."""
    x, other = arguments["self"], arguments["other"]
    if x.dim() < 3 or other.dim() != 1 or x.dtype == other.dtype:
        return None
    return Finding(_object_text(x.dtype, other.dtype, "argument #2 'mat2'"), x.dtype, other.dtype)


_CPP_NAMES = {
    torch.float16: "c10::Half",
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
    torch.int32: "int",
    torch.uint8: "unsigned char",
    torch.bool: "bool",
}


def grid(plan: Plan, arguments: Arguments) -> Finding | None:
    """grid_sample named the dtypes as C++ does."""
    x, points = arguments["input"], arguments["grid"]
    if x.dtype == points.dtype:
        return None
    said, got = (_CPP_NAMES.get(t.dtype, scalar_name(t.dtype)) for t in (x, points))
    text = "grid_sampler(): expected input and grid to have same dtype, but input has "
    return Finding(f"{text}{said} and grid has {got}", x.dtype, points.dtype)


def long_index(plan: Plan, arguments: Arguments) -> Finding | None:
    """Where an index is a tensor argument of its own, int64 alone was taken."""
    for name, number, old_name in plan.named:
        index = arguments[name]
        if index.dtype != torch.int64:
            where = f"argument #{number} '{old_name}'"
            return Finding(_object_text(torch.int64, index.dtype, where), torch.int64, index.dtype)
    return None


def truth_only(plan: Plan, arguments: Arguments) -> Finding | None:
    """All and any took bool and uint8; any spoke of all as well."""
    x = arguments["self"]
    if x.dtype in (torch.bool, torch.uint8):
        return None
    return Finding("all only supports torch.uint8 and torch.bool dtypes", got=x.dtype)


def floating_only(plan: Plan, arguments: Arguments) -> Finding | None:
    """Functions that had no integer kernel, or that said so themselves (mean, std)."""
    x = arguments[plan.reference]
    dtype = arguments.get("dtype") or x.dtype
    if not isinstance(x, Tensor) or dtype.is_floating_point or dtype.is_complex:
        return None
    device = x.device.type
    words = plan.words
    if plan.words_along and arguments.get("dim") is not None:
        words = plan.words_along
    words = words.format(
        operation=plan.operation, dtype=scalar_name(dtype), device=device, DEVICE=device.upper()
    )
    return Finding(words, got=dtype)
