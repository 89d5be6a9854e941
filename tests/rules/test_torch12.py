"""The rules against what torch 1.2 did.

Rows marked "seen on torch 1.2.0+cpu" were run there with the pair (float, double) and, for
other categories, long and bool; their messages are that run's, letter for letter. The same
rows with half in float's place are the rule applied (half arithmetic does not exist on
torch 1.2's CPU): ``test_half_obeys_the_same_rule`` derives them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from syncbn_lab.rules import Torch12RuleError, torch12_rules

f32, f64, i64 = torch.float32, torch.float64, torch.int64
f16, bf16 = torch.float16, torch.bfloat16


def t(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of twos."""
    return torch.full(shape, 2, dtype=dtype)


def expected_but_got(expected: str, got: str) -> str:
    return f"expected device cpu and dtype {expected} but got device cpu and dtype {got}"


def output_mismatch(output: str, desired: str) -> str:
    return (
        f"output with device cpu and dtype {output} doesn't match "
        f"the desired device cpu and dtype {desired}"
    )


def scalar_type(expected: str, got: str, where: str) -> str:
    return f"Expected object of scalar type {expected} but got scalar type {got} for {where}"


def other(expected: str, got: str, name: str = "other") -> str:
    return scalar_type(expected, got, f"argument #2 '{name}'")


def found(expected: str, got: str) -> str:
    return f"expected scalar type {expected} but found {got}"


Pair = Callable[[torch.dtype, torch.dtype], object]

