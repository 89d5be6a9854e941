"""The table of rules: which operation obeys which check, and what may be silently adapted.

Operations are named as aten names them today, without the underscore of their in-place form.
"""

from __future__ import annotations

from typing import Any

import torch

from . import checks
from .plan import Entry, Plan


def _object(rule: str, *named: tuple[str, int, str], **more: Any) -> Entry:
    return Entry(rule, checks.same_object, named=named, **more)


def _found(rule: str, reference: str, *names: str) -> Entry:
    named = tuple((name, 0, name) for name in names)
    return Entry(rule, checks.same_found, reference=reference, named=named)


def _indexed(number: int) -> Entry:
    return Entry("index", checks.long_index, named=(("index", number, "index"),), always=True)


_OTHER = ("other", 2, "other")
_ELEMENTWISE = Entry("elementwise", checks.elementwise, numbers=("other", "alpha", "weight"))
_CONVOLUTION = Entry("conv", checks.convolution, reference="input")
_BATCH_NORM = Entry("batch_norm", checks.batch_norm, reference="input")
_FOREACH = Entry("elementwise", checks.foreach)
_BATCHES = (("mat1", 4, "mat1"), ("mat2", 5, "mat2"))
_TERNARY = _object(
    "elementwise", ("tensor1", 3, "tensor1"), ("tensor2", 4, "tensor2"), numbers=("value",)
)

TABLE: dict[str, Entry] = {
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "floor_divide", "lerp"), _ELEMENTWISE),
    **dict.fromkeys(
        ("lt", "le", "gt", "ge", "eq", "ne"), _object("comparison", _OTHER, numbers=("other",))
    ),
    "equal": _object("comparison", _OTHER),
    **dict.fromkeys(("fmod", "remainder"), _object("elementwise-same", _OTHER, numbers=("other",))),
    **dict.fromkeys(("max", "min", "maximum", "minimum"), _object("elementwise-same", _OTHER)),
    **dict.fromkeys(
        ("atan2", "dist"),
        _object(
            "elementwise-same",
            _OTHER,
            words="_th_{operation} not supported on {DEVICE}Type for {dtype}",
        ),
    ),
    **dict.fromkeys(
        ("bitwise_and", "bitwise_or", "bitwise_xor"),
        _object("elementwise-same", _OTHER, numbers=("other",)),
    ),
    "pow": _object("pow", ("exponent", 2, "exponent"), numbers=("exponent", "self")),
    **dict.fromkeys(("addcmul", "addcdiv"), _TERNARY),
    "where": _found("where", "self", "other"),
    "cosine_similarity": _ELEMENTWISE,
    "cross": _found("elementwise-same", "self", "other"),
    "linalg_cross": _found("elementwise-same", "self", "other"),
    "clamp": Entry("elementwise", checks.elementwise, numbers=("min", "max")),
    "clamp_min": Entry("elementwise", checks.elementwise, numbers=("min",)),
    "clamp_max": Entry("elementwise", checks.elementwise, numbers=("max",)),
    "mm": _object("matmul", ("mat2", 2, "mat2")),
    "mv": _object("matmul", ("vec", 2, "vec")),
    "dot": _object("matmul", ("tensor", 2, "tensor")),
    "ger": _object("matmul", ("vec2", 2, "vec2")),
    "linear": Entry("matmul", checks.linear, reference="input"),
    "bilinear": Entry(
        "matmul",
        checks.bilinear,
        reference="input1",
        named=(("weight", 0, "weight"), ("input2", 0, "input2")),
        numbers=("bias",),  # judged too, by a rule of its own
    ),
    "matmul": Entry("matmul", checks.matmul_3d_1d),
    "bmm": _found("matmul", "self", "mat2"),
    "baddbmm": _found("matmul", "batch1", "self", "batch2"),
    "addmm": _object("matmul", *_BATCHES),
    "addmv": _object("matmul", ("mat", 4, "mat"), ("vec", 5, "vec")),
    "addr": _object("matmul", ("vec1", 4, "vec1"), ("vec2", 5, "vec2")),
    "addbmm": _object("matmul", ("batch1", 4, "batch1"), ("batch2", 5, "batch2")),
    "convolution": _CONVOLUTION,
    "convolution_overrideable": _CONVOLUTION,
    "conv_tbc": Entry("conv", checks.same_object, named=(("weight", 6, "mat2"),)),
    "cat": Entry("cat", checks.sequence, reference="tensors"),
    "stack": Entry("cat", checks.sequence, reference="tensors"),
    "index_put": Entry("index", checks.put_values, numbers=("values",)),
    "_index_put_impl": Entry("index", checks.put_values, numbers=("values",)),
    "scatter": _object("index", ("src", 4, "src"), scalar_like=True, numbers=("src", "value")),
    "scatter_add": _object("index", ("src", 4, "src")),
    "index_add": _object("index", ("source", 4, "source")),
    "index_copy": _object("index", ("source", 4, "source")),
    "put": _object("index", ("source", 3, "source")),
    **dict.fromkeys(("gather", "index_select"), _indexed(3)),
    "take": _indexed(2),
    "masked_scatter": _object("index", ("source", 3, "source")),
    "masked_fill": _object("index", numbers=("value",)),
    "index_fill": _object("index", numbers=("value",)),
    "mse_loss": _object("loss", ("target", 2, "target")),
    "smooth_l1_loss": _object("loss", ("target", 2, "target")),
    **dict.fromkeys(
        ("l1_loss", "F.mse_loss", "F.smooth_l1_loss"),
        Entry("loss", checks.loss_of_target, reference="input", named=(("target", 2, "target"),)),
    ),
    "cosine_embedding_loss": _found("loss", "input1", "target"),
    "soft_margin_loss": _object("loss", ("target", 2, "target"), reference="input"),
    "multi_margin_loss": _object("loss", ("weight", 5, "weight")),
    "grid_sample": Entry("loss", checks.grid, reference="input"),
    "binary_cross_entropy": _object("loss", ("target", 2, "target"), ("weight", 3, "weight")),
    "binary_cross_entropy_with_logits": Entry("loss", checks.logit_products),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward"), _object("loss", ("weight", 3, "weight"))
    ),
    **dict.fromkeys(
        (
            "native_batch_norm",
            "cudnn_batch_norm",
            "miopen_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_no_training",
            "_batch_norm_with_update",
            "_batch_norm_no_update",
            "batch_norm",
        ),
        _BATCH_NORM,
    ),
    "native_layer_norm": _found("layer_norm", "input", "weight", "bias"),
    "native_group_norm": Entry(
        "layer_norm",
        checks.group_norm,
        reference="bias",
        named=(("input", 3, "tensor1"), ("weight", 4, "tensor2")),
    ),
    "prelu": _found("prelu", "input", "weight"),
    "_prelu_kernel": _found("prelu", "self", "weight"),
    **dict.fromkeys(
        [f"_foreach_{name}" for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp")],
        _FOREACH,
    ),
}


