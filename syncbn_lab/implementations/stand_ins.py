"""What real apex needs to run on today's torch, and on a CPU: a few small stand-ins.

apex's amp dates from torch 1.x and from GPUs. It imports ``torch._six``, gone since torch 2.0
(until NVIDIA/apex 6943fd26 of 2023-02-15), and it takes every tensor that is not on a GPU for a
mistake. Each entry below gives it one thing it asks for and changes no arithmetic: tensors stay
real half and float tensors on their real device. On a GPU nothing but ``torch._six`` is used.
Dtypes and errors were the same on a GPU without the other stand-ins as on a CPU with them.

Where a stand-in says something untrue (that a CPU tensor is on a GPU), it says so to apex's own
code only. torch would act on it: ``torch.distributed.broadcast`` asks ``is_cuda`` and then for
the compute capability of a GPU that isn't there.

The stand-ins change torch for the whole process, so they belong into the child process of one
experiment (``loading.load`` installs them there). What they leave alone, tests check: convolution,
batch norm, optimizers, gloo collectives, printing, copying and saving.
"""

import collections.abc
import importlib.util
import math
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch

from syncbn_lab.implementations import pair

_TENSOR_TYPES = ("IntTensor", "FloatTensor", "HalfTensor", "DoubleTensor")


class StandIn(NamedTuple):
    """One thing that apex asks for and that this torch, or a CPU, doesn't have."""

    name: str  # what is put there, as Python writes it
    why: str  # who needs it
    without: str  # what is seen without it: part of the error's text
    on_gpu: bool  # used always, or only where the experiment's device is a CPU
    needed: Callable[[], bool]  # whether this torch lacks it
    install: Callable[[], None]

    @property
    def when(self) -> str:
        """When it is used, in words."""
        return "always, where torch lacks it" if self.on_gpu else "only on a CPU"


def _lacks_six() -> bool:
    if "torch._six" in sys.modules:
        return False
    return importlib.util.find_spec("torch._six") is None


def _install_six() -> None:
    # The three names that apex (and code of its time) takes from it, as torch 1.x defined them.
    six = ModuleType("torch._six", "Stand-in for a module that torch 2.0 removed.")
    six.__dict__.update(string_classes=(str, bytes), container_abcs=collections.abc, inf=math.inf)
    sys.modules["torch._six"] = six
    torch.__dict__["_six"] = six


def _install_nvtx() -> None:
    def no_range(*args: Any, **kwargs: Any) -> int:
        return 0  # the real ones return the range's depth, which nobody here reads

    torch.cuda.nvtx.range_push = no_range
    torch.cuda.nvtx.range_pop = no_range


def _install_tensor_types() -> None:
    # The CPU's own legacy types take the same arguments, have the real dtype, and serve
    # isinstance() and Tensor.type(cls) as the CUDA ones do for CUDA tensors.
    for name in _TENSOR_TYPES:
        setattr(torch.cuda, name, getattr(torch, name))


def _install_is_cuda() -> None:
    real_is_cuda: Any = torch.Tensor.is_cuda  # a C++ attribute of Tensor's base class

    def is_cuda_for_apex(tensor: Any) -> bool:
        return _asked_by_apex() or real_is_cuda.__get__(tensor)

    torch.Tensor.is_cuda = property(is_cuda_for_apex)  # type: ignore[assignment]


def _install_type() -> None:
    real_type = torch.Tensor.type

    def type_for_apex(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(real_type(tensor))
            if not _asked_by_apex():
                return name
            if not name.startswith("torch.cuda."):
                name = "torch.cuda." + name[len("torch.") :]
            return pair.type_name(name)
        if isinstance(dtype, str):
            # "torch.cuda.HalfTensor" asks for half, whoever asks; the tensor stays on the CPU.
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return real_type(tensor, dtype, *args, **kwargs)

    torch.Tensor.type = type_for_apex  # type: ignore[method-assign,assignment]


def _asked_by_apex() -> bool:
    """Whether the code that called the stand-in calling this is apex's own."""
    # Frame 0 is this function, 1 the stand-in, 2 whoever read the attribute.
    module = sys._getframe(2).f_globals.get("__name__", "")
    return module == "apex" or module.startswith("apex.")


def _always() -> bool:
    return True


STAND_INS: Tuple[StandIn, ...] = (
    StandIn(
        "torch._six",
        "apex.amp imports string_classes and container_abcs from it; torch 2.0 removed it",
        "No module named 'torch._six'",
        True,
        _lacks_six,
        _install_six,
    ),
    StandIn(
        "torch.cuda.nvtx.range_push, range_pop",
        "apex's SyncBatchNorm marks ranges for NVIDIA's profiler in forward and backward",
        "NVTX functions not installed",
        False,
        _always,
        _install_nvtx,
    ),
    StandIn(
        "torch.cuda.IntTensor, FloatTensor, HalfTensor, DoubleTensor",
        "apex.amp's loss scaler makes its overflow flag with torch.cuda.IntTensor",
        "type torch.cuda.IntTensor not available",
        False,
        _always,
        _install_tensor_types,
    ),
    StandIn(
        "Tensor.is_cuda",
        "apex.amp refuses parameters that are not on a GPU, and casts only CUDA tensors",
        "expected torch.cuda.FloatTensor",
        False,
        _always,
        _install_is_cuda,
    ),
    StandIn(
        "Tensor.type()",
        "apex.amp sorts an optimizer's parameters by names such as torch.cuda.HalfTensor",
        "Optimizer's parameters must be either torch.cuda.",
        False,
        _always,
        _install_type,
    ),
)
"""Every stand-in, in the order in which apex meets them."""

_installed: Dict[str, None] = {}  # names, in order, of what this process runs with


def install(device: str) -> List[str]:
    """Put the stand-ins that ``device`` needs into this process; twice does no more than once.

    Args:
        device: the experiment's device as torch writes it: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    Returns:
        the names of those in force.

    Raises:
        RuntimeError: those for a CPU are in this process already and ``device`` is a GPU: real
            CUDA tensors would be mixed with stand-ins, and nothing measured then holds.

    """
    on_cpu = device.split(":")[0] == "cpu"
    if not on_cpu and any(s.name in _installed for s in STAND_INS if not s.on_gpu):
        raise RuntimeError(
            f"this process has the stand-ins for a CPU, so nothing can run on {device} in it: "
            "one experiment, one process"
        )
    for stand_in in STAND_INS:
        if stand_in.name in _installed or not (on_cpu or stand_in.on_gpu):
            continue
        if stand_in.needed():
            stand_in.install()
            _installed[stand_in.name] = None
    return list(_installed)


def describe() -> List[Dict[str, str]]:
    """One row a stand-in for a table: ``name``, ``why``, ``when``, ``without``."""
    return [{"name": s.name, "why": s.why, "when": s.when, "without": s.without} for s in STAND_INS]
