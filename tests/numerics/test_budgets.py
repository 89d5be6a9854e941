"""The budgets hold for careful arithmetic, and break for careless arithmetic."""

import itertools

import pytest
import torch

from syncbn_lab import oracle
from syncbn_lab.numerics.budgets import batch_norm_budgets, compute_dtype, with_rounding
from syncbn_lab.numerics.formats import dtype_name, ulp

EPS = 1e-5
CHANNELS = 4
RESULTS = ("mean", "var", "y", "dx", "dweight", "dbias")


def two_pass(x):
    mean = x.mean(0)
    return mean, (x - mean).square().mean(0)


def naive(x):
    """E[x²] − E[x]²."""
    mean = x.mean(0)
    return mean, x.square().mean(0) - mean.square()


def in_half(x):
    """Two passes whose two results are kept in float16."""
    mean = x.mean(0).half().float()
    return mean, (x - mean).square().mean(0).half().float()


def layer(x, weight, bias, dy, statistics=two_pass, fused=False):
    """Batch norm of a (N, C) input in the arithmetic that belongs to its dtype, unrounded."""
    arithmetic = compute_dtype(x.dtype)
    x, dy, n = x.to(arithmetic), dy.to(arithmetic), len(x)
    w = torch.ones_like(x[0]) if weight is None else weight.to(arithmetic)
    b = torch.zeros_like(x[0]) if bias is None else bias.to(arithmetic)
    mean, var = statistics(x)
    scale = 1 / torch.sqrt(var + EPS)
    xhat = (x - mean) * scale
    y = x * (w * scale) + (b - mean * w * scale) if fused else xhat * w + b
    dbias, dweight = dy.sum(0), (dy * xhat).sum(0)
    dx = w * scale * (dy - dbias / n - xhat * (dweight / n))
    return {"mean": mean, "var": var, "y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def draw(seed, n, dtype, ratio=0.0, deviation=1.0, affine=True):
    """Return x, weight, bias and grad_output, x with mean/deviation = ratio."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, dy = (ratio + normal(n, CHANNELS)) * deviation, normal(n, CHANNELS)
    arithmetic = compute_dtype(dtype)
    weight, bias = normal(CHANNELS).to(arithmetic), normal(CHANNELS).to(arithmetic)
    return x.to(dtype), weight if affine else None, bias if affine else None, dy.to(dtype)


def derive(x, weight, bias, dy):
    """Return the reference and the budget of each result."""
    reference = oracle.batch_norm([x], weight, bias, eps=EPS, grad_output=[dy])
    budgets = batch_norm_budgets([x], weight, bias, EPS, reference, [dy])

    def by_name(found):
        values = {name: getattr(found, name) for name in RESULTS}
        return {name: v[0] if isinstance(v, list) else v for name, v in values.items()}

    return by_name(reference), by_name(budgets)


def shares(results, reference, budgets):
    """Largest error of each result over its budget; a zero error needs no budget."""
    found = {}
    for name in RESULTS:
        error = (results[name].double() - reference[name]).abs()
        found[name] = float(torch.where(error == 0, 0.0, error / budgets[name]).max())
    return found


# ---------------------------------------------------------------- they hold

SIZES = [
    2,  # the fewest: a bound on the sum has least room, 3u
    10,  # no power of two, so the mean is rounded
    1000,  # a small layer
    65536,  # a sum long enough for its depth to count
]
RATIOS = [
    0,  # as after a convolution
    1,  # as after a ReLU
    30,  # raw pixels are at about 2; a bad layer
    1000,  # float32 alone: coarser inputs no longer resolve the deviation
]
DEVIATIONS = [
    1e-3,  # variance 1e-6, below eps
    1.0,
    1e3,  # variance 1e6; large float16 values
]


def grid(dtype):
    for n, ratio, deviation in itertools.product(SIZES, RATIOS, DEVIATIONS):
        coarse = dtype in (torch.float16, torch.bfloat16)
        if coarse and ratio == 1000:
            continue
        if dtype == torch.float16 and (ratio + 5) * deviation > 65504:
            continue
        if n == 65536 and deviation != 1:
            continue  # slow, and a scale changes no depth
        yield n, ratio, deviation


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,  # few bits: sums of equal values, exact ties
        torch.bfloat16,  # fewest bits, float32's range
        torch.float32,  # input and arithmetic alike
        torch.float64,  # the reference is no more exact than the layer
    ],
    ids=dtype_name,
)
def test_careful_arithmetic_stays_within(dtype, fused):
    for n, ratio, deviation in grid(dtype):
        for seed, affine in itertools.product(range(1 if n == 65536 else 3), (True, False)):
            given = draw(seed, n, dtype, ratio, deviation, affine)
            reference, budgets = derive(*given)
            found = shares(layer(*given, fused=fused), reference, budgets)
            where = f"n {n}, mean/std {ratio}, std {deviation}, seed {seed}, affine {affine}"
            assert max(found.values()) <= 1, f"{where}: {found}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
def test_a_rounded_result_needs_half_an_ulp_more(dtype):
    given = draw(0, 1000, dtype, ratio=1)
    reference, budgets = derive(*given)
    results = layer(*given)
    for name in ("y", "dx"):
        rounded = results[name].to(dtype).double()
        error = (rounded - reference[name]).abs()
        assert (error <= with_rounding(budgets[name], reference[name], dtype)).all()
        # Of 4000 values the worst rounding comes near half an ulp: the term is no more than due.
        assert float((error / ulp(reference[name], dtype)).max()) > 0.49


@pytest.mark.parametrize("value", [1 / 3, 300.1, 1000.7])  # small, and with errors beyond eps
@pytest.mark.parametrize("n", [10, 1000])  # sums that round
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_name)
def test_a_constant_channel(dtype, n, value):
    # Variance 0: the variance found is the square of the mean's error, and eps decides. xhat
    # is 0, the xhat found is the mean's error times 316, and dx has the product of two of them.
    x = torch.full((n, CHANNELS), value).to(dtype)
    given = (x, *draw(0, n, dtype)[1:])
    reference, budgets = derive(*given)
    assert reference["var"].tolist() == [0] * CHANNELS
    assert max(shares(layer(*given), reference, budgets).values()) <= 1


@pytest.mark.parametrize(
    "fused",
    [
        False,
        True,  # x·scale and mean·scale are a thousand times their difference
    ],
)
def test_eval_has_no_statistics_to_get_wrong(fused):
    x, weight, bias, dy = draw(0, 1000, torch.float32, ratio=1000)
    mean, var = x.mean(0), x.var(0)
    reference = oracle.batch_norm(
        [x],
        weight,
        bias,
        running_mean=mean,
        running_var=var,
        training=False,
        eps=EPS,
        grad_output=[dy],
    )
    budgets = batch_norm_budgets([x], weight, bias, EPS, reference, [dy])
    assert budgets.mean.tolist() == budgets.var.tolist() == [0] * CHANNELS
    scale = 1 / torch.sqrt(var + EPS)
    y = (x - mean) * scale * weight + bias
    if fused:
        y = x * (weight * scale) + (bias - mean * weight * scale)
    dx = dy * (weight * scale)
    for ours, expected, budget in ((y, reference.y, budgets.y), (dx, reference.dx, budgets.dx)):
        assert ((ours.double() - expected[0]).abs() <= budget[0]).all()
    # dx is a product of three factors, whatever the mean: a few u, where a backward pass
    # through batch statistics this far from zero is allowed thousands.
    assert float((budgets.dx[0] / reference.dx[0].abs()).max()) < 16 * 2.0**-24


# ---------------------------------------------------------------- they mean something


@pytest.mark.parametrize("n", [10, 1000, 65536])  # short to long: no length hides it
def test_naive_variance_leaves_at_once_far_from_zero(n):
    given = draw(0, n, torch.float32, ratio=1000)
    reference, budgets = derive(*given)
    # mean² is 1e6 variances and float32 keeps 6e-8 of it: 6 % of the variance is lost.
    found = shares(layer(*given, statistics=naive), reference, budgets)
    assert found["var"] > 100
    assert found["y"] > 1


def test_naive_variance_is_as_good_around_zero():
    given = draw(0, 1000, torch.float32)
    assert shares(layer(*given, statistics=naive), *derive(*given))["var"] <= 1


@pytest.mark.parametrize("ratio", [0, 1, 30])  # wherever the data lies
@pytest.mark.parametrize("n", [2, 1000])  # the fewest values, and a small layer
def test_half_statistics_leave_at_once(n, ratio):
    given = draw(0, n, torch.float16, ratio)
    found = shares(layer(*given, statistics=in_half), *derive(*given))
    assert found["var"] > 10
    assert found["y"] > 10


@pytest.mark.parametrize("forgotten", ["mean", "both"])  # the two terms that couple the batch
def test_a_backward_pass_without_its_means_leaves(forgotten):
    x, weight, bias, dy = draw(0, 1000, torch.float32)
    reference, budgets = derive(x, weight, bias, dy)
    results = layer(x, weight, bias, dy)
    scale = 1 / torch.sqrt(results["var"] + EPS)
    xhat = (x - results["mean"]) * scale
    wrong = dy - (0 if forgotten == "both" else xhat * (dy * xhat).mean(0))
    results["dx"] = weight * scale * wrong
    assert shares(results, reference, budgets)["dx"] > 1000


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        pytest.param(10, torch.float32, id="short"),  # ten float16 values add up exactly
        pytest.param(1000, torch.float16, id="half"),
        pytest.param(1000, torch.float32, id="single"),
        pytest.param(65536, torch.float32, id="long"),  # roundings average out
    ],
)
def test_budgets_are_not_slack(n, dtype):
    # A loss of y²/2: grad_output is y, whose mean is the bias. A long sum of numbers that
    # cancel, such as noise, comes out far better than any bound on the sum of magnitudes says.
    x, weight, _, _ = draw(0, n, dtype, ratio=1)
    bias = torch.ones(CHANNELS)
    dy = oracle.batch_norm(x, weight, bias, eps=EPS).y.to(dtype)
    reference, budgets = derive(x, weight, bias, dy)
    found = shares(layer(x, weight, bias, dy), reference, budgets)
    assert min(found.values()) > 1e-3, found


def test_ranks_share_one_derivation():
    x, weight, bias, dy = draw(0, 10, torch.float32, ratio=1)
    _, whole = derive(x, weight, bias, dy)
    sizes = (3, 0, 7)  # uneven, with an empty rank
    xs, dys = list(x.split(sizes)), list(dy.split(sizes))
    reference = oracle.batch_norm(xs, weight, bias, eps=EPS, grad_output=dys)
    split = batch_norm_budgets(xs, weight, bias, EPS, reference, dys)
    for name in ("y", "dx"):
        torch.testing.assert_close(torch.cat(getattr(split, name)), whole[name])
    torch.testing.assert_close(torch.stack(split.dbias).sum(0), whole["dbias"])
    assert split.dbias[1].tolist() == [0] * CHANNELS


def test_scales_are_what_was_added_up():
    # Two values, one channel: xhat = −1, 1 (eps 0), w = 3, dy = 1, −2.
    x, dy = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.0], [-2.0]])
    weight = torch.tensor([3.0])
    reference = oracle.batch_norm([x], weight, eps=0.0, grad_output=[dy])
    scales = batch_norm_budgets([x], weight, None, 0.0, reference, [dy]).scales
    assert {name: float(value) for name, value in scales.items()} == {
        "mean": 3,  # max |x|
        "var": 1,  # the variance itself, plus eps
        "y": 3,  # max |y|
        "dx": 6,  # |w|·scale·max |dy|
        "dweight": 3,  # sum |dy·xhat|
        "dbias": 3,  # sum |dy|
    }
