"""The batch norm layers under test: one file each, behind one small surface.

An implementation converts a model's batch norm layers to its own, describes itself, and names
the autograd node that proves which code really ran. This table needs no torch; the code that
converts is imported inside the child process of an experiment.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One batch norm layer under test."""

    name: str
    description: str
    autograd_nodes: tuple[str, ...]
    """Any of these in the graph proves that the layer ran; the first is the usual one."""
    synchronized: bool = True
    """Whether the ranks of a group share one batch's statistics."""


IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            "batchnorm",
            "plain torch.nn.BatchNorm2d, no synchronization: the control",
            ("NativeBatchNormBackward0", "CudnnBatchNormBackward0"),
            synchronized=False,
        ),
        Implementation(
            "apex",
            "apex.parallel.SyncBatchNorm, its Python fallback, at a revision",
            ("SyncBatchnormFunctionBackward",),
        ),
        Implementation(
            "torch",
            "torch.nn.SyncBatchNorm; at one rank it is plain batch norm",
            ("SyncBatchNormBackward", "NativeBatchNormBackward0", "CudnnBatchNormBackward0"),
        ),
    )
}
