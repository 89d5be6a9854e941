"""How far from the float64 oracle a careful batch norm may be: budgets derived, not tuned.

A careful implementation reads inputs of any dtype, computes in float32 (float64 for float64
input) and rounds each result once to its dtype. With n
values per channel, u the unit roundoff of that arithmetic (twice that for float64 input, where
the reference is itself computed in float64 and errs as much), first order in u, and nothing
overflowing or underflowing on the way:

* a sum of n terms is off by at most g·(sum of their magnitudes). Taken pairwise it is off by
  (ceil(log2 n) + 2)·u at most (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed.,
  section 4.2, plus one rounding for the terms and one for the division by n); taken term by
  term, as some of torch's CPU kernels do, it errs like a random walk, by sqrt(n)·u (Higham and
  Mary 2019, "A New Approach to Probabilistic Rounding Error Analysis"). Both are
  careful enough, so g is the larger of the two. The random walk needs roundings of either sign:
  many terms that are alike, added one after the other, all err to one side, up to n·u, and leave
  the budget (torch 1.2's sums over the outer dimension on a CPU do, torch's since are pairwise);
* the mean by dm = g·mean|x|; the two-pass variance by dv = (g + 4u)·var + dm²
  (Chan, Golub and LeVeque 1983: the shift by an inexact mean costs dm²). Normalizing with given
  running statistics, dm = dv = 0;
* the scale 1/sqrt(var + eps) relatively by ds = dv/(2(var + eps)) + 5u: half of u for eps
  rounded to the arithmetic, half for adding it, 4u for the reciprocal root (an exact root and
  quotient cost 2u, CUDA's rsqrtf up to 2 ulp);
* the normalized input xhat = (x − mean)·scale by
  dxhat = scale·dm + |xhat|·(ds + 4u) + u·scale·(2|x| + 3|mean|). The last term allows the form
  x·(w·scale) + (b − mean·w·scale) that fused kernels use: both products are large beside their
  difference; the first is rounded twice, the second three times when it is taken from the left;
* y, dx, dweight and dbias follow by the same rules through the formulas of ``oracle.py``. In
  dx the product of two errors of xhat stays: in a constant channel far from zero, scale·dm is
  not small and xhat itself is zero, so that product is all there is.

Each result is then rounded once to its dtype: half an ulp. The naive variance
E[x²] − E[x]² is off by g·(var + 2·mean²) instead, so it leaves these budgets as soon as the
mean is a few standard deviations away from zero; half precision statistics leave them at once.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from syncbn_lab.numerics.formats import ulp, unit_roundoff
from syncbn_lab.oracle import BatchNormReference


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Largest allowed absolute error of each result, before the rounding to its own dtype.

    Shapes: mean and var (C,); y and dx like the input, one tensor per rank; dweight and dbias
    (C,), one per rank. Gradients are None where there was no grad_output.

    ``scales`` holds, per result and channel, shape (C,), the size of what was added up to make
    it. A gradient whose terms cancel is small beside its terms, and its error is measured on
    them: dx by |w|·scale·max|dy|, dweight by sum|dy·xhat|, dbias by sum|dy|, the mean by
    max|x|, the variance by itself plus eps, y by max|y|.
    """

    mean: Tensor
    var: Tensor
    y: list[Tensor]
    dx: list[Tensor] | None
    dweight: list[Tensor] | None
    dbias: list[Tensor] | None
    scales: dict[str, Tensor]


def compute_dtype(input_dtype: torch.dtype) -> torch.dtype:
    """The arithmetic of a careful implementation: decided by the input, never by the weight."""
    return torch.float64 if input_dtype == torch.float64 else torch.float32


