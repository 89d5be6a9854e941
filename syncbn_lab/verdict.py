"""The verdict: are the numbers of a run right? Judged layer by layer against the oracle.

"No exception" is never enough. Every batch norm layer of a completed run is compared with the
float64 reference fed with the very inputs that the layer received, so errors made elsewhere in
the network are not blamed on it:

* `right`: the dtype contract is kept (the output has the input's dtype, each gradient that of
  its tensor, running statistics keep theirs), every value lies within the derived budget
  (``numerics/budgets.py``), and running statistics are bit-equal on all ranks;
* `not judged`: nothing is found, but what the layer was given is not finite somewhere, so there
  is no reference to compare with;
* `degraded`: a dtype changed, or a value lies outside its budget; the findings say what and by
  how much;
* `wrong`: a value that should be finite is not, or is off by more than a tenth of its channel's
  scale (what was added up to make it): no longer an approximation of batch norm. Infinity is
  right where the value rounds to it in the dtype that belongs there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from syncbn_lab import oracle
from syncbn_lab.layers import LayerRecord
from syncbn_lab.numerics.budgets import (
    Budgets,
    batch_norm_budgets,
    compute_dtype,
    with_rounding,
)
from syncbn_lab.numerics.formats import dtype_name, ulp, unit_roundoff

WRONG_SHARE = 0.1
"""An error above this share of the channel's scale is `wrong`, not `degraded`."""

SEVERITY = ("right", "not judged", "degraded", "wrong")

SHOWN_ONLY = ("batch mean", "batch var")
"""Compared and shown, but not judged: a layer's own statistics are a means, and whatever they
lose counts once it reaches the output, a gradient or a buffer."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One result of one layer against the oracle."""

    quantity: str
    """"y", "dx", "weight.grad", "bias.grad", "running_mean" or "running_var"."""
    dtype: str
    expected_dtype: str
    worst: float
    """Largest absolute error; infinite when a value is not finite and should be."""
    worst_ulp: float
    """Largest error in ulp, the ulp taken at max(|value|, a thousandth of the channel's largest),
    of the result's dtype or of the one it should have, whichever is coarser."""
    budget_share: float
    """Largest error over its budget: at most 1 is within."""
    channel_share: float
    """Largest error over its channel's scale, of the values outside their budget."""
    per_channel: list[float]
    """Largest error of each channel over that channel's scale."""
    unjudged_channels: int = 0
    """Channels in which a value has no finite reference."""
    rank_spread: float = 0.0
    """Largest difference in ulp of a running statistic between ranks that began alike."""

    @property
    def ulp_dtype(self) -> str:
        """The dtype that ``worst_ulp`` counts in."""
        return max(
            self.dtype, self.expected_dtype, key=lambda name: torch.finfo(getattr(torch, name)).eps
        )

    @property
    def verdict(self) -> str:
        """One of ``SEVERITY``, for this one quantity."""
        if self.channel_share > WRONG_SHARE:
            return "wrong"
        if self.budget_share > 1 or self.rank_spread > 0 or self.dtype != self.expected_dtype:
            return "degraded"
        return "not judged" if self.unjudged_channels else "right"

    def sentence(self, layer: str) -> str:
        """Say what is off, and by how much."""
        what = f"{layer}: {self.quantity}"
        parts = []
        if self.dtype != self.expected_dtype:
            parts.append(f"is {self.dtype} where {self.expected_dtype} belongs")
        if self.worst == float("inf"):
            parts.append("is not finite where the reference is")
        elif self.budget_share > 1:
            parts.append(
                f"is off by {_number(self.worst_ulp)} {self.ulp_dtype} ulp at worst, "
                f"{_number(self.budget_share)} times its budget, "
                f"{self.channel_share:.2g} of the channel's scale"
            )
        if self.rank_spread > 0:
            parts.append(
                f"differs between ranks by up to {_number(self.rank_spread)} {self.dtype} ulp"
            )
        if not parts and self.unjudged_channels:
            parts.append(
                f"can't be judged in {self.unjudged_channels} of {len(self.per_channel)} channels: "
                "what the layer was given is not finite there"
            )
        return f"{what} {' and '.join(parts)}" if parts else f"{what} is right"


