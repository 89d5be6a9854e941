"""The verdict on constructed records: one fault each, from a layer that is right otherwise."""

import json

import pytest
import torch

from syncbn_lab import oracle
from syncbn_lab.layers import LayerRecord
from syncbn_lab.numerics.formats import dtype_name, ulp
from syncbn_lab.verdict import Comparison, compare_layer, judge

CHANNELS = 4


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def right_ranks(sizes=(8,), dtype=torch.float16, *, x=None, dy=None, name="bn", **fields):
    """Records of a layer that rounds the exact results, one per rank; parameters are float32."""
    total = sum(sizes)
    x = normal(total, CHANNELS, 3, 3) if x is None else x
    dy = normal(*x.shape, seed=1) if dy is None else dy
    x, dy = x.to(dtype), dy.to(dtype)
    kept = torch.promote_types(dtype, torch.float32)
    channels = x.shape[1]
    given = {
        "eps": 1e-5,
        "momentum": 0.1,
        "training": True,
        "weight": (1 + 0.1 * normal(channels, seed=2)).to(kept),
        "bias": normal(channels, seed=3).to(kept),
        "running_mean_before": torch.zeros(channels, dtype=kept),
        "running_var_before": torch.ones(channels, dtype=kept),
        "num_batches_tracked": 0,
    } | fields
    xs, dys = list(x.split(sizes)), list(dy.split(sizes))
    exact = oracle.batch_norm(
        xs,
        given["weight"],
        given["bias"],
        running_mean=given["running_mean_before"],
        running_var=given["running_var_before"],
        training=given["training"],
        momentum=given["momentum"],
        eps=given["eps"],
        grad_output=dys,
        num_batches_tracked=given["num_batches_tracked"],
    )

    def rounded(value, like):
        return None if like is None else value.to(like.dtype)

    return [
        LayerRecord(
            name=name,
            x=xs[rank],
            y=exact.y[rank].to(dtype).contiguous(),
            dy=dys[rank],
            dx=exact.dx[rank].to(dtype).contiguous(),
            dweight=rounded(exact.dweight[rank], given["weight"]),
            dbias=rounded(exact.dbias[rank], given["bias"]),
            running_mean=rounded(exact.running_mean, given["running_mean_before"]),
            running_var=rounded(exact.running_var, given["running_var_before"]),
            **given,
        )
        for rank in range(len(sizes))
    ]


def right_record(dtype=torch.float16, **fields):
    (record,) = right_ranks(dtype=dtype, **fields)
    return record


def judge_one(record):
    """Judge a single layer on a single rank: verdict and findings."""
    found = judge([[record]])
    return found["verdict"], found["findings"]


def changed(record, **fields):
    return LayerRecord(**{**vars(record), **fields})


# ---------------------------------------------------------------- right


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64],  # all that is supported
    ids=dtype_name,
)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="train"),
        pytest.param({"training": False}, id="eval"),
        pytest.param({"weight": None, "bias": None}, id="no affine"),
        pytest.param({"momentum": None, "num_batches_tracked": 4}, id="cumulative"),
    ],
)
def test_exact_results_are_right(dtype, fields):
    found = judge([[right_record(dtype, **fields)]])
    assert (found["verdict"], found["findings"]) == ("right", [])
    (layer,) = found["layers"]
    assert (layer["name"], layer["count"], layer["verdict"]) == ("bn", 8 * 3 * 3, "right")
    affine = [] if "weight" in fields else ["weight.grad", "bias.grad"]
    assert [comparison["quantity"] for comparison in layer["comparisons"]] == [
        "y",
        "dx",
        *affine,
        "running_mean",
        "running_var",
    ]


def test_torch_s_own_layer_is_right():
    # Not the reference rounded, but independent float32 arithmetic on float16 input.
    record = right_record()
    x = record.x.clone().requires_grad_()
    layer = torch.nn.BatchNorm2d(CHANNELS)
    with torch.no_grad():
        layer.weight.copy_(record.weight)
        layer.bias.copy_(record.bias)
    y = layer(x)
    y.backward(record.dy)
    record = changed(
        record,
        y=y.detach(),
        dx=x.grad,
        dweight=layer.weight.grad,
        dbias=layer.bias.grad,
        running_mean=layer.running_mean,
        running_var=layer.running_var,
    )
    assert judge_one(record) == ("right", [])


