"""Precision recipes as data. ``recipes.py`` applies one to a model and its optimizer."""

from __future__ import annotations

import dataclasses

from syncbn_lab.errors import InputError


@dataclasses.dataclass(frozen=True)
class Policy:
    """One precision recipe."""

    name: str
    kind: str
    """"apex" (apex.amp), "autocast" (torch.autocast) or "cast" (the whole model converted)."""
    dtype: str
    """The low precision dtype at work; float32 where there is none."""
    description: str
    keep_choices: tuple[bool | None, ...] = (None,)
    """The values of keep_batchnorm_fp32 that the recipe takes."""
    reported_keep: bool | None = None
    """The keep_batchnorm_fp32 of the public report for this recipe."""
    own_keep: bool | None = None
    """What the recipe makes of keep_batchnorm_fp32=None."""


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("O0", "apex", "float32", "float32 training", (None, True, False)),
        Policy(
            "O1",
            "apex",
            "float16",
            "torch functions patched to cast their inputs; the model stays float32",
        ),
        Policy(
            "O2",
            "apex",
            "float16",
            "float16 model and inputs, float32 batch norm unless told otherwise, float32 master "
            "weights",
            (None, True, False),
            own_keep=True,
        ),
        Policy(
            "O3",
            "apex",
            "float16",
            "float16 model and inputs; batch norm float16 too unless keep_batchnorm_fp32",
            (None, True, False),
            reported_keep=True,
            own_keep=False,
        ),
        Policy("autocast-fp16", "autocast", "float16", "torch.autocast with a gradient scaler"),
        Policy("autocast-bf16", "autocast", "bfloat16", "torch.autocast, no gradient scaler"),
        Policy("half", "cast", "float16", "model.half() and input.half(), buffers too"),
        Policy("bf16", "cast", "bfloat16", "model and input converted to bfloat16, buffers too"),
    )
}


def check_keep_batchnorm_fp32(opt_level: str, keep: object) -> None:
    """Refuse a keep_batchnorm_fp32 that the recipe does not take, in one sentence."""
    policy = POLICIES[opt_level]
    if keep is not None and not isinstance(keep, bool):
        raise InputError(f"keep_batchnorm_fp32 is {keep!r}; allowed are True, False and None.")
    if keep in policy.keep_choices:
        return
    if opt_level == "O1":
        raise InputError(
            f"keep_batchnorm_fp32={keep} does not go with O1, which patches the batch norm "
            "function to run in float32 and leaves the layers alone; leave it out (apex itself "
            'says "With opt_level O1, batchnorm functions are automatically patched to run in '
            f'FP32, so keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {keep}").'
        )
    raise InputError(
        f"keep_batchnorm_fp32={keep} belongs to apex's O0, O2 and O3; {opt_level} does not take "
        "it, leave it out."
    )
