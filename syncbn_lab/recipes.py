"""A precision recipe at work: what stands around forward, backward and the optimizer step.

``policies.py`` has the recipes as data; this runs inside the child process of an experiment.
"""

from typing import Any, Callable, Optional

import torch

from syncbn_lab.errors import InputError
from syncbn_lab.implementations import pair


class Recipe:
    """A policy at work on one model and optimizer."""

    def __init__(
        self,
        model: Any,
        forward: Callable[[Any, Any], Any],
        backward: Callable[[Any], None],
        step: Callable[[], Any],
    ) -> None:
        self.model = model
        self.forward = forward
        """Runs the model on an input and the loss on its output; gives both."""
        self.backward = backward
        """Scales the loss where the recipe does, and runs backward."""
        self.step = step


def apply(
    policy: Any,
    keep_batchnorm_fp32: Optional[bool],
    model: Any,
    optimizer: Any,
    device: str,
    amp: Any = None,
) -> Recipe:
    """Apply a recipe; ``amp`` is the real ``apex.amp`` for the recipes of kind "apex".

    Raises:
        InputError: this torch has no autocast for the device.

    """
    if policy.kind == "apex":
        return _apply_apex(policy, keep_batchnorm_fp32, model, optimizer, amp)
    if policy.kind == "autocast":
        return _apply_autocast(policy, model, optimizer, device)
    return _apply_cast(policy, model, optimizer)


def _apply_apex(policy: Any, keep: Optional[bool], model: Any, optimizer: Any, amp: Any) -> Recipe:
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=policy.name,
        keep_batchnorm_fp32=keep,
        **pair.amp_arguments(policy.name),
    )

    def forward(x: Any, loss_function: Any) -> Any:
        output = model(x)
        return output, loss_function(output)

    def backward(loss: Any) -> None:
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    return Recipe(model, forward, backward, optimizer.step)


def _apply_autocast(policy: Any, model: Any, optimizer: Any, device: str) -> Recipe:
    if not hasattr(torch, "autocast") or not hasattr(torch.amp, "GradScaler"):
        raise InputError(
            f"torch {torch.__version__} has no torch.autocast and torch.amp.GradScaler for every "
            "device (they came with 2.3); allowed here are O0 to O3, half and bf16."
        )
    dtype = getattr(torch, policy.dtype)
    # bfloat16 has float32's exponent range, so only float16 needs its gradients scaled.
    scaler = torch.amp.GradScaler(device, enabled=policy.dtype == "float16")

    def forward(x: Any, loss_function: Any) -> Any:
        # The loss belongs inside: outside it would stay float16, and scaled by 65536 overflow.
        with torch.autocast(device, dtype):
            output = model(x)
            return output, loss_function(output)

    def backward(loss: Any) -> None:
        scaler.scale(loss).backward()

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return Recipe(model, forward, backward, step)


def _apply_cast(policy: Any, model: Any, optimizer: Any) -> Recipe:
    dtype = pair.shifted(getattr(torch, policy.dtype))
    model.to(dtype)

    def forward(x: Any, loss_function: Any) -> Any:
        output = model(x.to(dtype))
        # A float32 loss, as apex's O3 has it.
        return output, loss_function(output.float())

    return Recipe(model, forward, lambda loss: loss.backward(), optimizer.step)
