"""What one rank of one experiment does, in its own process.

The only module that knows implementations, precision recipes, dtype rules and tracing at once.
The process serves this one run, because apex's O1 patches torch's functions and the stand-ins
patch torch itself: neither can be undone for sure. It is forked from the warm parent, or it is
another interpreter with a torch of its own (``elsewhere.py``). So this module, and all that it
imports, keeps to Python 3.6, the standard library and what torch has had since 1.2.
"""

import contextlib
import datetime
import json
import linecache
import os
import platform
import re
import sys
import traceback
from types import FrameType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch

from syncbn_lab import models, recipes
from syncbn_lab.errors import InputError
from syncbn_lab.implementations import loading, pair
from syncbn_lab.layers import LayerRecord, LayerRecorder, copy
from syncbn_lab.trace.frames import FrameRecord, FrameRecorder, describe_tensor, failing_frame

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# The frames of the machinery itself are never the place of an error; the models' are.
_MACHINERY = tuple(
    os.path.join(_FOLDER, name)
    for name in ("rules", "trace", "layers.py", "child.py", "recipes.py", "elsewhere.py")
)
# What each name stands for in the functions that the frame recorder watches.
_ROLES = ("input", "mean", "var", "running_mean", "running_var", "weight", "bias", "output")


class Work(NamedTuple):
    """What a rank has to do, made ready by the process that starts it."""

    experiment: Any
    """``Experiment``, or its fields in another interpreter."""
    policy: Any
    """``Policy``, or its fields."""
    fallback: Optional[Tuple[str, str]]
    """File name and text of apex's ``sync_batchnorm.py``; None for the installed one, or none."""
    x: Any
    """This rank's input, float32, on the CPU."""
    labels: Any
    input_origin: str
    parameters: Optional[Dict[str, Any]] = None
    """The model's initial parameters; None to draw them here."""
    rules: Any = None
    """A context manager that obeys or notes torch 1.2's dtype rules; None for this torch's own."""


