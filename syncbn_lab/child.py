"""What one rank of one experiment does, in its own process.

The only module that knows implementations, precision recipes, dtype rules and tracing at once.
The process is forked from the warm parent for this one run, because apex's O1 patches torch's
functions and the stand-ins patch torch itself: neither can be undone for sure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import platform
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.serialization  # torch.load imports it lazily, in every child otherwise

from syncbn_lab import models, policies
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations import IMPLEMENTATIONS
from syncbn_lab.implementations import apex as apex_implementation
from syncbn_lab.layers import LayerRecord, LayerRecorder, copy
from syncbn_lab.numerics.formats import dtype_name
from syncbn_lab.rules import Torch12RuleError, Violation, torch12_rules
from syncbn_lab.trace.frames import FrameRecord, FrameRecorder
from syncbn_lab.trace.place import Place, place_of, statement_at

# The frames of the machinery itself are never the place of an error; the models' are.
_MACHINERY = tuple(
    str(Path(__file__).resolve().parent / name)
    for name in ("rules", "trace", "layers.py", "child.py", "policies.py")
)
# What each name stands for in the functions that the frame recorder watches.
_ROLES = ("input", "mean", "var", "running_mean", "running_var", "weight", "bias", "output")


def prepare() -> None:
    """Do once, in the warm parent, what every child would do anew; no tensor is touched."""
    with contextlib.suppress(InputError):
        apex_implementation.require_apex()
    photo = models.sample_photo()
    if photo is not None:
        models.read_photo(photo)


def run_rank(experiment: Experiment, rank: int, folder: Path) -> None:
    """Run one rank and leave ``rank<r>.json`` and ``rank<r>.pt`` in ``folder``."""
    torch.set_num_threads(max(1, 2 // experiment.world_size))
    try:
        with _process_group(experiment, rank, folder):
            result, records = _train(experiment, rank)
    except InputError as error:
        result, records = {"status": "not runnable", "message": str(error)}, []
    except BaseException:
        # A fault of this kit, not of the experiment: the parent shows it as what it is.
        result, records = {"status": "broken", "message": traceback.format_exc()}, []
    torch.save([vars(record) for record in records], folder / f"rank{rank}.pt")
    scratch = folder / f"rank{rank}.tmp"
    scratch.write_text(json.dumps(result))
    # The parent takes the file's existence for the end of the work, so it appears whole.
    scratch.rename(folder / f"rank{rank}.json")


def judge_run(experiment: Experiment, folder: Path) -> None:
    """Judge the records that the ranks left, in a process that apex never patched."""
    from syncbn_lab.verdict import judge

    # weights_only builds a list of allowed names first, 15 ms; these files are our own.
    ranks = [
        [LayerRecord(**fields) for fields in torch.load(path, weights_only=False)]
        for path in sorted(folder.glob("rank*.pt"))
    ]
    try:
        judged = judge(ranks, IMPLEMENTATIONS[experiment.implementation].synchronized)
    except ValueError as error:
        judged = {"verdict": "not judged", "findings": [str(error)], "layers": []}
    (folder / "verdict.json").write_text(json.dumps(judged))


def describe_machine(folder: Path) -> None:
    """Leave ``machine.json``: what torch finds here. A child asks, so the parent stays clean."""
    available = torch.cuda.is_available()
    found = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": available,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if available
        else [],
    }
    (folder / "machine.json").write_text(json.dumps(found))


def _train(experiment: Experiment, rank: int) -> tuple[dict[str, Any], list[LayerRecord]]:
    policy = policies.POLICIES[experiment.opt_level]
    device = _device(experiment, rank)
    loaded = (
        apex_implementation.load(experiment.revision, device=experiment.device)
        if experiment.needs_apex
        else None
    )
    x, labels, origin = models.load_input(experiment.input, experiment.model, experiment.seed, rank)
    x, labels = x.to(device), labels.to(device)
    if experiment.model == "layer":
        # Nothing stands before the layer, so the input itself has to ask for its gradient.
        x.requires_grad_()
    loss_function = models.loss_function(experiment.model, labels)
    model = _convert(experiment, models.build(experiment.model, experiment.seed), loaded)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    watched = (
        set(loaded.files.values()) if loaded and experiment.implementation == "apex" else set()
    )
    layers = LayerRecorder(model)
    frames = FrameRecorder(watched, on_return=lambda frame: _keep_statistics(frame, layers))
    result: dict[str, Any] = {
        "status": "completed",
        "nodes": [],
        "silent_casts": [],
        "source_text": None,
        "environment": _environment(experiment, device, origin, loaded),
    }
    phase = "set-up"
    rules = torch12_rules(on_violation="raise" if experiment.rules == "torch-1.2" else "record")
    noted: Any = None
    # On a GPU backward runs on a worker thread, where a profile function sees nothing.
    calling_thread = torch.autograd.set_multithreading_enabled(False)
    try:
        with calling_thread, rules as noted, frames, layers:
            recipe = policies.apply(
                policy,
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
        result["output_dtype"] = dtype_name(output.dtype)
    except Exception as error:
        result.update(_describe_error(error, phase, watched, layers, frames))
    if experiment.device == "cuda":
        torch.cuda.synchronize()
    if experiment.rules == "installed":
        # What today's torch refuses as well has no result, and is an error, not a silent cast.
        result["silent_casts"] = [
            dataclasses.asdict(violation)
            for violation in noted.violations
            if violation.result_dtype is not None or violation.gradient_index is not None
        ]
    result["dtypes"] = _dtypes(layers, frames)
    result["frames"] = [dataclasses.asdict(record) for record in frames.records]
    file = (result.get("place") or {}).get("file")
    if file in watched:
        result["source_text"] = "".join(linecache.getlines(file))
    return result, layers.records if result["status"] == "completed" else []


def _device(experiment: Experiment, rank: int) -> torch.device:
    if experiment.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "device is 'cuda', but torch sees no GPU here; allowed here is cpu "
            "(`python -m syncbn_lab doctor` says why)."
        )
    return torch.device("cuda", rank % torch.cuda.device_count())


@contextlib.contextmanager
def _process_group(experiment: Experiment, rank: int, folder: Path) -> Iterator[None]:
    """Join the ranks of this run through a file in its folder; nothing at world size 1."""
    if experiment.world_size == 1:
        yield
        return
    import datetime

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


def _convert(experiment: Experiment, model: torch.nn.Module, loaded: Any) -> torch.nn.Module:
    if experiment.implementation == "apex":
        return loaded.convert_syncbn_model(model)
    if experiment.implementation == "torch":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def _environment(
    experiment: Experiment, device: torch.device, origin: str, loaded: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if experiment.device == "cuda" else "cpu",
        "input": origin,
        "threads": torch.get_num_threads(),
        "apex": None,
        "stand_ins": [],
    }
    if loaded:
        found["apex"] = loaded.info.as_dict()
        found["stand_ins"] = list(loaded.stand_ins)
    return found


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
    error: Exception, phase: str, watched: set[str], layers: LayerRecorder, frames: FrameRecorder
) -> dict[str, Any]:
    violation = error.violation if isinstance(error, Torch12RuleError) else None
    ours = violation is not None
    torch_name = f"torch {torch.__version__.partition('+')[0]}"
    place = place_of(error, watched, _MACHINERY)
    described: dict[str, Any] = {
        "status": "raised",
        "phase": phase,
        "error_type": "RuntimeError" if ours else type(error).__name__,
        "message": str(error),
        "source": "raised by our rule" if ours else f"raised by {torch_name}",
        "violation": dataclasses.asdict(violation) if violation is not None else None,
        "traceback": "".join(traceback.format_exception(error)),
        "module": layers.failing_module if phase == "forward" else None,
        "place": None,
    }
    if violation is not None and violation.gradient_index is not None:
        described["place"] = _place_of_gradient(violation, place, frames)
    elif place is not None:
        described["place"] = dataclasses.asdict(place) | {"note": _line_note(place)}
    if not ours and place is not None and place.statement.lstrip().startswith("raise "):
        # Raised in Python, by the code that stands there; what C++ raises is torch's.
        described["source"] = f"raised by {Path(place.file).name} on {torch_name}"
    return described


def _line_note(place: Place) -> str | None:
    if place.line == place.traceback_line:
        return None
    return (
        f"The statement stands on lines {place.statement_lines[0]} to {place.statement_lines[1]}. "
        f"Python 3.6 and 3.7 name the last line in a traceback, {place.line}; Python 3.8 and newer "
        f"name the first, so this Python's own traceback says {place.traceback_line}."
    )


def _place_of_gradient(
    violation: Violation, raw: Place | None, frames: FrameRecorder
) -> dict[str, Any]:
    """The statement that returned the refused gradient, from the record of that backward.

    The engine raises after backward has returned, so the traceback ends in torch; a user has
    to look at the return statement of the function that the message names.
    """
    raw_file = Path(raw.file).name if raw else "torch"
    raw_line = raw.traceback_line if raw else None
    wanted = f"{violation.operation.removesuffix('Backward')}.backward"
    for record in reversed(frames.records):
        if record.function == wanted:
            source = "".join(linecache.getlines(record.file))
            first, last, names = statement_at(source, record.line)
            returned = {name: record.tensors[name] for name in names if name in record.tensors}
            return {
                "file": record.file,
                "line": record.line,
                "traceback_line": raw_line,
                "function": record.function,
                "statement": "\n".join(source.splitlines()[first - 1 : last]),
                "statement_lines": (first, last),
                "operands": returned,
                "note": f"Gradient {violation.gradient_index} is {violation.got} where the "
                f"input's dtype, {violation.expected}, was expected. The autograd engine refused "
                "it after this statement had returned it; the traceback itself ends at the call "
                f"that started backward, {raw_file} line {raw_line}.",
            }
    return {
        "file": raw.file if raw else None,
        "line": raw.line if raw else None,
        "traceback_line": raw_line,
        "function": violation.operation,
        "statement": raw.statement if raw else "",
        "statement_lines": raw.statement_lines if raw else (0, 0),
        "operands": {},
        "note": "The autograd engine refused a gradient of a built-in operation.",
    }


def _dtypes(layers: LayerRecorder, frames: FrameRecorder) -> dict[str, dict[str, Any]]:
    """Dtype, device and shape by role, in the layer where the error was raised or the first.

    What apex's own functions held comes first; the layer's hooks fill in the rest.
    """
    found: dict[str, dict[str, Any]] = {}
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
                found[role] = {
                    "dtype": dtype_name(tensor.dtype),
                    "device": None,
                    "shape": list(tensor.shape),
                }
    return found


def _gradient_shape(record: FrameRecord) -> list[int] | None:
    """Shape of the input's gradient in a record of the layer's backward."""
    gradient = record.tensors.get("grad_input")
    return gradient["shape"] if gradient else None


def _node_names(loss: torch.Tensor) -> set[str]:
    """Names of all autograd nodes behind a loss: which code really ran."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(function for function, _ in node.next_functions)
    return {node.name() for node in seen}


if __name__ == "__main__":
    sys.exit("this module is run by the warm parent; see `python -m syncbn_lab run --help`")
