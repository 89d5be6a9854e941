"""The float64 reference against torch in float64, and against values that follow by hand."""

import math

import pytest
import torch
from torch import nn

from syncbn_lab import oracle


def column(*values, dtype=torch.float32):
    """One channel, shape (N, 1)."""
    return torch.tensor(values, dtype=dtype)[:, None]


def normal(*shape, seed=0, mean=0.0, deviation=1.0):
    generator = torch.Generator().manual_seed(seed)
    return mean + deviation * torch.randn(shape, generator=generator, dtype=torch.float64)


def assert_close(ours, expected):
    """To a few float64 roundings: both sides are computed in float64."""
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- against torch

SHAPES = [
    pytest.param((7, 3), id="2-D"),  # as after a linear layer; an odd count
    pytest.param((4, 3, 5), id="3-D"),  # BatchNorm1d over a sequence
    pytest.param((4, 3, 5, 6), id="4-D"),  # images, and no two sides of equal length
    pytest.param((2, 3, 2, 3, 4), id="5-D"),  # volumes
    pytest.param((2, 1), id="least"),  # the fewest values that can be normalized
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_agrees_with_torch_and_its_autograd(shape, training, affine):
    channels = shape[1]
    # A mean and a scale of their own per channel, so that no channel may stand for another.
    x = (normal(*shape) * 3 + torch.arange(channels).reshape(1, -1, *[1] * (len(shape) - 2))).to(
        torch.float64
    )
    dy = normal(*shape, seed=1)
    weight = normal(channels, seed=2).requires_grad_() if affine else None
    bias = normal(channels, seed=3).requires_grad_() if affine else None
    mean, var = normal(channels, seed=4), normal(channels, seed=5).square() + 0.1

    leaf = x.clone().requires_grad_()
    new_mean, new_var = mean.clone(), var.clone()
    y = nn.functional.batch_norm(leaf, new_mean, new_var, weight, bias, training, 0.3, 1e-3)
    y.backward(dy)

    ours = oracle.batch_norm(
        x,
        weight,
        bias,
        running_mean=mean,
        running_var=var,
        training=training,
        momentum=0.3,
        eps=1e-3,
        grad_output=dy,
    )
    assert_close(ours.y, y.detach())
    assert_close(ours.dx, leaf.grad)
    assert_close(ours.running_mean, new_mean)
    assert_close(ours.running_var, new_var)
    assert ours.batch_statistics is training
    if affine:
        assert_close(ours.dweight, weight.grad)
        assert_close(ours.dbias, bias.grad)


def test_eval_without_running_statistics_uses_the_batch():
    x, dy = normal(6, 2), normal(6, 2, seed=1)
    trained = oracle.batch_norm(x, grad_output=dy)
    evaluated = oracle.batch_norm(x, grad_output=dy, training=False)
    assert_close(evaluated.y, trained.y)
    assert_close(evaluated.dx, trained.dx)
    assert evaluated.running_mean is None


def test_cumulative_average_agrees_with_torch():
    layer = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    for batch in range(3):  # the third tells 1/3 from a constant factor
        x = normal(5, 3, seed=batch, mean=batch)
        layer(x)
        ours = oracle.batch_norm(
            x, running_mean=mean, running_var=var, momentum=None, num_batches_tracked=batch
        )
        mean, var = ours.running_mean, ours.running_var
        assert_close(mean, layer.running_mean)
        assert_close(var, layer.running_var)


def test_gradients_agree_with_central_differences():
    # Independent of autograd and of the backward formula: the loss is sum(y·dy).
    x, dy = normal(4, 2, seed=6), normal(4, 2, seed=7)
    weight, bias = normal(2, seed=8), normal(2, seed=9)
    step = 1e-5

    def loss(x, weight, bias):
        return float((oracle.batch_norm(x, weight, bias).y * dy).sum())

    def slope(which):
        arguments = [x, weight, bias]
        found = torch.zeros_like(arguments[which])
        for i in range(found.numel()):
            ends = []
            for sign in (1, -1):
                moved = [argument.clone() for argument in arguments]
                moved[which].view(-1)[i] += sign * step
                ends.append(loss(*moved))
            found.view(-1)[i] = (ends[0] - ends[1]) / (2 * step)
        return found

    ours = oracle.batch_norm(x, weight, bias, grad_output=dy)
    # The difference quotient is off by step² = 1e-10 and by 1e-16/step = 1e-11, times values
    # and third derivatives of order one to ten.
    for which, expected in enumerate((ours.dx, ours.dweight, ours.dbias)):
        torch.testing.assert_close(slope(which), expected, rtol=1e-7, atol=1e-8)


# ---------------------------------------------------------------- values that follow by hand


def test_neighbours_far_from_zero():
    # Exact in float32, while their squares differ by less than float32 can tell at 2^24:
    # E[x²] − E[x]² in float32 gives 0 here. Half of 0.5 on each side: variance 1/16.
    x = column(*[4096.0, 4096.5] * 8)
    ours = oracle.batch_norm(x)
    assert float(ours.mean) == 4096.25
    assert float(ours.var) == 0.0625
    expected = 0.25 / math.sqrt(0.0625 + 1e-5)  # 0.99992
    assert_close(ours.y[:2, 0], torch.tensor([-expected, expected], dtype=torch.float64))


def test_inputs_count_as_rounded_to_their_dtype():
    # 10000.3 and 10000.6 are no float32 numbers; the variance is that of their neighbours.
    x = torch.tensor([10000 + 0.3 * (i % 3) for i in range(32)], dtype=torch.float32)[:, None]
    exact = [float(value) for value in x[:, 0]]
    mean = math.fsum(exact) / 32
    var = math.fsum((value - mean) ** 2 for value in exact) / 32
    ours = oracle.batch_norm(x)
    # sum((x − mean)²) is about 1.9 and its terms cancel 1e4: absolute error 1e4·2^-53 a term.
    assert float(ours.var) == pytest.approx(var, rel=1e-10)
    assert float(ours.var) == pytest.approx(0.05890, abs=5e-6)
    assert ours.y.isfinite().all()


def test_half_inputs_whose_squares_overflow():
    # 300.5² is beyond float16's 65504, both values are float16 numbers.
    x = column(*[300.0, 300.5] * 8, dtype=torch.float16)
    ours = oracle.batch_norm(x)
    assert float(ours.mean) == 300.25
    assert float(ours.var) == 0.0625
    assert float(ours.y[1, 0]) == pytest.approx(0.25 / math.sqrt(0.0625 + 1e-5), rel=1e-14)


def test_ranks_weigh_by_their_counts():
    # Two zeros and six ones: mean 3/4, variance 3/16, unbiased 3/16·8/7 = 3/14. The mean of the
    # ranks' means would be 1/2.
    ours = oracle.batch_norm(
        [torch.zeros(2, 1, 1, 1), torch.ones(6, 1, 1, 1)],
        running_mean=torch.zeros(1),
        running_var=torch.ones(1),
    )
    assert float(ours.mean) == 0.75
    assert float(ours.var) == 0.1875
    assert float(ours.running_mean) == pytest.approx(0.075, rel=1e-15)
    assert float(ours.running_var) == pytest.approx(0.9 + 0.1 * 3 / 14, rel=1e-15)  # 0.921429


def test_gradient_of_uneven_ranks():
    # x = 0, 2 | 4: mean 2, variance 8/3; dy = 1, 0 | 0. With a = 1/sqrt(8/3 + eps):
    # xhat = −2a, 0, 2a; mean(dy) = 1/3; mean(dy·xhat) = −2a/3.
    # dx = a·(2/3 − 4a²/3), −a/3, a·(−1/3 + 4a²/3).
    a = 1 / math.sqrt(8 / 3 + 1e-5)
    ours = oracle.batch_norm(
        [torch.tensor([0.0, 2.0]).reshape(2, 1, 1, 1), torch.tensor([4.0]).reshape(1, 1, 1, 1)],
        grad_output=[
            torch.tensor([1.0, 0.0]).reshape(2, 1, 1, 1),
            torch.zeros(1, 1, 1, 1),
        ],
    )
    found = torch.cat(ours.dx).flatten()
    expected = [a * (2 - 4 * a * a) / 3, -a / 3, a * (4 * a * a - 1) / 3]
    assert found.tolist() == pytest.approx(expected, rel=1e-13)
    assert found.tolist() == pytest.approx([0.102063, -0.204124, 0.102061], abs=1e-6)
    assert [float(share) for share in ours.dbias] == [1, 0]  # local sums
    assert [float(share) for share in ours.dweight] == pytest.approx([-2 * a, 0])


@pytest.mark.parametrize("empty", [0, 1], ids=["rank 0 empty", "rank 1 empty"])
def test_an_empty_rank_takes_part(empty):
    x = normal(2, 3, 4, 4).half()
    dy = normal(2, 3, 4, 4, seed=1).half()
    alone = oracle.batch_norm(
        x, running_mean=torch.zeros(3), running_var=torch.ones(3), grad_output=dy
    )
    shares, grads = [x, x], [dy, dy]
    shares[empty], grads[empty] = x[:0], dy[:0]
    ours = oracle.batch_norm(
        shares, running_mean=torch.zeros(3), running_var=torch.ones(3), grad_output=grads
    )
    full = 1 - empty
    assert ours.y[empty].shape == ours.dx[empty].shape == (0, 3, 4, 4)
    assert ours.dweight[empty].tolist() == ours.dbias[empty].tolist() == [0, 0, 0]
    assert_close(ours.y[full], alone.y)
    assert_close(ours.dx[full], alone.dx)
    assert_close(ours.running_mean, alone.running_mean)
    assert_close(ours.running_var, alone.running_var)


def test_cumulative_average_by_hand():
    # Means 1, 2, 6 and unbiased variances 2, 2, 8: their running averages.
    mean, var, seen = torch.zeros(1), torch.ones(1), []
    for batch, values in enumerate(([0.0, 2.0], [1.0, 3.0], [4.0, 8.0])):
        # One value per rank: no rank has a variance of its own.
        shares = [column(value) for value in values]
        ours = oracle.batch_norm(
            shares, running_mean=mean, running_var=var, momentum=None, num_batches_tracked=batch
        )
        mean, var = ours.running_mean, ours.running_var
        seen.append((float(mean), float(var)))
    assert seen == [pytest.approx(pair) for pair in ((1, 2), (1.5, 2), (3, 4))]


# ---------------------------------------------------------------- what must always hold


@pytest.mark.parametrize("mean", [0, 1000], ids=["centred", "far from zero"])
def test_gradients_are_orthogonal_to_one_and_to_xhat(mean):
    # Batch norm's output does not feel a shift of its input, nor (with eps 0) a scaling.
    x, dy = normal(64, 3, mean=mean), normal(64, 3, seed=1)
    ours = oracle.batch_norm(x, grad_output=dy, eps=0.0)
    # 64 terms of order one: 64·2^-53 = 7e-15, and mean/std times that from a mean of 1000.
    assert float(ours.dx.sum(0).abs().max()) < 1e-10
    assert float((ours.dx * ours.xhat).sum(0).abs().max()) < 1e-10


SPLITS = [
    pytest.param((9,), id="1 rank"),  # a list of one is still a list
    pytest.param((2, 7), id="2 uneven"),
    pytest.param((3, 0, 6), id="3, one empty"),
    pytest.param((1, 1, 7), id="3, two with one value"),  # no variance of their own
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("sizes", SPLITS)
def test_a_split_batch_is_the_whole_batch(sizes, training):
    x, dy = normal(9, 4), normal(9, 4, seed=1)
    arguments = {
        "weight": normal(4, seed=2),
        "bias": normal(4, seed=3),
        "running_mean": normal(4, seed=4),
        "running_var": normal(4, seed=5).square(),
        "training": training,
    }
    whole = oracle.batch_norm(x, grad_output=dy, **arguments)
    split = oracle.batch_norm(list(x.split(sizes)), grad_output=list(dy.split(sizes)), **arguments)
    for name in ("y", "xhat", "dx"):
        assert [len(share) for share in getattr(split, name)] == list(sizes)
        assert_close(torch.cat(getattr(split, name)), getattr(whole, name))
    for name in ("dweight", "dbias"):
        assert_close(torch.stack(getattr(split, name)).sum(0), getattr(whole, name))
    for name in ("mean", "var", "running_mean", "running_var"):
        assert_close(getattr(split, name), getattr(whole, name))
    assert split.count == whole.count == 9


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(column(1.0), id="one value"),
        pytest.param([column(1.0), column()], id="one over two ranks"),
        pytest.param([column(), column()], id="none over two ranks"),
    ],
)
def test_nothing_to_reduce_over(shares):
    with pytest.raises(ValueError, match="more than one value per channel"):
        oracle.batch_norm(shares)


def test_one_value_is_enough_in_eval():
    ours = oracle.batch_norm(
        column(3.0),
        running_mean=torch.ones(1),
        running_var=torch.full((1,), 4.0),
        training=False,
        eps=0.0,
    )
    assert float(ours.y) == 1  # (3 − 1)/2


def test_buffers_given_stay_as_they_are():
    mean, var = torch.zeros(1), torch.ones(1)
    oracle.batch_norm(column(1.0, 2.0), running_mean=mean, running_var=var)
    assert (float(mean), float(var)) == (0, 1)