def test_the_result_is_plain_data():
    found = judge([[right_record()]])
    assert json.loads(json.dumps(found)) == found


def test_without_gradients_the_forward_is_judged():
    record = changed(right_record(), dy=None, dx=None, dweight=None, dbias=None)
    assert [c.quantity for c in compare_layer([record])] == ["y", "running_mean", "running_var"]
    assert judge_one(record) == ("right", [])


# ---------------------------------------------------------------- one unit in the last place


@pytest.mark.parametrize("quantity", ["y", "dx"])  # both are rounded to float16
@pytest.mark.parametrize("steps", [-1, 1])  # the neighbour below, the neighbour above
def test_a_float16_neighbour_is_one_too_far(quantity, steps):
    # The exact result rounded is right; its neighbours lie half to one and a half ulp off, and
    # the budget beyond half an ulp is some 1e-3 ulp. Every value but the near ties tells.
    record = right_record()
    assert judge_one(record)[0] == "right"
    value = getattr(record, quantity)
    moved = torch.nextafter(value, torch.full_like(value, steps * torch.inf))
    verdict, findings = judge_one(changed(record, **{quantity: moved}))
    assert verdict == "degraded"
    assert len(findings) == 1
    assert findings[0].startswith(f"bn: {quantity} is off by 1.")  # 1.0 to 1.5 ulp
    assert "float16 ulp" in findings[0]


def test_one_value_one_ulp_off_among_many_is_found():
    record = right_record()
    exact = oracle.batch_norm(record.x, record.weight, record.bias).y
    # Of some hundred large values, the one that float16 hits best, to about a hundredth of an
    # ulp: its neighbour is a whole ulp off.
    error = (record.y.double() - exact).abs()
    place = torch.where(exact.abs() > 1, error, torch.inf).flatten().argmin()
    moved = record.y.clone()
    moved.view(-1)[place] += float(ulp(exact.flatten()[place], torch.float16))
    (comparison, *_) = compare_layer([changed(record, y=moved)])
    assert comparison.verdict == "degraded"
    assert comparison.worst_ulp == pytest.approx(1, abs=0.03)
    assert comparison.budget_share == pytest.approx(2, abs=0.06)  # the budget is half an ulp


# ---------------------------------------------------------------- dtypes


def test_a_float32_output_where_float16_belongs():
    record = right_record()
    verdict, findings = judge_one(changed(record, y=record.y.float()))
    assert verdict == "degraded"
    assert findings == ["bn: y is float32 where float16 belongs"]


def test_a_wrong_dtype_is_not_held_to_its_own_precision():
    # Float32 gradients of float16 weights with float16's error: one fault, not two.
    record = right_record(weight=torch.ones(CHANNELS).half(), bias=torch.zeros(CHANNELS).half())
    verdict, findings = judge_one(changed(record, dweight=record.dweight.float()))
    assert verdict == "degraded"
    assert findings == ["bn: weight.grad is float32 where float16 belongs"]


def test_half_running_statistics_where_float32_belongs():
    record = right_record()
    verdict, findings = judge_one(changed(record, running_var=record.running_var.half()))
    assert verdict == "degraded"
    assert findings == ["bn: running_var is float16 where float32 belongs"]


def test_the_rank_with_the_other_dtype_is_named():
    first, second = right_ranks((4, 4))
    found = judge([[first], [changed(second, y=second.y.float())]])
    assert found["findings"] == ["bn: y is float32 where float16 belongs"]


# ---------------------------------------------------------------- degraded or wrong

SHARES = [
    pytest.param(0.2, "wrong", id="20 %"),
    pytest.param(0.11, "wrong", id="just above a tenth"),
    pytest.param(0.09, "degraded", id="just below a tenth"),
]


@pytest.mark.parametrize(("share", "expected"), SHARES)
@pytest.mark.parametrize("quantity", ["y", "dx", "running_mean", "running_var"])
def test_a_relative_error_in_one_channel(quantity, share, expected):
    record = right_record(torch.float32)
    # The scale of each: max |y|; |w|·scale·max |dy|; what was added up for the statistics.
    exact = oracle.batch_norm(record.x, record.weight, record.bias)
    scale = {
        "y": exact.y[:, 1].abs().max(),
        "dx": record.weight[1].abs() / (exact.var[1] + 1e-5).sqrt() * record.dy[:, 1].abs().max(),
        "running_mean": 0.1 * exact.mean[1].abs(),
        "running_var": 0.9 + 0.1 * exact.var[1] * 72 / 71,
    }[quantity]
    value = getattr(record, quantity).clone()
    (value[:, 1] if value.ndim > 1 else value[1:2]).add_(share * scale)
    verdict, findings = judge_one(changed(record, **{quantity: value}))
    assert verdict == expected
    assert len(findings) == 1
    assert findings[0].startswith(f"bn: {quantity} is off by")
    assert findings[0].endswith(f"{share:.2g} of the channel's scale")