# Seen on torch 1.2.0+cpu: (operation on a low and a high floating dtype, message, rule). L and H
# stand for the names of the low and the high dtype: Float, Double there; Half, Float below.
MIXED: list[tuple[str, Pair, str, str]] = [
    # "expected" names the promoted dtype, whichever operand has it
    ("add", lambda a, b: t(a, 3) + t(b, 3), expected_but_got("H", "L"), "elementwise"),
    ("add-swapped", lambda a, b: t(b, 3) + t(a, 3), expected_but_got("H", "L"), "elementwise"),
    ("sub", lambda a, b: t(a, 3) - t(b, 3), expected_but_got("H", "L"), "elementwise"),
    ("mul", lambda a, b: t(a, 3) * t(b, 3), expected_but_got("H", "L"), "elementwise"),
    ("div", lambda a, b: t(a, 3) / t(b, 3), expected_but_got("H", "L"), "elementwise"),
    (
        "alpha",
        lambda a, b: torch.add(t(a, 3), t(b, 3), alpha=2),
        expected_but_got("H", "L"),
        "elementwise",
    ),
    # a tensor of one element still has a dimension
    ("one-element", lambda a, b: t(a, 2, 3) * t(b, 1), expected_but_got("H", "L"), "elementwise"),
    # in place, the output is judged first
    ("add_-low", lambda a, b: t(a, 3).add_(t(b, 3)), output_mismatch("L", "H"), "elementwise"),
    ("add_-high", lambda a, b: t(b, 3).add_(t(a, 3)), expected_but_got("H", "L"), "elementwise"),
    # ... even among 0-dim tensors, which promote each other out of place
    ("add_-0dim", lambda a, b: t(a).add_(t(b)), output_mismatch("L", "H"), "elementwise"),
    (
        "out",
        lambda a, b: torch.add(t(b, 3), t(b, 3), out=t(a, 3)),
        output_mismatch("L", "H"),
        "elementwise",
    ),
    ("lerp", lambda a, b: torch.lerp(t(a, 3), t(b, 3), 0.5), output_mismatch("L", "H"), ""),
    # comparisons name dtypes in argument order, 0-dim tensors included
    ("lt", lambda a, b: t(a, 3) < t(b, 3), other("L", "H"), ""),
    ("eq-0dim", lambda a, b: t(b, 3) == t(a), other("H", "L"), ""),
    ("lt_", lambda a, b: t(a, 3).lt_(t(b, 3)), scalar_type("L", "H", "argument #3 'other'"), ""),
    ("pow", lambda a, b: t(a, 3) ** t(b), other("L", "H", "exponent"), "pow"),
    ("max", lambda a, b: torch.max(t(a, 3), t(b, 3)), other("L", "H"), ""),
    ("atan2", lambda a, b: torch.atan2(t(a, 3), t(b)), other("L", "H"), ""),
    ("fmod", lambda a, b: torch.fmod(t(a, 3), t(b, 3)), other("L", "H"), ""),
    (
        "addcmul",
        lambda a, b: torch.addcmul(t(a, 3), t(a, 3), t(b, 3)),
        scalar_type("L", "H", "argument #4 'tensor2'"),
        "elementwise",
    ),
    (
        "addcdiv",
        lambda a, b: torch.addcdiv(t(a, 3), t(b, 3), t(b, 3)),
        scalar_type("L", "H", "argument #3 'tensor1'"),
        "elementwise",
    ),
    ("where", lambda a, b: torch.where(t(f32, 3) > 1, t(a, 3), t(b)), found("L", "H"), "where"),
    ("mm", lambda a, b: t(a, 2, 3) @ t(b, 3, 2), other("L", "H", "mat2"), "matmul"),
    ("mv", lambda a, b: torch.mv(t(a, 2, 3), t(b, 3)), other("L", "H", "vec"), "matmul"),
    ("bmm", lambda a, b: torch.bmm(t(a, 2, 2, 3), t(b, 2, 3, 2)), found("L", "H"), "matmul"),
    (
        "linear",
        lambda a, b: F.linear(t(a, 2, 3), t(a, 4, 3), t(b, 4)),
        scalar_type("H", "L", "argument #4 'mat1'"),
        "matmul",
    ),
    (
        "linear-3dim",
        lambda a, b: F.linear(t(a, 2, 2, 3), t(a, 4, 3), t(b, 4)),
        output_mismatch("L", "H"),
        "matmul",
    ),
    (
        "conv2d-weight",
        lambda a, b: F.conv2d(t(a, 1, 1, 3, 3), t(b, 1, 1, 3, 3)),
        "Input type (torch.LTensor) and weight type (torch.HTensor) should be the same",
        "conv",
    ),
    (
        "conv2d-bias",
        lambda a, b: F.conv2d(t(a, 1, 1, 3, 3), t(a, 1, 1, 3, 3), t(b, 1)),
        "Input type (torch.LTensor) and bias type (torch.HTensor) should be the same",
        "conv",
    ),
    (
        "cat",
        lambda a, b: torch.cat([t(a, 3), t(a, 3), t(b, 3)]),
        scalar_type("L", "H", "sequence element 2 in sequence argument at position #1 'tensors'"),
        "cat",
    ),
    (
        "stack",
        lambda a, b: torch.stack([t(b, 3), t(a, 3)]),
        scalar_type("H", "L", "sequence element 1 in sequence argument at position #1 'tensors'"),
        "cat",
    ),
    (
        "index_put_",
        lambda a, b: t(a, 3).index_put_((torch.tensor([0]),), t(b, 1)),
        expected_but_got("L", "H"),
        "index",
    ),
    (
        "index_add_",
        lambda a, b: t(a, 3).index_add_(0, torch.tensor([0]), t(b, 1)),
        scalar_type("L", "H", "argument #4 'source'"),
        "index",
    ),
    ("mse", lambda a, b: F.mse_loss(t(a, 3), t(b, 3)), other("L", "H", "target"), "loss"),
    ("l1", lambda a, b: F.l1_loss(t(b, 3), t(a, 3)), other("H", "L", "target"), "loss"),
    (
        "smooth_l1",
        lambda a, b: F.smooth_l1_loss(t(a, 3), t(b, 3)),
        other("L", "H", "target"),
        "loss",
    ),
    (
        "cross_entropy",
        lambda a, b: F.cross_entropy(t(a, 1, 3), torch.tensor([0]), weight=t(b, 3)),
        scalar_type("L", "H", "argument #3 'weight'"),
        "loss",
    ),
    (
        "bce",
        lambda a, b: F.binary_cross_entropy(t(a, 3) / 4, t(b, 3) / 4),
        other("L", "H", "target"),
        "loss",
    ),
    (
        "kl_div",
        lambda a, b: F.kl_div(t(a, 3), t(b, 3), reduction="sum"),
        expected_but_got("H", "L"),
        "",
    ),
    (
        "batch_norm-high-input",
        lambda a, b: F.batch_norm(t(b, 2, 3), t(a, 3), t(a, 3)),
        found("H", "L"),
        "batch_norm",
    ),
    ("layer_norm", lambda a, b: F.layer_norm(t(a, 2, 3), (3,), t(b, 3)), found("L", "H"), ""),
    (
        "group_norm",
        lambda a, b: F.group_norm(t(a, 2, 3, 1), 3, t(a, 3), t(b, 3)),
        scalar_type("H", "L", "argument #3 'tensor1'"),
        "layer_norm",
    ),
    ("prelu", lambda a, b: F.prelu(t(a, 2, 3), t(b, 1)), found("L", "H"), "prelu"),
    ("dot", lambda a, b: torch.dot(t(a, 3), t(b, 3)), other("L", "H", "tensor"), "matmul"),
    ("ger", lambda a, b: torch.ger(t(a, 3), t(b, 3)), other("L", "H", "vec2"), "matmul"),
    (
        "tensordot",
        lambda a, b: torch.tensordot(t(a, 2, 3), t(b, 3, 2), dims=1),
        other("L", "H", "mat2"),
        "matmul",
    ),
    (
        "addmv",
        lambda a, b: torch.addmv(t(a, 2), t(b, 2, 3), t(a, 3)),
        scalar_type("L", "H", "argument #4 'mat'"),
        "matmul",
    ),
    (
        "addr",
        lambda a, b: torch.addr(t(a, 3, 3), t(a, 3), t(b, 3)),
        scalar_type("L", "H", "argument #5 'vec2'"),
        "matmul",
    ),
    (
        "addbmm",
        lambda a, b: torch.addbmm(t(a, 2, 2), t(b, 2, 2, 3), t(b, 2, 3, 2)),
        scalar_type("L", "H", "argument #4 'batch1'"),
        "matmul",
    ),
    (
        "baddbmm",
        lambda a, b: torch.baddbmm(t(a, 2, 2, 2), t(b, 2, 2, 3), t(b, 2, 3, 2)),
        found("H", "L"),
        "matmul",
    ),
    (
        "bilinear",
        lambda a, b: F.bilinear(t(a, 2, 3), t(b, 2, 3), t(a, 4, 3, 3)),
        found("L", "H"),
        "matmul",
    ),
    ("cross", lambda a, b: torch.cross(t(a, 3), t(b, 3), dim=0), found("L", "H"), ""),
    (
        "scatter_add_",
        lambda a, b: t(a, 3).scatter_add_(0, torch.tensor([0]), t(b, 1)),
        scalar_type("L", "H", "argument #4 'src'"),
        "index",
    ),
    (
        "masked_scatter_",
        lambda a, b: t(a, 3).masked_scatter_(t(i64, 3) > 1, t(b, 3)),
        scalar_type("L", "H", "argument #3 'source'"),
        "index",
    ),
    (
        "bce_with_logits",
        lambda a, b: F.binary_cross_entropy_with_logits(t(b, 3), t(a, 3)),
        output_mismatch("L", "H"),
        "loss",
    ),
    (
        "bce_with_logits-pos_weight",
        lambda a, b: F.binary_cross_entropy_with_logits(t(a, 3), t(a, 3), pos_weight=t(b, 3)),
        expected_but_got("H", "L"),
        "loss",
    ),
    (
        "soft_margin",
        lambda a, b: F.soft_margin_loss(t(a, 3), t(b, 3)),
        other("L", "H", "target"),
        "loss",
    ),
    (
        "cosine_embedding",
        lambda a, b: F.cosine_embedding_loss(t(a, 2, 3), t(a, 2, 3), t(b, 2)),
        found("L", "H"),
        "loss",
    ),
    (
        "cosine_similarity",
        lambda a, b: F.cosine_similarity(t(a, 2, 3), t(b, 2, 3)),
        expected_but_got("H", "L"),
        "elementwise",
    ),
    (
        "hook-arithmetic",
        lambda a, b: _backward_through_hook(a, lambda g: g * t(b, 3)),
        expected_but_got("H", "L"),
        "elementwise",
    ),
    (
        "grad-assignment",
        lambda a, b: setattr(t(a, 3).requires_grad_(), "grad", t(b, 3)),
        "assigned grad has data of a different type",
        "gradient",
    ),
    (
        "root",
        lambda a, b: (t(a, 3).requires_grad_() * 2).backward(t(b, 3)),
        "invalid gradient at index 0 - expected type torch.LTensor but got torch.HTensor",
        "gradient",
    ),
    (
        "root-index",
        lambda a, b: torch.autograd.backward(
            [t(a, 3).requires_grad_() * 2, t(b, 3).requires_grad_() * 2], [t(a, 3), t(a, 3)]
        ),
        "invalid gradient at index 1 - expected type torch.HTensor but got torch.LTensor",
        "gradient",
    ),
    (
        "built-in-node",
        lambda a, b: (t(a, 3).requires_grad_() * t(b).requires_grad_()).sum().backward(),
        "Function MulBackward0 returned an invalid gradient at index 1 - "
        "expected type torch.HTensor but got torch.LTensor",
        "gradient",
    ),
    (
        "built-in-node-in-place",
        lambda a, b: (t(a, 3).requires_grad_() * 1).div_(t(b).requires_grad_()).sum().backward(),
        "Function DivBackward0 returned an invalid gradient at index 1 - "
        "expected type torch.HTensor but got torch.LTensor",
        "gradient",
    ),
    (
        "built-in-node-0dim",
        lambda a, b: (t(a).requires_grad_() + t(b).requires_grad_()).backward(),
        "Function AddBackward0 returned an invalid gradient at index 0 - "
        "expected type torch.LTensor but got torch.HTensor",
        "gradient",
    ),
    (
        "function",
        lambda a, b: _through_function(a, t(b, 3)),
        "Function GiveBackward returned an invalid gradient at index 0 - "
        "expected type torch.LTensor but got torch.HTensor",
        "gradient",
    ),
]


