"""The dtype pair (half, float) shifted to (float, double), for a torch without half arithmetic.

torch 1.2 has no half kernels on a CPU, so mixed precision can't run there as it stands. Its
dtype rules don't care which two floating dtypes meet, and apex reaches both by a handful of
names: ``Tensor.half``, ``Tensor.float``, ``Tensor.type()`` and amp's own arguments. With these
names shifted, the same code of apex runs the same way, one precision higher: every "Half" of a
message becomes "Float", every "Float" becomes "Double".

It does not serve ``F.batch_norm`` on mixed dtypes: (half, float) alone had a kernel, on CUDA.
The shift changes torch for the whole process, so it belongs into the child of one experiment.
"""

from typing import Any, Dict, List

import torch

_SHIFT = {torch.float16: torch.float32, torch.float32: torch.float64}
_installed: List[bool] = []  # holds one True once the pair is shifted in this process


def install() -> None:
    """Shift the pair in this process."""
    if _installed:
        return
    # Through Tensor.to, which apex never patches.
    tensor_type: Any = torch.Tensor
    tensor_type.half = lambda tensor: tensor.to(torch.float32)
    tensor_type.float = lambda tensor: tensor.to(torch.float64)
    _installed.append(True)


def shifted(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for this one here: itself, unless the pair is shifted."""
    return _SHIFT.get(dtype, dtype) if _installed else dtype


def type_name(name: str) -> str:
    """What a tensor type is called as far as apex knows: FloatTensor is its HalfTensor."""
    if not _installed:
        return name
    if name.endswith("FloatTensor"):
        return name[: -len("FloatTensor")] + "HalfTensor"
    if name.endswith("DoubleTensor"):
        return name[: -len("DoubleTensor")] + "FloatTensor"
    return name


def amp_arguments(opt_level: str) -> Dict[str, Any]:
    """What ``amp.initialize`` has to be told where its own defaults name a dtype."""
    if not _installed:
        return {}
    arguments: Dict[str, Any] = {"cast_model_outputs": torch.float64}
    if opt_level == "O0":
        arguments["cast_model_type"] = torch.float64
    elif opt_level in ("O2", "O3"):
        arguments["cast_model_type"] = torch.float32
    return arguments