def _floating(words: str, *names: str, along: str = "") -> None:
    for name in names:
        # {name} is filled in here, {dtype} and {device} when it happens
        text = words.replace("{name}", name)
        TABLE[name] = Entry("floating-only", checks.floating_only, words=text, words_along=along)


TABLE["all"] = TABLE["any"] = Entry("truth-only", checks.truth_only, always=True)

# Functions without an integer kernel. On CUDA the name before "not implemented" had other
# endings, which were never recorded; the device's name is put there.
_VML = """
acos asin atan ceil cos erf erfc exp expm1 floor log log10 log1p log2 round rsqrt sin sqrt tan
tanh trunc
"""
_floating("{name}_vml_{device} not implemented for '{dtype}'", *_VML.split())
_NATIVE = "sigmoid reciprocal frac digamma lgamma erfinv sinh cosh"
_floating("\"{name}_{device}\" not implemented for '{dtype}'", *_NATIVE.split())
_MEAN = "Can only calculate the mean of floating types. Got {dtype} instead."
_floating(_MEAN, "mean")
_SPREAD = "std and var only support floating-point dtypes"
_floating("{name} only supports floating-point dtypes", "std", "var", along=_SPREAD)
_NORM = "norm only supports floating-point dtypes"
_floating(_NORM, "norm", "linalg_vector_norm", along=_MEAN)

# Elementwise in today's torch, yet explicit about dtypes, or without a counterpart in 1.2.
_EXPLICIT = "copy fill zero bernoulli logical_and logical_or logical_xor logical_not isin"
_FREE = frozenset(f"{_EXPLICIT} native_dropout".split())


def _is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def plan_for(overload: torch._ops.OpOverload) -> Plan | None:
    """The rule of one overload; None if torch 1.2 had none that differs from today's."""
    schema = overload._schema
    name = schema.name.removeprefix("aten::")
    in_place = name.endswith("_") and not name.endswith("__")
    base = name.removesuffix("_") if in_place else name
    tensors = [a.name for a in schema.arguments if _is_tensor(a)]
    if overload.namespace != "aten":
        return None
    entry = TABLE.get(base)
    if entry is None:
        pointwise = torch.Tag.pointwise in overload.tags
        private = base.startswith("_") or base.endswith("_backward") or base in _FREE
        if not pointwise or private or sum(n != "out" for n in tensors) < 2:
            return None
        entry = _ELEMENTWISE
    return bind(entry, base, name, in_place, [a.name for a in schema.arguments], tensors)


def bind(
    entry: Entry, base: str, operation: str, in_place: bool, names: list[str], tensors: list[str]
) -> Plan:
    """An entry with the places of its arguments."""
    inputs = tuple(n for n in tensors if n != "out")
    judged = set(inputs) | {"out"}
    if entry.named or (entry.numbers and entry.check is not checks.elementwise):
        # the rest are indices and masks, which have dtypes of their own
        judged = {entry.reference, "out", *(n for n, _, _ in entry.named), *entry.numbers}
    return Plan(
        **{name: getattr(entry, name) for name in Entry.__dataclass_fields__},
        base=base,
        operation=operation,
        in_place=in_place,
        inputs=inputs,
        places=tuple((i, n) for i, n in enumerate(names) if n in judged and n in tensors),
        names=tuple(names),
    )