class Give(torch.autograd.Function):
    """Returns the gradients that it was given, for its first and third argument."""

    @staticmethod
    def forward(ctx, x, number, y, first, second):
        ctx.answer = first, None, second, None, None
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return ctx.answer


def _through_function(dtype, first, second=None, other=f32):
    x, y = t(dtype, 3).requires_grad_(), t(other, 3).requires_grad_()
    Give.apply(x, 7, y, first, second).sum().backward()
    return x.grad


def _backward_through_hook(dtype, hook):
    x = t(dtype, 3).requires_grad_()
    x.register_hook(hook)
    (x * 2).sum().backward()


def _names(message: str, low: str, high: str) -> str:
    """A row's message with the dtypes' names filled in."""
    words = message.replace("torch.LTensor", f"torch.{low}Tensor")
    words = words.replace("torch.HTensor", f"torch.{high}Tensor").split(" ")
    return " ".join({"L": low, "H": high}.get(word, word) for word in words)


@pytest.mark.parametrize(
    ("run", "message", "rule"), [row[1:] for row in MIXED], ids=[row[0] for row in MIXED]
)
def test_mixed_dtypes_raise_what_torch_12_raised(run, message, rule):
    with torch12_rules(), pytest.raises(RuntimeError) as caught:
        run(f32, f64)
    assert str(caught.value) == _names(message, "Float", "Double")
    assert isinstance(caught.value, Torch12RuleError)
    if rule:
        assert caught.value.violation.rule == rule