def test_the_mean_of_ranks_instead_of_the_group():
    # Zeros on one rank and ones on the other, 2 and 6 of them: each rank's own mean is 0 or 1,
    # the group's 3/4. Batch norm that does not synchronize gives zeros.
    x = torch.cat([torch.zeros(2, 1, 1, 1), torch.ones(6, 1, 1, 1)])
    first, second = right_ranks((2, 6), torch.float32, x=x)
    found = judge([[changed(r, y=r.bias.reshape(1, 1, 1, 1) + 0 * r.x)] for r in (first, second)])
    assert found["verdict"] == "wrong"
    assert found["layers"][0]["count"] == 8


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("quantity", ["y", "dx", "dweight", "dbias", "running_mean"])
def test_a_value_that_is_not_finite_is_wrong(quantity, value):
    record = right_record()
    broken = getattr(record, quantity).clone()
    broken.view(-1)[-1] = value
    verdict, findings = judge_one(changed(record, **{quantity: broken}))
    assert verdict == "wrong"
    assert len(findings) == 1
    assert findings[0].endswith("is not finite where the reference is")


# ---------------------------------------------------------------- what is not to be blamed


def overflowing(**fields):
    """A layer whose weight carries y beyond float16, both signs: |xhat| > 1 does it."""
    return right_record(weight=torch.full((CHANNELS,), 6e4), **fields)


def test_an_overflow_that_the_dtype_cannot_hold_is_right():
    record = overflowing()
    assert record.y.isinf().any()
    assert record.y.isfinite().any()
    assert judge_one(record) == ("right", [])


@pytest.mark.parametrize(
    "instead",
    [
        torch.nan,  # what inf − inf on the way would leave
        0.0,
    ],
)
def test_an_overflow_excuses_nothing_but_its_infinity(instead):
    record = overflowing()
    y = torch.where(record.y.isinf(), instead, record.y)
    assert judge_one(changed(record, y=y))[0] == "wrong"
    assert judge_one(changed(record, y=torch.where(record.y.isinf(), -record.y, record.y)))[0] == (
        "wrong"
    )


def test_an_overflow_of_the_wrong_dtype_is_wrong():
    # Float32 belongs there and could hold it.
    record = overflowing()
    record = changed(record, x=record.x.float())
    exact = oracle.batch_norm(record.x, record.weight, record.bias).y
    verdict, findings = judge_one(changed(record, y=exact.half()))
    assert verdict == "wrong"
    assert findings[0] == (
        "bn: y is float16 where float32 belongs and is not finite where the reference is"
    )


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        # 65504 is float16's largest number, and from 65520 on rounding gives infinity.
        pytest.param(65519.0, "wrong", id="rounds to the largest number"),
        pytest.param(65520.0, "right", id="rounds to infinity"),
    ],
)
def test_where_float16_ends(bias, expected):
    # A weight of 0 leaves the bias alone.
    record = right_record(weight=torch.zeros(CHANNELS), bias=torch.full((CHANNELS,), bias))
    y = torch.full_like(record.y, torch.inf)
    assert judge_one(changed(record, y=y))[0] == expected


@pytest.mark.parametrize("value", [0.125, 1 / 3])  # sums that are exact, and sums that are not
def test_gradients_that_cancel_are_not_wrong(value):
    # A constant dy: dx is 0 but for rounding, and every error is infinite beside it.
    record = right_record(torch.float32, dy=torch.full((8, CHANNELS, 3, 3), value))
    x = record.x.clone().requires_grad_()
    weight, bias = (t.clone().requires_grad_() for t in (record.weight, record.bias))
    torch.nn.functional.batch_norm(x, None, None, weight, bias, True).backward(record.dy)
    record = changed(record, dx=x.grad, dweight=weight.grad, dbias=bias.grad)
    assert judge_one(record) == ("right", [])
    # Far outside its budget, and still small beside what cancelled: not wrong.
    verdict, _ = judge_one(changed(record, dx=x.grad + 1e-3 * value))
    assert verdict == "degraded"


