"""The experiment: everything that decides what one run does, in one frozen dataclass.

Nothing here imports torch: an experiment can be made, checked and compared by a process that
never runs it. Every field is checked when the experiment is made, before any work starts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.implementations import IMPLEMENTATIONS
from syncbn_lab.implementations.revisions import REVISION_NAMES
from syncbn_lab.policies import POLICIES, check_keep_batchnorm_fp32

RULES = {
    "torch-1.2": "this torch made to obey torch 1.2's dtype rules on CUDA",
    "installed": "this torch's own rules, as it is",
    "recorded": "a real torch 1.2.0 on a CPU, live or as it was recorded, with (float, double) in "
    "the place of (half, float)",
}
DTYPE_PAIRS = {
    "half-float": "the pair that mixed precision mixes",
    "float-double": "one precision higher, for a torch without half arithmetic on its CPU",
}
DEVICES = ("cpu", "cuda")
MODELS = {
    "encoder": "a small residual encoder (convolution, batch norm, ReLU, skip connection, "
    "stride 2), 4x3x32x32",
    "toy": "Conv-BN-ReLU-Conv-BN, the size of a bug report, 4x3x16x16",
    "layer": "one batch norm layer of 3 channels by itself, 8x3x128x128: 131072 values a channel",
}
INPUTS = {
    "photo": "crops of the photograph that ships with matplotlib (grace_hopper.jpg)",
    "noise": "seeded normal noise, mean 0.5 and standard deviation 0.25",
}
MAX_WORLD_SIZE = 16
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment; ``lab.run`` carries it out in a fresh child process.

    Raises
    ------
    InputError
        When a field has a value that is not allowed; the sentence lists what is.
    """

    opt_level: str = "O2"
    """The precision recipe: apex's O0 to O3, or another of ``policies.POLICIES``."""
    keep_batchnorm_fp32: bool | None = None
    """apex amp's argument of that name; None leaves the opt_level's own default."""
    implementation: str = "apex"
    """The batch norm layer under test."""
    revision: str = "reported"
    """Which of apex's ``sync_batchnorm.py``; of no meaning for other implementations."""
    rules: str = "torch-1.2"
    """Whose dtype rules hold."""
    device: str = "cpu"
    world_size: int = 1
    """Ranks; each is a process with its own share of the input."""
    model: str = "encoder"
    input: str = "photo"
    seed: int = 0
    """Seeds the parameters, the crops and the labels."""
    steps: int = 1
    """Training steps: forward, backward and optimizer step."""
    time_limit: float = 120.0
    """Seconds after which the run is ended and its outcome is `timed out`."""
    dtype_pair: str = "half-float"
    """Which two dtypes stand for low and full precision."""
    python: str | None = None
    """Another interpreter with a torch of its own; None for this one. Only its torch is needed."""

    def __post_init__(self) -> None:
        _check_choice("opt_level", self.opt_level, POLICIES)
        check_keep_batchnorm_fp32(self.opt_level, self.keep_batchnorm_fp32)
        _check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        _check_choice("revision", self.revision, REVISION_NAMES)
        _check_choice("rules", self.rules, RULES)
        _check_choice("device", self.device, DEVICES)
        _check_choice("model", self.model, MODELS)
        _check_choice("input", self.input, INPUTS)
        _check_choice("dtype_pair", self.dtype_pair, DTYPE_PAIRS)
        self._check_torch()
        _check_integer("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        _check_integer("steps", self.steps, 1, 10**6)
        number = isinstance(self.time_limit, int | float) and not isinstance(self.time_limit, bool)
        if not number or not 0 < self.time_limit < 86400:
            raise InputError(
                f"time_limit is {self.time_limit!r}; allowed is a number of seconds above 0 "
                "and below 86400."
            )

    def _check_torch(self) -> None:
        """Whose torch it is, and what that rules out."""
        if self.python is not None:
            if not isinstance(self.python, str) or not self.python:
                raise InputError(
                    f"python is {self.python!r}; allowed is the path of an interpreter, or None."
                )
            if self.rules != "installed":
                raise InputError(
                    f"rules={self.rules!r} does not go with another interpreter, which has a torch "
                    "of its own: rules='installed' is allowed."
                )
        policy = POLICIES[self.opt_level]
        if self.rules == "recorded" and (self.device != "cpu" or self.dtype_pair != "half-float"):
            raise InputError(
                "rules='recorded' is a real torch 1.2 on a CPU, which shifts the dtype pair by "
                "itself: device='cpu' and dtype_pair='half-float' are allowed."
            )
        shifted = self.rules == "recorded" or self.dtype_pair != "half-float"
        if shifted and policy.kind != "apex" and policy.name != "half":
            raise InputError(
                f"{policy.name} can't be run with the dtype pair shifted to (float, double); "
                "O0, O1, O2, O3 and half can."
            )
        if shifted and self.device != "cpu":
            raise InputError("dtype_pair='float-double' is for a CPU: device='cpu' is allowed.")

    def replace(self, **changes: Any) -> Experiment:
        """Return a copy with some fields changed, checked like a new one."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @property
    def configuration(self) -> str:
        """The precision recipe as people write it: "O3 + keep_batchnorm_fp32=True"."""
        if self.keep_batchnorm_fp32 is None:
            return self.opt_level
        return f"{self.opt_level} + keep_batchnorm_fp32={self.keep_batchnorm_fp32}"

    @property
    def keeps_batchnorm_fp32(self) -> bool | None:
        """keep_batchnorm_fp32 as it is at work: the recipe's own where it was left out."""
        if self.keep_batchnorm_fp32 is None:
            return POLICIES[self.opt_level].own_keep
        return self.keep_batchnorm_fp32

    @property
    def needs_apex(self) -> bool:
        """Whether real apex takes part: as the recipe, as the layer, or both."""
        return POLICIES[self.opt_level].kind == "apex" or self.implementation == "apex"

    def describe(self) -> str:
        """Return one line that tells this experiment from its neighbours."""
        layer = self.implementation
        if layer == "apex":
            layer += f" ({self.revision})"
        more = f", {self.world_size} ranks" if self.world_size > 1 else ""
        if self.dtype_pair != "half-float":
            more += f", {self.dtype_pair} for half-float"
        if self.python is not None:
            more += f", in {self.python}"
        return (
            f"{self.configuration}, {layer}, {self.rules} rules, {self.model}, {self.device}{more}"
        )


def experiment_from_dict(fields: dict[str, Any]) -> Experiment:
    """Make an experiment of plain values; an unknown name is an InputError that lists the names."""
    known = [field.name for field in dataclasses.fields(Experiment)]
    unknown = sorted(str(name) for name in set(fields) - set(known))
    if unknown:
        raise InputError(
            f"an experiment has no field {', '.join(unknown)}; its fields are {', '.join(known)}."
        )
    return Experiment(**fields)


def _check_choice(name: str, value: object, allowed: Any) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(f"{name} is {value!r}; allowed is a whole number from {low} to {high}.")
