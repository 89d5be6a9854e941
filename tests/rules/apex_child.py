"""Runs real apex.amp under the rules, one forked child per configuration; prints JSON lines.

The five stand-ins are what the 2021 apex needs on today's torch without a GPU. The reported
revision of sync_batchnorm.py is rebuilt from the installed file by editing instructions.
"""

import collections.abc
import hashlib
import importlib.util
import json
import os
import sys
import types
import warnings
from pathlib import Path

import torch
import torch._dynamo
from torch import nn

from syncbn_lab.rules import torch12_rules

REPORTED = "2ffba4aec2cd8865f64d008dd653530242f1bedb799ba9a5b8ef8e34f51ef286"


def stand_ins() -> None:
    six = types.ModuleType("torch._six")
    six.string_classes, six.container_abcs, six.inf = (str, bytes), collections.abc, float("inf")
    sys.modules["torch._six"] = torch._six = six
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *a, **k: 0
    torch.cuda.IntTensor = lambda v: torch.tensor(v, dtype=torch.int32)
    torch.cuda.FloatTensor = lambda v: torch.tensor(v, dtype=torch.float32)
    torch.Tensor.is_cuda = property(lambda self: True)
    plain_type = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        answer = plain_type(self, *args, **kwargs)
        if not isinstance(answer, str) or answer.startswith("torch.cuda."):
            return answer
        return answer.replace("torch.", "torch.cuda.")

    torch.Tensor.type = cuda_type


def reported_source(installed: str) -> str:
    """The file as it was when the issue was reported, from the file of September 2021."""
    lines = installed.splitlines(keepends=True)
    # to `cast-added`
    lines[-1] = lines[-1].replace("return ", "out = ")
    lines[56] = lines[56].removeprefix("    ")
    del lines[57:59], lines[55]
    # to `reported`
    del lines[-1], lines[68:81]
    text = "".join(lines)
    for call in ("F.batch_norm(", "SyncBatchnormFunction.apply("):
        text = text.replace(f"out = {call}", f"return {call}")
    assert hashlib.sha256(text.encode()).hexdigest() == REPORTED
    return text


def experiment(opt_level: str, keep: bool | None, synced: bool) -> dict:
    warnings.simplefilter("ignore")
    stand_ins()
    import apex
    import apex.parallel
    from apex import amp

    if synced:
        module = sys.modules["apex.parallel.sync_batchnorm"]
        source = reported_source(Path(module.__file__).read_text())
        exec(compile(source, "sync_batchnorm.py", "exec"), module.__dict__)
        module.SyncBatchNorm.syncbn_import_error = None  # what apex says about its CUDA class
        apex.parallel.SyncBatchNorm = module.SyncBatchNorm
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    model = nn.Sequential(*layers)
    if synced:
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=opt_level, keep_batchnorm_fp32=keep, verbosity=0
    )
    phase = "forward"
    try:
        with torch12_rules():
            loss = model(torch.randn(2, 3, 8, 8)).pow(2).mean()
            phase = "backward"
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    except RuntimeError as error:
        violation = getattr(error, "violation", None)
        return {
            "message": str(error),
            "phase": phase,
            "file": violation and violation.file,
            "line": violation and violation.line,
        }
    return {"message": "ok"}


def main() -> None:
    torch.set_num_threads(1)
    for opt_level, keep, synced in json.loads(sys.argv[1]):
        if os.fork() == 0:
            try:
                answer = experiment(opt_level, keep, synced)
            except BaseException as error:
                answer = {"message": f"{type(error).__name__}: {error}"}
            print(json.dumps([opt_level, keep, synced, answer]), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    if importlib.util.find_spec("apex") is None:
        sys.exit("apex is not installed")
    main()