@pytest.mark.parametrize("value", [0.0, 300.0])  # a dead channel, and a constant far from zero
def test_a_constant_channel_is_not_wrong(value):
    x = normal(8, CHANNELS, 3, 3)
    x[:, 1] = value
    record = right_record(torch.float32, x=x, bias=torch.zeros(CHANNELS))
    y = torch.nn.functional.batch_norm(record.x, None, None, record.weight, record.bias, True)
    assert judge_one(changed(record, y=y)) == ("right", [])


# ---------------------------------------------------------------- what cannot be judged


def test_an_infinite_input_poisons_its_channel_and_nothing_else():
    # One inf in channel 1 of 1×4×20×20: torch's own running statistics become inf and NaN there,
    # 0.1 and 0.9 elsewhere.
    x = torch.ones(1, CHANNELS, 20, 20)
    x[0, 1, 0, 0] = torch.inf
    layer = torch.nn.BatchNorm2d(CHANNELS)
    record = right_record(
        torch.float32, x=x, sizes=(1,), weight=torch.ones(CHANNELS), bias=torch.zeros(CHANNELS)
    )
    leaf = record.x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(record.dy)
    record = changed(
        record,
        y=y.detach(),
        dx=leaf.grad,
        dweight=layer.weight.grad,
        dbias=layer.bias.grad,
        running_mean=layer.running_mean,
        running_var=layer.running_var,
    )
    verdict, findings = judge_one(record)
    assert verdict == "not judged"  # never green by itself
    # All but bias.grad: sum(dy) does not feel the input.
    quantities = ["dx", "running_mean", "running_var", "weight.grad", "y"]
    why = "can't be judged in 1 of 4 channels: what the layer was given is not finite there"
    assert sorted(findings) == [f"bn: {quantity} {why}" for quantity in quantities]
    # What lies in the other channels still counts.
    broken = record.running_mean.clone()
    broken[2] = 0.3
    verdict, findings = judge_one(changed(record, running_mean=broken))
    assert verdict == "wrong"
    assert findings[0].startswith("bn: running_mean is off by")


def test_an_overflowed_gradient_from_above_is_not_this_layer_s():
    # A loss scale too large: dy has an inf, as in the first step of a dynamic loss scaler.
    record = right_record()
    dy = record.dy.clone()
    dy[0, 2, 0, 0] = torch.inf
    broken = {name: getattr(record, name).clone() for name in ("dx", "dweight", "dbias")}
    broken["dx"][:, 2] = torch.nan
    broken["dweight"][2] = torch.inf
    broken["dbias"][2] = torch.inf
    verdict, findings = judge_one(changed(record, dy=dy, **broken))
    assert verdict == "not judged"
    assert len(findings) == 3
    assert all("can't be judged in 1 of 4 channels" in finding for finding in findings)


# ---------------------------------------------------------------- running statistics and ranks


def test_eval_must_leave_the_statistics_alone():
    record = right_record(training=False)
    assert judge_one(record) == ("right", [])
    moved = torch.nextafter(record.running_var, torch.full((CHANNELS,), torch.inf))
    verdict, findings = judge_one(changed(record, running_var=moved))
    assert verdict == "degraded"
    assert findings[0].startswith("bn: running_var is off by 1 float32 ulp at worst")


def test_biased_variance_in_the_buffer_is_found():
    # Two values: the unbiased variance is twice the biased one.
    record = right_record(torch.float32, x=torch.tensor([[0.0], [2.0]]), sizes=(2,))
    assert record.running_var.tolist() == pytest.approx([0.9 + 0.1 * 2])
    verdict, findings = judge_one(changed(record, running_var=torch.tensor([0.9 + 0.1 * 1])))
    assert verdict == "degraded"  # 0.1 of 1.1
    assert findings[0].startswith("bn: running_var is off by")