def judge(ranks: list[list[LayerRecord]], synchronized: bool = True) -> dict[str, Any]:
    """Judge every layer of one step, given the records of every rank in the same order.

    A layer that is not synchronized is right when each rank agrees with the oracle of its own
    share; then the worst rank stands for all.

    Returns a plain dictionary: ``verdict``, ``findings`` (sentences, worst first) and
    ``layers`` (one dictionary each, with its comparisons).
    """
    layers = []
    for records in zip(*ranks, strict=True):
        comparisons = (
            compare_layer(list(records))
            if synchronized
            else _worst_rank([compare_layer([record]) for record in records])
        )
        layers.append(
            {
                "name": records[0].name,
                "count": sum(r.x.numel() // max(r.x.shape[1], 1) for r in records),
                "verdict": _worst(comparisons),
                "comparisons": comparisons,
            }
        )
    everything = [comparison for layer in layers for comparison in layer["comparisons"]]
    return {
        "verdict": _worst(everything),
        "findings": _findings(layers),
        "layers": [
            {**layer, "comparisons": [dataclasses.asdict(c) for c in layer["comparisons"]]}
            for layer in layers
        ],
    }


def _worst_rank(ranks: list[list[Comparison]]) -> list[Comparison]:
    """Of each quantity, the comparison of the rank where it is worst."""
    return [
        max(same, key=lambda c: (SEVERITY.index(c.verdict), c.budget_share))
        for same in zip(*ranks, strict=True)
    ]


def _worst(comparisons: list[Comparison]) -> str:
    judged = (c.verdict for c in comparisons if c.quantity not in SHOWN_ONLY)
    return max(judged, key=SEVERITY.index, default="right")


def _findings(layers: list[dict[str, Any]]) -> list[str]:
    """One sentence a quantity, for the layer where it is worst, most serious first.

    A changed dtype comes before a lost digit: it is what the next layer stumbles over.
    """
    worst: dict[str, tuple[tuple[int, bool, float], str]] = {}
    others: dict[str, int] = {}
    for layer in layers:
        for comparison in layer["comparisons"]:
            if comparison.verdict == "right" or comparison.quantity in SHOWN_ONLY:
                continue
            changed = comparison.dtype != comparison.expected_dtype
            key = (SEVERITY.index(comparison.verdict), changed, comparison.budget_share)
            found = (key, comparison.sentence(layer["name"]))
            name = comparison.quantity
            others[name] = others.get(name, -1) + 1
            worst[name] = max(worst.get(name, found), found)
    ranked = sorted(worst, key=lambda name: worst[name][0], reverse=True)
    return [worst[name][1] + _and_others(others[name]) for name in ranked]


def _and_others(count: int) -> str:
    return f" (and less so in {count} more layer{'s' if count > 1 else ''})" if count else ""


def compare_layer(records: list[LayerRecord]) -> list[Comparison]:
    """Compare one layer's results with the oracle; one record per rank."""
    first = records[0]
    xs = [record.x for record in records]
    dys = [record.dy for record in records if record.dy is not None]
    grad_output = dys if len(dys) == len(records) else None
    reference = oracle.batch_norm(
        xs,
        first.weight,
        first.bias,
        running_mean=first.running_mean_before,
        running_var=first.running_var_before,
        training=first.training,
        momentum=first.momentum,
        eps=first.eps,
        grad_output=grad_output,
        num_batches_tracked=first.num_batches_tracked,
    )
    budgets = batch_norm_budgets(xs, first.weight, first.bias, first.eps, reference, grad_output)
    input_dtype = dtype_name(first.x.dtype)
    scales = budgets.scales
    results = [
        _compare("y", [r.y for r in records], reference.y, budgets.y, scales["y"], input_dtype)
    ]
    if grad_output is not None:
        for quantity, name, like in (
            ("dx", "dx", first.x),
            ("weight.grad", "dweight", first.weight),
            ("bias.grad", "dbias", first.bias),
        ):
            seen = [getattr(record, name) for record in records]
            if like is None or any(value is None for value in seen):
                continue
            expected, budget = getattr(reference, name), getattr(budgets, name)
            own = dtype_name(like.dtype)
            results.append(_compare(quantity, seen, expected, budget, scales[name], own))
    for quantity, name in (("batch mean", "mean"), ("batch var", "var")):
        seen = [getattr(record, f"batch_{name}") for record in records]
        if first.training and all(value is not None for value in seen):
            expected = [getattr(reference, name)] * len(records)
            budget = [getattr(budgets, name)] * len(records)
            # A statistic inside the layer may have any dtype; its error is what counts.
            own = dtype_name(seen[0].dtype)
            results.append(_compare(quantity, seen, expected, budget, scales[name], own))
    results += _compare_buffers(records, reference, budgets)
    return results


def _compare_buffers(
    records: list[LayerRecord], reference: oracle.BatchNormReference, budgets: Budgets
) -> list[Comparison]:
    """Compare the running statistics after the step, on every rank: unchanged in eval mode."""
    first = records[0]
    if first.running_mean is None or first.running_mean_before is None:
        return []
    factor, unbiased, u = 0.0, 1.0, 0.0
    if first.training:
        tracked = first.num_batches_tracked
        factor = first.momentum if first.momentum is not None else 1 / (tracked + 1)
        unbiased = reference.count / (reference.count - 1)
        u = unit_roundoff(compute_dtype(first.x.dtype))
    results = []
    for name, batch, budget in (
        ("running_mean", reference.mean, budgets.mean),
        ("running_var", reference.var * unbiased, budgets.var * unbiased),
    ):
        before = getattr(first, f"{name}_before")
        expected = getattr(reference, name)
        terms = (1 - factor) * before.double().abs() + factor * batch.abs()
        # factor·batch + (1 − factor)·old: the factor rounded, a product and a sum.
        allowed = factor * budget + 3 * u * terms
        seen = [getattr(record, name) for record in records]
        each = len(records)
        own = dtype_name(before.dtype)
        found = _compare(name, seen, [expected] * each, [allowed] * each, terms, own)
        if all(torch.equal(getattr(record, f"{name}_before"), before) for record in records):
            found = dataclasses.replace(found, rank_spread=_rank_spread(seen))
        results.append(found)
    return results


def _rank_spread(seen: list[Tensor]) -> float:
    """Largest difference from rank 0's, in ulp of its dtype; 0 where all are equal, NaN or not."""
    first = seen[0].double()
    step = ulp(first, seen[0].dtype)
    worst = 0.0
    for value in seen[1:]:
        other = value.double()
        same = (other == first) | (other.isnan() & first.isnan())
        gap = ((other - first).abs() / step).nan_to_num(torch.inf, torch.inf)
        worst = max(worst, float(torch.where(same, 0.0, gap).max()))
    return worst


def _compare(
    quantity: str,
    seen: list[Tensor],
    expected: Any,
    budgets: list[Tensor],
    scale: Tensor,
    expected_dtype: str,
) -> Comparison:
    """Compare one quantity over all ranks; tensors are (N, C, ...) or (C,), the scale (C,)."""
    own = getattr(torch, expected_dtype)
    # Ranks agree on a dtype as a rule; the one that departs is the one to name.
    dtype = next((value.dtype for value in seen if value.dtype != own), own)
    # A value is judged at the dtype it should have: a float32 that belongs in float16 is not
    # held to float32's precision on top of its wrong dtype, nor the other way round.
    coarser = max((dtype, own), key=lambda d: torch.finfo(d).eps)
    # From half an ulp above the largest number on, rounding gives infinity.
    edge = torch.finfo(own).max + 0.5 * float(ulp(torch.tensor(torch.finfo(own).max), own))
    errors, references, allowed = [], [], []
    for value, reference, budget in zip(seen, expected, budgets, strict=True):
        value = value.to(torch.float64)
        # Not finite where the reference fits into the dtype: as wrong as can be.
        difference = torch.where(value.isfinite(), (value - reference).abs(), torch.inf)
        beyond = reference.abs() + budget >= edge
        overflow = beyond & (value == reference.sign() * torch.inf)
        errors.append(_columns(torch.where(overflow, 0.0, difference)))
        references.append(_columns(reference.abs()))
        allowed.append(_columns(with_rounding(budget, reference, coarser)))
    error, reference, budget = torch.cat(errors, 1), torch.cat(references, 1), torch.cat(allowed, 1)
    if error.numel() == 0:
        zeros = [0.0] * len(error)
        return Comparison(quantity, dtype_name(dtype), expected_dtype, 0.0, 0.0, 0.0, 0.0, zeros)
    known = reference.isfinite() & budget.isfinite()
    error, reference = torch.where(known, error, 0.0), torch.where(known, reference, 0.0)
    scale = scale.nan_to_num(torch.inf, torch.inf)
    largest = reference.amax(1, keepdim=True)
    ulps = error / ulp(torch.maximum(reference, 1e-3 * largest), coarser)
    limits = torch.finfo(torch.float64)
    relative = error / scale.clamp(limits.tiny, limits.max)[:, None]
    # What lies within its budget is no fault, however small its channel is.
    outside = torch.where(error > budget, relative, torch.zeros_like(relative))
    return Comparison(
        quantity=quantity,
        dtype=dtype_name(dtype),
        expected_dtype=expected_dtype,
        worst=float(error.max()),
        worst_ulp=float(ulps.max()),
        budget_share=float(torch.where(known, error / budget, 0.0).max()),
        channel_share=float(outside.max()),
        per_channel=[float(value) for value in relative.amax(1)],
        unjudged_channels=int((~known).any(1).sum()),
    )


def _columns(value: Tensor) -> Tensor:
    """(N, C, ...) as (C, N·...), and (C,) as (C, 1)."""
    if value.ndim == 1:
        return value[:, None]
    return value.transpose(0, 1).reshape(value.shape[1], -1)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1e4 else f"{value:.1e}"
