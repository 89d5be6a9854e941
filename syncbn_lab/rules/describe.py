"""The rules as a table: what torch 1.2 did, how that is known, how it is enforced here."""

from __future__ import annotations

_SEEN = "recorded in torch 1.2.0 on a CPU (data/torch-1.2/rules.csv)"
_REPORT = "report's own text"
_DOCUMENTED = "torch 1.2 documentation"
_MODE = "dispatch mode"
_BOTH = "function mode, dispatch mode"

# (rule, what torch 1.2 did, basis, how it is enforced here)
_ROWS = (
    (
        "elementwise",
        "add, sub, mul, div and lerp refuse tensors with dimensions of different dtypes; a 0-dim "
        "tensor or a Python number never promotes one with dimensions; int / int stays int; "
        "addcmul and addcdiv refuse any difference. The default for every other elementwise "
        "operation that torch 1.2 did not have",
        f"{_SEEN}; {_REPORT}",
        _MODE,
    ),
    (
        "elementwise-same",
        "atan2, fmod, remainder, max, min, dist, cross and bit operations refuse any difference, "
        "0-dim tensors included",
        _SEEN,
        _MODE,
    ),
    ("comparison", "comparisons refuse any difference, 0-dim tensors included", _SEEN, _MODE),
    ("pow", "base and exponent of one dtype; a Python exponent takes the base's", _SEEN, _MODE),
    ("where", "both branches of one dtype, 0-dim tensors included", _SEEN, _MODE),
    ("matmul", "all matrices and vectors of one dtype", _SEEN, _MODE),
    ("conv", "input, weight and bias of one dtype, in cuDNN's wording", _SEEN, _BOTH),
    ("cat", "every element has the first one's dtype", _SEEN, _MODE),
    (
        "index",
        "values written by index have the target's dtype; single 0-dim values are cast",
        _SEEN,
        _MODE,
    ),
    (
        "batch_norm",
        "one dtype for all, or half input with float32 parameters and statistics (CUDA)",
        f"{_SEEN}; the CUDA exception: {_DOCUMENTED}",
        _MODE,
    ),
    ("layer_norm", "layer_norm, group_norm: one dtype for input, weight and bias", _SEEN, _MODE),
    ("prelu", "input and weight of one dtype", _SEEN, _BOTH),
    ("loss", "input, target and weight of one dtype", _SEEN, _BOTH),
    (
        "floating-only",
        "exp, sqrt, sigmoid, mean, std and their like refuse integers",
        _SEEN,
        _MODE,
    ),
    ("truth-only", "all and any refuse everything but bool and uint8", _SEEN, _MODE),
    (
        "gradient",
        "a gradient has the dtype of what it belongs to; its shape is checked first",
        f"{_SEEN}; {_REPORT}",
        "autograd, dispatch mode, function mode (.grad = …)",
    ),
)


def describe_rules() -> list[dict[str, str]]:
    """One row a rule: ``rule``, ``torch_1_2``, ``basis``, ``enforced_by``."""
    columns = ("rule", "torch_1_2", "basis", "enforced_by")
    return [dict(zip(columns, row, strict=True)) for row in _ROWS]


def basis_of(rule: str) -> str:
    """How the rule is known."""
    return next(basis for name, _, basis, _ in _ROWS if name == rule)