CONVOLUTIONS = [
    (F.conv1d, (1, 1, 3), (1, 1, 3)),
    (F.conv2d, (1, 1, 3, 3), (1, 1, 3, 3)),
    (F.conv3d, (1, 1, 3, 3, 3), (1, 1, 3, 3, 3)),
    (F.conv_transpose1d, (1, 1, 3), (1, 1, 3)),
    (F.conv_transpose2d, (1, 1, 3, 3), (1, 1, 3, 3)),
    (F.conv_transpose3d, (1, 1, 3, 3, 3), (1, 1, 3, 3, 3)),
]


@pytest.mark.parametrize(("convolve", "x", "weight"), CONVOLUTIONS)
def test_every_convolution_in_cudnns_words(convolve, x, weight):
    """On its CPU torch 1.2 had other words for conv3d and the transposed ones; cuDNN had these."""
    words = r"Input type \(torch.HalfTensor\) and {} type \(torch.FloatTensor\) should be the same"
    with torch12_rules():
        with pytest.raises(Torch12RuleError, match=words.format("weight")):
            convolve(t(f16, *x), t(f32, *weight))
        with pytest.raises(Torch12RuleError, match=words.format("bias")):
            convolve(t(f16, *x), t(f16, *weight), t(f32, 1))


def test_foreach_is_its_rows():
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        torch._foreach_add_([t(f16, 3), t(f16, 3)], [t(f16, 3), t(f32, 3)])
    assert str(caught.value) == output_mismatch("Half", "Float")