def run_rank(prepare: Callable[[], Work], rank: int, folder: str) -> None:
    """Run one rank and leave ``rank<r>.json`` and ``rank<r>.pt`` in ``folder``."""
    records: List[LayerRecord] = []
    try:
        work = prepare()
        torch.set_num_threads(max(1, 2 // work.experiment.world_size))
        with _process_group(work.experiment, rank, folder):
            result, records = _train(work, rank)
    except InputError as error:
        result = {"status": "not runnable", "message": str(error)}
    except BaseException:
        # A fault of this kit, not of the experiment: the parent shows it as what it is.
        result = {"status": "broken", "message": traceback.format_exc()}
    path = os.path.join(folder, f"rank{rank}")
    torch.save([vars(record) for record in records], path + ".pt")
    with open(path + ".tmp", "w") as file:
        json.dump(result, file)
    # The parent takes the file's existence for the end of the work, so it appears whole.
    os.rename(path + ".tmp", path + ".json")


def _train(work: Work, rank: int) -> Tuple[Dict[str, Any], List[LayerRecord]]:
    experiment = work.experiment
    device = _device(experiment, rank)
    shift = experiment.dtype_pair == "float-double"
    loaded = None
    if experiment.needs_apex:
        loaded = loading.load(work.fallback, experiment.device, shift)
    elif shift:
        pair.install()
    full = pair.shifted(torch.float32)
    x, labels = work.x.to(device, full), work.labels.to(device)
    if experiment.model == "layer":
        # Nothing stands before the layer, so the input itself has to ask for its gradient.
        x.requires_grad_()
    loss_function = models.loss_function(experiment.model, labels)
    model = models.build(experiment.model, experiment.seed)
    if work.parameters is not None:
        model.load_state_dict(work.parameters)
    model = _convert(experiment, model, loaded)
    model.to(device, full)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    watched: Set[str] = set()
    if loaded and experiment.implementation == "apex":
        watched = set(loaded.files.values())
    layers = LayerRecorder(model)
    frames = FrameRecorder(watched, on_return=lambda frame: _keep_statistics(frame, layers))
    if loaded and watched and not hasattr(torch.autograd, "set_multithreading_enabled"):
        function = loaded.SyncBatchnormFunction
        function.backward = staticmethod(frames.on_any_thread(function.backward))
    result: Dict[str, Any] = {
        "status": "completed",
        "nodes": [],
        "violations": None,
        "sources": {},
        "environment": _environment(experiment, device, work.input_origin, loaded),
    }
    phase = "set-up"
    noted: Any = None
    try:
        with _calling_thread(), work.rules or _nothing() as noted, frames, layers:
            recipe = recipes.apply(
                work.policy,
                experiment.keep_batchnorm_fp32,
                model,
                optimizer,
                experiment.device,
                loaded.amp if loaded else None,
            )
            for step in range(experiment.steps):
                phase = "forward"
                # Judged and shown is the last step; earlier ones only move the buffers.
                layers.records.clear()
                frames.records.clear()
                optimizer.zero_grad()
                output, loss = recipe.forward(x, loss_function)
                if step == 0:
                    result["nodes"] = sorted(_node_names(loss))
                phase = "backward"
                recipe.backward(loss)
                phase = "optimizer step"
                recipe.step()
        result["loss"] = float(loss.detach())
        result["output_dtype"] = describe_tensor(output)["dtype"]
    except InputError:
        raise
    except Exception as error:
        result.update(_describe_error(error, phase, watched, layers))
    if experiment.device == "cuda":
        torch.cuda.synchronize()
    if noted is not None:
        result["violations"] = [vars(violation) for violation in noted.violations]
    result["dtypes"] = _dtypes(layers, frames)
    result["frames"] = [record._asdict() for record in frames.records]
    if result["status"] == "raised":
        # The parent may not have these files: a rebuilt revision lies on no disk.
        result["sources"] = {name: "".join(linecache.getlines(name)) for name in watched}
    return result, layers.records if result["status"] == "completed" else []


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def _calling_thread() -> Any:
    """Keep backward from a worker thread, where a profile function sees nothing."""
    switch = getattr(torch.autograd, "set_multithreading_enabled", None)
    return _nothing() if switch is None else switch(False)


def _device(experiment: Any, rank: int) -> torch.device:
    if experiment.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            f"device is 'cuda', but torch {torch.__version__} sees no GPU here; allowed here is "
            "cpu (`python -m syncbn_lab doctor` says why)."
        )
    return torch.device("cuda", rank % torch.cuda.device_count())


@contextlib.contextmanager
def _process_group(experiment: Any, rank: int, folder: str) -> Iterator[None]:
    """Join the ranks of this run through a file in its folder; nothing at world size 1."""
    if experiment.world_size == 1:
        yield
        return
    own_gpus = experiment.device == "cuda" and torch.cuda.device_count() >= experiment.world_size
    if own_gpus:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if own_gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=experiment.world_size,
        timeout=datetime.timedelta(seconds=experiment.time_limit),
    )
    yield
    torch.distributed.destroy_process_group()


def _convert(experiment: Any, model: Any, loaded: Optional[loading.LoadedApex]) -> Any:
    if experiment.implementation == "apex":
        assert loaded is not None
        return loaded.convert_syncbn_model(model)
    if experiment.implementation == "torch":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def _environment(
    experiment: Any, device: torch.device, origin: str, loaded: Optional[loading.LoadedApex]
) -> Dict[str, Any]:
    return {
        "torch": torch.__version__,
        "torch_git_version": torch.version.git_version,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if experiment.device == "cuda" else "cpu",
        "input": origin,
        "threads": torch.get_num_threads(),
        "stand_ins": list(loaded.stand_ins) if loaded else [],
        "apex_folder": os.path.dirname(str(sys.modules["apex"].__file__)) if loaded else None,
    }


