"""Float formats: unit roundoff, and errors counted in units in the last place (ulp).

The ulp of a dtype at a value v is the distance between neighbouring numbers of that dtype in
v's binade: 2^(e − p + 1) for 2^e <= |v| < 2^(e+1) and p significant bits, and never below the
smallest subnormal (Goldberg 1991; Muller et al., "Handbook of Floating-Point Arithmetic", 2.6).
"""

from __future__ import annotations

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype without its "torch." prefix."""
    return str(dtype).removeprefix("torch.")


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest: 2^-11, 2^-8, 2^-24 or 2^-53."""
    return torch.finfo(dtype).eps / 2


def smallest_subnormal(dtype: torch.dtype) -> float:
    """Smallest positive number of the dtype: 2^-24 for float16, 2^-149 for float32."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The ulp of ``dtype`` at each value, in float64, same shape as ``value``."""
    info = torch.finfo(dtype)
    magnitude = value.to(torch.float64).abs().clamp(min=info.tiny)
    # frexp gives v = m·2^e with 0.5 <= m < 1, so the binade starts at 2^(e − 1) = v/(2m), and
    # the division is exact. torch.ldexp won't do: given a scalar to broadcast, it warns.
    mantissa, _ = torch.frexp(magnitude)
    return info.eps * (magnitude / (2 * mantissa))