@pytest.mark.parametrize(("low", "name"), [(f16, "Half"), (bf16, "BFloat16")])
@pytest.mark.parametrize(("run", "message"), [row[1:3] for row in MIXED], ids=[r[0] for r in MIXED])
def test_half_obeys_the_same_rule(run, message, low, name):
    with torch12_rules(), pytest.raises(RuntimeError) as caught:
        run(low, f32)
    assert str(caught.value) == _names(message, name, "Float")


def test_a_hook_that_changes_the_dtype():
    def myhook(grad):
        return grad.double()

    # seen on torch 1.2.0+cpu
    words = r"hook 'myhook' has changed the type of value \(was torch.FloatTensor got torch.Double"
    with torch12_rules(), pytest.raises(RuntimeError, match=words):
        _backward_through_hook(f32, myhook)


# Seen on torch 1.2.0+cpu: (operation, result dtype, first value). Today's torch promotes or
# refuses each of them.
KEPT = [
    ("int-plus-float-0dim", lambda: t(i64, 3) + torch.tensor(2.5), i64, 4),
    ("int-times-number", lambda: t(i64, 3) * 2.5, i64, 4),
    ("number-minus-int", lambda: 2.5 - t(i64, 3), i64, 0),
    ("int-0dim-times-number", lambda: t(i64) * 2.5, i64, 4),
    ("int-divided", lambda: torch.tensor([-5, 5]) / torch.tensor([2, 2]), i64, -2),
    ("int-divided-by-number", lambda: torch.tensor([7]) / 2, i64, 3),
    ("number-divided-by-int", lambda: 5 / t(i64, 3), i64, 2),
    ("number-to-the-int", lambda: 2.5 ** t(i64, 3), i64, 4),
    ("int-to-the-number", lambda: t(i64, 3) ** 2.5, i64, 4),
    ("int-mul_-number", lambda: t(i64, 3).mul_(2.5), i64, 4),
    ("int-add_-0dim", lambda: t(i64, 3).add_(torch.tensor(2.5)), i64, 4),
    ("int-div_", lambda: torch.tensor([7, 7]).div_(t(i64, 2)), i64, 3),
    ("alpha", lambda: torch.add(t(i64, 3), t(i64, 3), alpha=2.5), i64, 6),
    ("bool-plus-number", lambda: t(torch.bool, 3) + 2.5, torch.bool, True),
    ("clamp", lambda: t(i64, 3).clamp(2.5, 3), i64, 2),
    ("compared-with-number", lambda: t(i64, 3) == 2.5, torch.bool, True),
    ("masked_fill", lambda: t(i64, 3).masked_fill(t(i64, 3) > 1, torch.tensor(3.5)), i64, 3),
    ("index_put-0dim", lambda: t(f32, 3).index_put_((t(i64, 1),), t(f64) + 1), f32, 2),
    ("lerp-0dim", lambda: torch.lerp(t(f32, 3), torch.tensor(4.0, dtype=f64), 0.5), f32, 3),
    ("0dim-promotes-0dim", lambda: t(f32) + t(f64), f64, 4),
    ("0dim-does-not-promote", lambda: t(f32, 3) * t(f64), f32, 4),
    ("copy_", lambda: t(f32, 3).copy_(t(f64, 3)), f32, 2),
    ("setitem", lambda: _set(t(i64, 3), t(f32, 3)), i64, 2),
]


def _set(target, values):
    target[:] = values
    return target


@pytest.mark.parametrize(("run", "dtype", "value"), [r[1:] for r in KEPT], ids=[r[0] for r in KEPT])
def test_what_torch_12_allowed_keeps_its_dtype(run, dtype, value):
    with torch12_rules():
        result = run()
    assert result.dtype == dtype
    assert result.reshape(-1)[0].item() == value


