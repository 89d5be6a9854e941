"""The float64 reference that every value of the kit is compared with.

Slow and obviously right: the inputs are taken as they are, already rounded to their dtype,
converted to float64 (exact for every supported dtype), and put through the textbook formulas
in two passes. Ioffe and Szegedy, "Batch Normalization" (2015), section 3; the backward formula
is theirs, written with the normalized input. Over several ranks the reference concatenates:
synchronized batch norm is defined as batch norm of the whole group's batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

Share = Tensor | Sequence[Tensor]
"""One tensor, or one per rank."""


@dataclasses.dataclass(frozen=True)
class BatchNormReference:
    """Batch norm in float64. Per-rank fields are lists when the input was a list."""

    mean: Tensor
    """Batch mean, shape (C,); the running mean in eval mode."""
    var: Tensor
    """Biased variance, shape (C,): it normalizes; the running variance in eval mode."""
    count: int
    """Values per channel over all ranks."""
    batch_statistics: bool
    """Whether mean and var come from this batch, and so take part in the backward pass."""
    xhat: Tensor | list[Tensor]
    """(x − mean)/sqrt(var + eps)."""
    y: Tensor | list[Tensor]
    running_mean: Tensor | None
    """After the update: (1 − momentum)·old + momentum·mean."""
    running_var: Tensor | None
    """After the update, from the unbiased variance var·n/(n − 1)."""
    dx: Tensor | list[Tensor] | None
    """w/sqrt(var + eps)·(dy − mean(dy) − xhat·mean(dy·xhat)), the means over all ranks."""
    dweight: Tensor | list[Tensor] | None
    """sum(dy·xhat) over this rank's share alone, shape (C,): DDP averages it."""
    dbias: Tensor | list[Tensor] | None
    """sum(dy) over this rank's share alone, shape (C,)."""


def batch_norm(
    x: Share,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    grad_output: Share | None = None,
    num_batches_tracked: int = 0,
) -> BatchNormReference:
    """Batch norm forward, backward and running statistics in float64.

    Parameters
    ----------
    x
        Shape (N, C, ...), any floating dtype; one tensor, or one per rank with any N each,
        zero included.
    weight, bias
        Shape (C,), or None for 1 and 0.
    running_mean, running_var
        Shape (C,), before the update. They normalize when ``training`` is False, and are
        updated (out of place) when it is True.
    momentum
        Weight of the new value; None for the cumulative average, 1/(num_batches_tracked + 1).
    grad_output
        Like ``x``; without it dx, dweight and dbias are None.
    num_batches_tracked
        Batches seen before this one; used with momentum None alone.

    Raises
    ------
    ValueError
        When there is nothing to reduce over: no value, or one value, per channel in training.
    """
    several = not isinstance(x, Tensor)
    shares = [share.detach().to(torch.float64) for share in (x if several else [x])]  # type: ignore[union-attr]
    channels = shares[0].shape[1]
    columns = [_channels_first(share) for share in shares]
    everything = torch.cat(columns, dim=1)
    count = everything.shape[1]
    w = torch.ones(channels, dtype=torch.float64) if weight is None else _double(weight)
    b = torch.zeros(channels, dtype=torch.float64) if bias is None else _double(bias)
    device = everything.device
    w, b = w.to(device), b.to(device)

    batch_statistics = training or running_mean is None or running_var is None
    if batch_statistics:
        if training and count < 2:
            raise ValueError(
                f"batch norm in training needs more than one value per channel, found {count}"
            )
        mean = everything.mean(1)
        var = (everything - mean[:, None]).square().mean(1)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, var = _double(running_mean), _double(running_var)

    new_mean, new_var = running_mean, running_var
    if training and running_mean is not None and running_var is not None:
        factor = momentum if momentum is not None else 1.0 / (num_batches_tracked + 1)
        unbiased = var * count / (count - 1)
        new_mean = (1 - factor) * _double(running_mean) + factor * mean
        new_var = (1 - factor) * _double(running_var) + factor * unbiased

    scale = 1 / torch.sqrt(var + eps)
    xhats = [(column - mean[:, None]) * scale[:, None] for column in columns]
    ys = [xhat * w[:, None] + b[:, None] for xhat in xhats]

    dxs = dws = dbs = None
    if grad_output is not None:
        given = grad_output if several else [grad_output]
        dys = [_channels_first(_double(dy)) for dy in given]  # type: ignore[arg-type]
        dws = [(dy * xhat).sum(1) for dy, xhat in zip(dys, xhats, strict=True)]
        dbs = [dy.sum(1) for dy in dys]
        slope = (w * scale)[:, None]
        if batch_statistics:
            mean_dy = (torch.stack(dbs).sum(0) / count)[:, None]
            mean_dy_xhat = (torch.stack(dws).sum(0) / count)[:, None]
            columns_dx = [
                slope * (dy - mean_dy - xhat * mean_dy_xhat)
                for dy, xhat in zip(dys, xhats, strict=True)
            ]
        else:
            columns_dx = [slope * dy for dy in dys]
        dxs = [_like(dx, share) for dx, share in zip(columns_dx, shares, strict=True)]

    def each(values: list[Tensor] | None) -> Tensor | list[Tensor] | None:
        return values if several or values is None else values[0]

    return BatchNormReference(
        mean=mean,
        var=var,
        count=count,
        batch_statistics=batch_statistics,
        xhat=each([_like(v, s) for v, s in zip(xhats, shares, strict=True)]),  # type: ignore[arg-type]
        y=each([_like(v, s) for v, s in zip(ys, shares, strict=True)]),  # type: ignore[arg-type]
        running_mean=None if new_mean is None else _double(new_mean),
        running_var=None if new_var is None else _double(new_var),
        dx=each(dxs),
        dweight=each(dws),
        dbias=each(dbs),
    )


def _double(value: Tensor) -> Tensor:
    return value.detach().to(torch.float64)


def _channels_first(value: Tensor) -> Tensor:
    """(N, C, ...) as (C, N·...)."""
    return value.transpose(0, 1).reshape(value.shape[1], -1)


def _like(columns: Tensor, share: Tensor) -> Tensor:
    """(C, N·...) back as (N, C, ...)."""
    shape = (share.shape[1], share.shape[0], *share.shape[2:])
    return columns.reshape(shape).transpose(0, 1)