def _keep_statistics(frame: FrameType, layers: LayerRecorder) -> None:
    """Keep a layer's own batch statistics, where its forward calls them mean and var."""
    record = layers.record_of(frame.f_locals.get("self"))
    if record is None or frame.f_code.co_name != "forward":
        return
    for name, slot in (("mean", "batch_mean"), ("var", "batch_var")):
        value = frame.f_locals.get(name)
        if isinstance(value, torch.Tensor):
            setattr(record, slot, copy(value))


def _describe_error(
    error: Exception, phase: str, watched: Set[str], layers: LayerRecorder
) -> Dict[str, Any]:
    violation = getattr(error, "violation", None)  # of one of our rules
    return {
        "status": "raised",
        "phase": phase,
        "error_type": "RuntimeError" if violation is not None else type(error).__name__,
        "message": _message(error),
        "by_rule": violation is not None,
        "recorded": _plain(getattr(error, "recorded", None)),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "module": layers.failing_module if phase == "forward" else None,
        "place": failing_frame(error, watched, _MACHINERY),
    }


def _plain(evidence: Any) -> Optional[Dict[str, Any]]:
    return None if evidence is None else dict(vars(evidence))


def _message(error: Exception) -> str:
    """The error's text without the frames of torch's C++ code that torch 1.x put below it."""
    text = re.split(r"\nframe #\d+:", str(error))[0]
    return re.sub(r"\s*\([^()]* at /\S+:\d+\)$", "", text).strip()


def _dtypes(layers: LayerRecorder, frames: FrameRecorder) -> Dict[str, Dict[str, Any]]:
    """Dtype, device and shape by role, in the layer where the error was raised or the first.

    What apex's own functions held comes first; the layer's hooks fill in the rest.
    """
    found: Dict[str, Dict[str, Any]] = {}
    forwards = [r for r in frames.records if r.function == "SyncBatchNorm.forward"]
    backwards = [r for r in frames.records if r.function == "SyncBatchnormFunction.backward"]
    if backwards and _gradient_shape(backwards[-1]) is not None:
        # The forward of the very layer whose backward ran last.
        shape = _gradient_shape(backwards[-1])
        same = [r for r in forwards if r.arguments.get("input", {}).get("shape") == shape]
        forwards = same[:1] if len(backwards) > 1 else same[-1:]
    if forwards:
        record = forwards[-1]
        if "input" in record.arguments:
            found["input"] = record.arguments["input"]
        for role in _ROLES:
            value = record.tensors.get(f"self.{role}") or record.tensors.get(role)
            if value is not None:
                found.setdefault(role, value)
    if backwards:
        # The first to run in backward is the last layer; a refused gradient is its.
        record = backwards[-1]
        for role in ("grad_output", "grad_input", "grad_weight", "grad_bias"):
            value = record.arguments.get(role) or record.tensors.get(role)
            if value is not None:
                found[role] = value
    if layers.records:
        layer = layers.records[0]
        for role, tensor in (
            ("input", layer.x),
            ("running_mean", layer.running_mean_before),
            ("running_var", layer.running_var_before),
            ("weight", layer.weight),
            ("bias", layer.bias),
            ("output", layer.y if layer.y.numel() else None),
            ("grad_output", layer.dy),
            ("grad_input", layer.dx),
            ("grad_weight", layer.dweight),
            ("grad_bias", layer.dbias),
        ):
            if tensor is not None and role not in found:
                # The copy is on the CPU, wherever the tensor was.
                found[role] = dict(describe_tensor(tensor), device=None)
    return found


def _gradient_shape(record: FrameRecord) -> Optional[List[int]]:
    """Shape of the input's gradient in a record of the layer's backward."""
    gradient = record.tensors.get("grad_input")
    return gradient["shape"] if gradient else None


def _node_names(loss: torch.Tensor) -> Set[str]:
    """Names of all autograd nodes behind a loss: which code really ran."""
    seen: Set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(function for function, _ in node.next_functions)
    # torch 1.x gives a node no name() where Python made it.
    return {node.name() if hasattr(node, "name") else type(node).__name__ for node in seen}