def test_float64_statistics_are_held_to_float64():
    record = right_record(torch.float64)
    verdict, _ = judge_one(changed(record, running_mean=record.running_mean.float().double()))
    assert verdict == "degraded"


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((4, 4), id="even"),
        pytest.param((2, 6), id="uneven"),
        pytest.param((0, 8), id="rank 0 empty"),
        pytest.param((3, 0, 5), id="three"),
    ],
)
def test_ranks_that_agree_are_right(sizes):
    found = judge([[record] for record in right_ranks(sizes)])
    assert (found["verdict"], found["findings"]) == ("right", [])
    assert found["layers"][0]["count"] == 8 * 3 * 3


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_a_bit_that_differs_on_rank_1_is_found(name):
    # Within every budget, but the ranks' models part from here.
    first, second = right_ranks((4, 4))
    moved = getattr(second, name).clone()
    moved[3] = torch.nextafter(moved[3], torch.tensor(torch.inf))
    found = judge([[first], [changed(second, **{name: moved})]])
    assert found["verdict"] == "degraded"
    assert found["findings"] == [f"bn: {name} differs between ranks by up to 1 float32 ulp"]
    comparison = {c["quantity"]: c for c in found["layers"][0]["comparisons"]}[name]
    assert comparison["budget_share"] <= 1


def test_ranks_that_began_differently_may_end_differently():
    first, second = right_ranks((4, 4))
    began = {"running_mean_before": second.running_mean_before + 1}
    comparisons = compare_layer([first, changed(second, **began)])
    assert {c.rank_spread for c in comparisons} == {0.0}


def test_statistics_of_one_rank_alone_are_named():
    first, second = right_ranks((4, 4), x=torch.cat([normal(4, 4, 3, 3), normal(4, 4, 3, 3) + 3]))
    own = 0.1 * second.x.double().mean((0, 2, 3))
    found = judge([[first], [changed(second, running_mean=own.float())]])
    assert found["verdict"] == "wrong"
    assert found["findings"][0].startswith("bn: running_mean is off by")
    assert "differs between ranks" in found["findings"][0]


def test_an_error_on_the_last_rank_is_found():
    first, second = right_ranks((4, 4))
    assert judge([[first], [changed(second, y=second.y * 1.5)]])["verdict"] == "wrong"


def test_ranks_with_different_layers_cannot_be_judged():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        judge([[right_record(), right_record()], [right_record()]])


# ---------------------------------------------------------------- the layer's own statistics


def test_inner_statistics_are_shown_and_not_judged():
    record = right_record()
    record = changed(record, batch_mean=torch.ones(CHANNELS).half(), batch_var=torch.ones(CHANNELS))
    found = judge([[record]])
    assert (found["verdict"], found["findings"]) == ("right", [])
    shown = {c["quantity"]: c for c in found["layers"][0]["comparisons"]}
    assert shown["batch mean"]["dtype"] == "float16"
    assert shown["batch mean"]["budget_share"] > 1


# ---------------------------------------------------------------- findings


def test_findings_come_most_serious_first():
    record = right_record()
    y = record.y.clone()
    y[0, 0, 0, 0] = torch.nan
    lost = torch.nextafter(record.dx, torch.full_like(record.dx, torch.inf))
    verdict, findings = judge_one(
        changed(record, y=y, dx=lost, running_mean=record.running_mean.double())
    )
    assert verdict == "wrong"
    # Wrong; then, both degraded, the changed dtype before the lost digit.
    assert [finding.split(" is ")[0] for finding in findings] == [
        "bn: y",
        "bn: running_mean",
        "bn: dx",
    ]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        pytest.param(1, "", id="alone"),
        pytest.param(2, " (and less so in 1 more layer)", id="one more"),
        pytest.param(4, " (and less so in 3 more layers)", id="three more"),
    ],
)
def test_one_sentence_a_quantity_for_its_worst_layer(layers, said):
    step = []
    for i in range(layers):
        record = right_record(torch.float32, name=f"bn{i}")
        # The last but one is the worst, or the only one.
        error = 3e-2 if i == max(layers - 2, 0) else 1e-3
        step.append(changed(record, y=record.y + error))
    found = judge([[*step, right_record(name="fine")]])
    assert [layer["verdict"] for layer in found["layers"]] == ["degraded"] * layers + ["right"]
    (finding,) = found["findings"]
    assert finding.startswith(f"bn{max(layers - 2, 0)}: y is off by")
    assert finding.endswith(f"of the channel's scale{said}")


def test_a_comparison_that_finds_nothing_says_so():
    comparison = Comparison("y", "float16", "float16", 0.0, 0.0, 0.0, 0.0, [0.0])
    assert comparison.sentence("bn") == "bn: y is right"
    assert judge([[]]) == {"verdict": "right", "findings": [], "layers": []}
