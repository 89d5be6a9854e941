"""Precision recipes as data, and how each one is applied to a model and its optimizer.

The table at the top needs no torch. ``apply`` runs inside the child process of an experiment
and gives back a ``Recipe``: what stands around forward, backward and the optimizer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from syncbn_lab.errors import InputError

if TYPE_CHECKING:
    import torch


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


@dataclasses.dataclass
class Recipe:
    """A policy at work on one model and optimizer."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[Any, Any], tuple[Any, Any]]
    """Runs the model on an input and the loss on its output; gives both."""
    backward: Callable[[Any], None]
    """Scales the loss where the recipe does, and runs backward."""
    step: Callable[[], None]


def apply(
    policy: Policy,
    keep_batchnorm_fp32: bool | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    amp: Any = None,
) -> Recipe:
    """Apply a recipe; ``amp`` is the real ``apex.amp`` for the recipes of kind "apex"."""
    if policy.kind == "apex":
        return _apply_apex(policy, keep_batchnorm_fp32, model, optimizer, amp)
    if policy.kind == "autocast":
        return _apply_autocast(policy, model, optimizer, device)
    return _apply_cast(policy, model, optimizer)


def _apply_apex(policy: Policy, keep: bool | None, model: Any, optimizer: Any, amp: Any) -> Recipe:
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=policy.name, keep_batchnorm_fp32=keep
    )

    def backward(loss: Any) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    def forward(x: Any, loss_function: Any) -> tuple[Any, Any]:
        output = model(x)
        return output, loss_function(output)

    return Recipe(model, optimizer, forward, backward, optimizer.step)


def _apply_autocast(policy: Policy, model: Any, optimizer: Any, device: str) -> Recipe:
    import torch

    dtype = getattr(torch, policy.dtype)
    # bfloat16 has float32's exponent range, so only float16 needs its gradients scaled.
    scaler = torch.amp.GradScaler(device, enabled=policy.dtype == "float16")

    def forward(x: Any, loss_function: Any) -> tuple[Any, Any]:
        # The loss belongs inside: outside it would stay float16, and scaled by 65536 overflow.
        with torch.autocast(device, dtype):
            output = model(x)
            return output, loss_function(output)

    def backward(loss: Any) -> None:
        scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Recipe(model, optimizer, forward, backward, step)


def _apply_cast(policy: Policy, model: Any, optimizer: Any) -> Recipe:
    import torch

    dtype = getattr(torch, policy.dtype)
    model.to(dtype)

    def forward(x: Any, loss_function: Any) -> tuple[Any, Any]:
        output = model(x.to(dtype))
        # A float32 loss, as apex's O3 has it.
        return output, loss_function(output.float())

    return Recipe(model, optimizer, forward, lambda loss: loss.backward(), optimizer.step)