# Seen on torch 1.2.0+cpu.
FLOATING_ONLY = [
    ("mean", "Can only calculate the mean of floating types. Got Long instead."),
    ("exp", "exp_vml_cpu not implemented for 'Long'"),
    ("sigmoid", "\"sigmoid_cpu\" not implemented for 'Long'"),
    ("std", "std only supports floating-point dtypes"),
]


@pytest.mark.parametrize(("name", "message"), FLOATING_ONLY)
def test_integers_are_refused_where_they_would_become_floating(name, message):
    with torch12_rules(), pytest.raises(Torch12RuleError) as caught:
        getattr(torch, name)(t(i64, 3))
    assert str(caught.value) == message


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_takes_half_with_float32(dtype, training):
    x = torch.randn(4, 3, 2, 2).to(dtype).requires_grad_()
    weight = torch.ones(3, requires_grad=True)
    statistics = torch.zeros(3), torch.ones(3)
    with torch12_rules():
        y = F.batch_norm(x, *statistics, weight, torch.zeros(3), training=training)
        y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert weight.grad.dtype == f32


def test_batch_norm_refuses_half_parameters_with_float32_statistics():
    with torch12_rules(), pytest.raises(Torch12RuleError, match="expected scalar type Half but f"):
        F.batch_norm(t(f16, 2, 3), t(f32, 3), t(f32, 3), t(f16, 3), t(f16, 3))


# Seen on torch 1.2.0+cpu: first and second gradient of a Function of two float32 inputs.
GRADIENTS = [
    # shape is checked before dtype
    (t(f64, 2), None, "index 0 - got [2] but expected shape compatible with [3]"),
    # ... one gradient after the other
    (t(f64, 3), t(f32, 2), "index 0 - expected type torch.FloatTensor but got torch.DoubleTensor"),
    (t(f32, 3), t(f64, 3), "index 1 - expected type torch.FloatTensor but got torch.DoubleTensor"),
    # a gradient that must be summed down is expandable, so its dtype is looked at
    (t(f64, 2, 3), None, "index 0 - expected type torch.FloatTensor but got torch.DoubleTensor"),
    (t(i64, 3), None, "index 0 - expected type torch.FloatTensor but got torch.LongTensor"),
]


@pytest.mark.parametrize(("first", "second", "end"), GRADIENTS)
def test_gradients_of_a_function(first, second, end):
    with torch12_rules(), pytest.raises(RuntimeError) as caught:
        _through_function(f32, first, second)
    assert str(caught.value) == f"Function GiveBackward returned an invalid gradient at {end}"


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.double(),
        lambda x: torch.zeros(3, dtype=f64).copy_(x),
        lambda x: torch.sum(x, dtype=f64),
        lambda x: torch.mean(x, dtype=f64),
        lambda x: torch.prod(x, dtype=f64),
        lambda x: torch.cumsum(x, 0, dtype=f64),
        lambda x: torch.softmax(x, 0, dtype=f64),
        lambda x: torch.norm(x, p=2, dim=0, dtype=f64),
    ],
)
def test_explicit_conversions_pass_in_both_directions(forward):
    x = t(f32, 3).requires_grad_()
    with torch12_rules():
        y = forward(x)
        assert y.dtype == f64
        y.sum().backward()
    assert x.grad.dtype == f32


def test_what_is_out_of_reach_keeps_todays_dtype():
    # torch 1.2 gave int64; autograd has decided before the rules are asked
    with torch12_rules():
        assert (t(i64, 3) * t(f32).requires_grad_()).dtype == f32


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_numbers_that_no_integer_holds_keep_the_dtype(number):
    """Torch 1.2 gave int64; what C++ makes of the number is the processor's business."""
    with torch12_rules():
        assert (t(i64, 3) + number).dtype is i64
        assert (t(i64, 3) * number).dtype is i64


def test_full_gives_the_default_dtype():
    with torch12_rules():
        assert torch.full((3,), 1).dtype is f32
        assert torch.full((3,), True).dtype is f32
        assert torch.full((3,), 1, dtype=i64).dtype is i64
        assert (torch.full((3,), 2) * t(f32, 3)).dtype is f32