def batch_norm_budgets(
    x: list[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    reference: BatchNormReference,
    grad_output: list[Tensor] | None,
) -> Budgets:
    """Derive the budgets of one layer from its input, one tensor of shape (N, C, ...) per rank."""
    arithmetic = compute_dtype(x[0].dtype)
    u = unit_roundoff(arithmetic) * (2 if arithmetic == torch.float64 else 1)
    n = max(reference.count, 2)
    g = max(math.ceil(math.log2(n)) + 2, math.sqrt(n)) * u
    xs = [share.to(torch.float64) for share in x]
    xhats = reference.xhat if isinstance(reference.xhat, list) else [reference.xhat]
    mean, var = reference.mean, reference.var
    channels = mean.shape[0]
    w = torch.ones(channels, dtype=torch.float64) if weight is None else weight.to(torch.float64)
    b = torch.zeros(channels, dtype=torch.float64) if bias is None else bias.to(torch.float64)

    d_mean = g * _sum_over_ranks([share.abs() for share in xs]) / n
    d_var = (g + 4 * u) * var + d_mean.square()
    if not reference.batch_statistics:
        d_mean, d_var = torch.zeros_like(mean), torch.zeros_like(var)
    scale = 1 / torch.sqrt(var + eps)
    d_scale = d_var / (2 * (var + eps)) + 5 * u

    d_xhats, d_ys = [], []
    for share, xhat in zip(xs, xhats, strict=True):
        c = _broadcaster(share)
        d_xhat = (
            c(scale * d_mean)
            + xhat.abs() * c(d_scale + 4 * u)
            + u * c(scale) * (2 * share.abs() + 3 * c(mean).abs())
        )
        y = xhat * c(w) + c(b)
        d_xhats.append(d_xhat)
        d_ys.append(c(w).abs() * d_xhat + 2 * u * (c(b).abs() + y.abs()))

    ys = reference.y if isinstance(reference.y, list) else [reference.y]
    scales = {"mean": _largest(xs), "var": var + eps, "y": _largest(ys)}
    if grad_output is None:
        return Budgets(d_mean, d_var, d_ys, None, None, None, scales)

    dys = [share.to(torch.float64) for share in grad_output]
    weighted = [dy * xhat for dy, xhat in zip(dys, xhats, strict=True)]
    mean_dy = _sum_over_ranks(dys) / n
    mean_dy_xhat = _sum_over_ranks(weighted) / n
    d_mean_dy = g * _sum_over_ranks([dy.abs() for dy in dys]) / n
    d_weighted = [dy.abs() * d_xhat for dy, d_xhat in zip(dys, d_xhats, strict=True)]
    d_mean_dy_xhat = (
        g * _sum_over_ranks([value.abs() for value in weighted]) / n
        + _sum_over_ranks(d_weighted) / n
    )
    if not reference.batch_statistics:
        # dx is w·scale·dy then: no mean takes part.
        mean_dy = mean_dy_xhat = d_mean_dy = d_mean_dy_xhat = torch.zeros_like(mean)
    d_dxs = []
    for share, dy, xhat, d_xhat in zip(xs, dys, xhats, d_xhats, strict=True):
        c = _broadcaster(share)
        inner = dy - c(mean_dy) - xhat * c(mean_dy_xhat)
        magnitudes = dy.abs() + c(mean_dy).abs() + (xhat * c(mean_dy_xhat)).abs()
        d_inner = (
            c(d_mean_dy)
            + (xhat.abs() + d_xhat) * c(d_mean_dy_xhat)
            + d_xhat * c(mean_dy_xhat).abs()
            + 4 * u * magnitudes
        )
        d_dxs.append(c((w * scale).abs()) * (d_inner + inner.abs() * c(d_scale + 2 * u)))
    d_dws = [
        g * _per_channel(value.abs()) + _per_channel(d_value)
        for value, d_value in zip(weighted, d_weighted, strict=True)
    ]
    d_dbs = [g * _per_channel(dy.abs()) for dy in dys]
    scales["dx"] = (w * scale).abs() * _largest(dys)
    scales["dweight"] = _sum_over_ranks([value.abs() for value in weighted])
    scales["dbias"] = _sum_over_ranks([dy.abs() for dy in dys])
    return Budgets(d_mean, d_var, d_ys, d_dxs, d_dws, d_dbs, scales)


def with_rounding(budget: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the one rounding to the result's own dtype.

    Half an ulp of the reference, and half an ulp more for a value that the budget itself
    carries across the edge of a binade, where the ulp doubles.
    """
    return budget + 0.5 * ulp(reference.abs() + budget, dtype)


def _sum_over_ranks(shares: list[Tensor]) -> Tensor:
    return torch.stack([_per_channel(share) for share in shares]).sum(0)


def _per_channel(share: Tensor) -> Tensor:
    """Sum of a (N, C, ...) tensor over everything but the channel."""
    return share.transpose(0, 1).reshape(share.shape[1], -1).sum(1)


def _largest(shares: list[Tensor]) -> Tensor:
    """Largest magnitude in each channel over all ranks, zero where there is no value."""
    columns = torch.cat([s.transpose(0, 1).reshape(s.shape[1], -1) for s in shares], 1)
    zero = torch.zeros(columns.shape[0], 1, dtype=columns.dtype)
    return torch.cat([columns.abs(), zero], 1).amax(1)


class _broadcaster:  # noqa: N801 - used like a function
    """Shapes a (C,) tensor so that it broadcasts against (N, C, ...)."""

    def __init__(self, like: Tensor) -> None:
        self.shape = (1, -1) + (1,) * (like.ndim - 2)

    def __call__(self, value: Tensor) -> Tensor:
        return value.reshape(self.shape)
