"""Error messages compared: the same words, but for the device or the dtypes they name."""

from __future__ import annotations

import re

SCALAR_TYPES = {
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
"""What torch's messages call each dtype."""
VERBATIM, DEVICE, PAIR, NO = "verbatim", "but for the device", "but for the dtype pair", "no"
NAME = "but for the name"


def match_message(reported: str | None, seen: str | None) -> str:
    """How far a message is the reported one.

    `verbatim`; `but for the device` (cpu for cuda:0, torch.HalfTensor for
    torch.cuda.HalfTensor, one device for one device); `but for the dtype pair` (each dtype
    consistently another one, in the same order of precision, as in a replay with (float,
    double) for (half, float)); `no`.
    """
    if not reported or not seen:
        return NO
    if seen.strip() == reported.strip():
        return VERBATIM
    if _pattern(_DEVICE_WORDS, reported) != _pattern(_DEVICE_WORDS, seen):
        return NO
    one, other = without_device(reported), without_device(seen)
    if one == other:
        return DEVICE
    if without_dtypes(one) == without_dtypes(other) and dtype_order(one) == dtype_order(other):
        return PAIR
    return NO


# In order of precision, as torch promotes them.
_DTYPES = ("Bool", "Byte", "Int", "Long", "Half", "BFloat16", "Float", "Double")
_DTYPE_WORDS = re.compile(rf"\b({'|'.join(_DTYPES)})(?=Tensor\b|\b)")
_DEVICE_WORDS = re.compile(r"\bcuda:\d+\b|\bcpu\b|\btorch\.(?:cuda\.)?(?=[A-Z]\w*Tensor\b)")


def dtype_called(scalar_type: str) -> str:
    """The dtype that a message calls by this name: float16 for Half."""
    return next((dtype for dtype, name in SCALAR_TYPES.items() if name == scalar_type), scalar_type)


def without_device(message: str) -> str:
    """The message with its device blanked: `cpu`, `cuda:0` and the `cuda.` of a tensor type."""
    text = re.sub(r"\bcuda:\d+\b|\bcpu\b", "<device>", message.strip())
    return text.replace("torch.cuda.", "torch.")


def without_dtypes(message: str) -> str:
    """The message with its dtypes blanked."""
    return _DTYPE_WORDS.sub("<dtype>", message)


def dtype_order(message: str) -> list[int]:
    """Rank of each dtype among the message's own: "Half … Float" and "Float … Double" agree."""
    words = _DTYPE_WORDS.findall(message)
    ranked = sorted(set(words), key=_DTYPES.index)
    return [ranked.index(word) for word in words]


def _pattern(words: re.Pattern[str], message: str) -> list[int]:
    """Which words are the same as which: "cuda:0 … cuda:0" and "cpu … cpu" agree."""
    found = words.findall(message)
    return [found.index(word) for word in found]
