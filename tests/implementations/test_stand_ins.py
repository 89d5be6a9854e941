"""The stand-ins: apex fails without each of them, and torch itself goes on as before.

They change torch for a whole process, so every function called ``_in_child_…`` runs in a child of
its own, forked from one parent (this file run as a script) that has imported torch and made no
tensor.
"""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest

import syncbn_lab
from syncbn_lab.implementations import stand_ins

NAMES = [stand_in.name for stand_in in stand_ins.STAND_INS]

# ---------------------------------------------------------------- what runs in the children


def _in_child_apex_without(name):
    """One O2 step of the real apex with every stand-in but ``name``; its error, or None."""
    for stand_in in stand_ins.STAND_INS:
        if stand_in.name != name and stand_in.needed():
            stand_in.install()
    import torch

    try:
        import apex.amp
        import apex.parallel
        from apex.parallel.sync_batchnorm import SyncBatchNorm

        apex.parallel.SyncBatchNorm = SyncBatchNorm
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        model = apex.parallel.convert_syncbn_model(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        loss = model(torch.randn(4, 3, 8, 8)).float().pow(2).mean()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert model[0].weight.dtype == torch.float16
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _work():
    """Ordinary torch, with results to compare bit for bit."""
    import copy
    import io

    import torch
    from torch import nn

    results = {}
    for name, settings in {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        "Adam": {"lr": 0.1},  # foreach=None: torch looks at the parameters' devices
        "AdamW": {"lr": 0.1, "fused": True},
    }.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(6, 5))
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = model[1](model[0](torch.randn(2, 3, 8, 8)))
            model[2](hidden.flatten(0, 1).mean(1, keepdim=True))[0].pow(2).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results[name] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    half = torch.arange(4.0).half()
    results["printed"] = [repr(half), repr(model[0].bias), str(half.cumsum(0))]
    copied = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save({"model": copied.state_dict(), "half": half}, saved)
    saved.seek(0)
    loaded = torch.load(saved)
    results["saved"] = [loaded["half"].tolist(), str(loaded["half"].device)]
    results["same"] = all(torch.equal(loaded["model"][k], v) for k, v in model.state_dict().items())
    with torch.autocast("cpu", torch.bfloat16):
        results["autocast"] = str(model[0](torch.randn(2, 3, 8, 8)).dtype)
    return results


def _in_child_torch_as_before():
    before = _work()
    stand_ins.install("cpu")
    return {"before": before, "after": _work()}


def _in_child_collectives(folder):
    """Two gloo ranks: every collective that a training loop of this kind uses."""
    stand_ins.install("cpu")
    import torch
    import torch.distributed as dist

    child = os.fork()
    rank = 0 if child else 1
    try:
        store = dist.FileStore(os.path.join(folder, "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        results = {}
        for dtype in (torch.float32, torch.float16):
            summed, sent = torch.full((2,), rank + 1.0, dtype=dtype), torch.tensor([rank * 1.0])
            gathered = [torch.zeros(1), torch.zeros(1)]
            dist.all_reduce(summed)
            dist.all_gather(gathered, torch.tensor([float(rank)]))
            dist.broadcast(sent, src=1)  # torch asks is_cuda here, and then about the GPU
            dist.barrier()
            results[str(dtype)] = [summed.tolist(), [g.item() for g in gathered], sent.tolist()]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        results["ddp"] = model.module.weight.grad.tolist()
        dist.destroy_process_group()
    finally:
        if not child:
            os._exit(0)
    os.waitpid(child, 0)
    return results


def _ask(module, expression, **names):
    """Evaluate ``expression`` as code of a module of that name."""
    return eval(expression, {"__name__": module, **names})


def _in_child_answers():
    """Who gets which answer, and that conversions convert."""
    used = stand_ins.install("cpu")
    import torch

    is_cuda = torch.Tensor.is_cuda
    again = stand_ins.install("cpu")
    half = torch.zeros(2, dtype=torch.float16)
    parameter = torch.nn.Parameter(torch.zeros(2))
    wanted = ["torch.cuda.HalfTensor", "torch.HalfTensor", torch.float16]
    wanted += [torch.cuda.HalfTensor, torch.HalfTensor]
    converted = [parameter.type(dtype) for dtype in wanted]
    converted.append(parameter.type(dtype="torch.cuda.HalfTensor", non_blocking=True))
    made = [getattr(torch.cuda, name)([1, 2]) for name in stand_ins._TENSOR_TYPES]
    made += [torch.cuda.FloatTensor(2), torch.cuda.HalfTensor(1, 2)]
    try:
        stand_ins.install("cuda:0")
        refused = None
    except RuntimeError as error:
        refused = str(error)
    return {
        "used": used,
        "twice": [again == used, torch.Tensor.is_cuda is is_cuda],
        "is_cuda": {m: _ask(m, "t.is_cuda", t=half) for m in ("apex", "apex.amp.x", "apexes")},
        "type": {m: _ask(m, "t.type()", t=half) for m in ("apex", "apex.amp.x", "apexes")},
        "parameter": _ask("apex", "[t.is_cuda, t.type()]", t=parameter),
        "converted": [[str(t.dtype), str(t.device)] for t in converted],
        "made": [[str(t.dtype), str(t.device), list(t.shape)] for t in made],
        "isinstance": [
            isinstance(half, getattr(torch.cuda, n)) for n in ("HalfTensor", "IntTensor")
        ],
        "six": _ask(
            "x",
            "[six.string_classes == (str, bytes), six.container_abcs.__name__, six.inf]",
            six=importlib.import_module("torch._six"),
        ),
        "nvtx": [torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_pop()],
        "refused": refused,
    }


def _in_child_on_a_gpu():
    """Install for a GPU; none needs to be there, as nothing is asked of it."""
    import torch

    before = [torch.Tensor.is_cuda, torch.Tensor.type, torch.cuda.IntTensor]
    before += [torch.cuda.nvtx.range_push]
    used = stand_ins.install("cuda:0")
    after = [torch.Tensor.is_cuda, torch.Tensor.type, torch.cuda.IntTensor]
    after += [torch.cuda.nvtx.range_push]
    return [used, all(a is b for a, b in zip(after, before, strict=True))]


def _in_child_with_a_six_of_its_own():
    import types

    own = sys.modules["torch._six"] = types.ModuleType("torch._six")
    used = stand_ins.install("cuda")
    return [used, sys.modules["torch._six"] is own]


def _main(out):
    """Run every child and write what they returned."""
    import torch
    import torch._dynamo  # the first optimizer imports it: once for all children

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    calls = {f"without {name}": (_in_child_apex_without, name) for name in [*NAMES, "nothing"]}
    calls["as before"] = (_in_child_torch_as_before,)
    calls["collectives"] = (_in_child_collectives, os.path.dirname(out))
    calls["answers"] = (_in_child_answers,)
    calls["on a GPU"] = (_in_child_on_a_gpu,)
    calls["own six"] = (_in_child_with_a_six_of_its_own,)
    with get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        waiting = {name: pool.apply_async(f, args) for name, (f, *args) in calls.items()}
        Path(out).write_text(json.dumps({name: w.get(60) for name, w in waiting.items()}))


# ---------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    if importlib.util.find_spec("apex") is None:
        pytest.skip("no apex is installed")
    out = tmp_path_factory.mktemp("children") / "seen.json"
    root = str(Path(syncbn_lab.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_the_set_is_the_documented_one():
    assert NAMES == [
        "torch._six",
        "torch.cuda.nvtx.range_push, range_pop",
        "torch.cuda.IntTensor, FloatTensor, HalfTensor, DoubleTensor",
        "Tensor.is_cuda",
        "Tensor.type()",
    ]


def test_describe_gives_a_row_each():
    rows = stand_ins.describe()
    assert [row["name"] for row in rows] == NAMES
    assert [row["when"] for row in rows] == ["always, where torch lacks it"] + ["only on a CPU"] * 4
    assert all(row["why"] and row["without"] for row in rows)


@pytest.mark.parametrize("stand_in", stand_ins.STAND_INS, ids=lambda stand_in: stand_in.name)
def test_apex_fails_without_each_in_the_stated_way(seen, stand_in):
    error = seen[f"without {stand_in.name}"]
    assert error is not None
    assert stand_in.without in error


def test_apex_runs_with_all_of_them(seen):
    assert seen["without nothing"] is None


def test_torch_itself_goes_on_as_before(seen):
    assert seen["as before"]["after"] == seen["as before"]["before"]
    assert seen["as before"]["after"]["same"]


def test_gloo_collectives_and_ddp_work(seen):
    expected = [[3.0, 3.0], [0.0, 1.0], [1.0]]
    assert seen["collectives"] == {
        "torch.float32": expected,
        "torch.float16": expected,
        "ddp": [[1.5, 1.5]],
    }


def test_only_apex_is_told_that_tensors_are_on_a_gpu(seen):
    answers = seen["answers"]
    assert answers["is_cuda"] == {"apex": True, "apex.amp.x": True, "apexes": False}
    assert answers["type"] == {
        "apex": "torch.cuda.HalfTensor",
        "apex.amp.x": "torch.cuda.HalfTensor",
        "apexes": "torch.HalfTensor",
    }
    assert answers["parameter"] == [True, "torch.cuda.FloatTensor"]


def test_type_still_converts(seen):
    assert seen["answers"]["converted"] == [["torch.float16", "cpu"]] * 6


def test_tensor_types_make_real_tensors_on_the_cpu(seen):
    dtypes = ["torch.int32", "torch.float32", "torch.float16", "torch.float64"]
    expected = [[dtype, "cpu", [2]] for dtype in dtypes]
    expected += [["torch.float32", "cpu", [2]], ["torch.float16", "cpu", [1, 2]]]
    assert seen["answers"]["made"] == expected
    assert seen["answers"]["isinstance"] == [True, False]


def test_the_small_ones(seen):
    assert seen["answers"]["six"] == [True, "collections.abc", float("inf")]
    assert seen["answers"]["nvtx"] == [0, 0]


def test_install_is_idempotent_and_names_what_is_in_force(seen):
    assert seen["answers"]["used"] == NAMES
    assert seen["answers"]["twice"] == [True, True]


def test_on_a_gpu_only_torch_six_is_used(seen):
    assert seen["on a GPU"] == [["torch._six"], True]


def test_a_torch_six_that_is_there_is_kept(seen):
    assert seen["own six"] == [[], True]


def test_a_process_with_the_stand_ins_for_a_cpu_refuses_a_gpu(seen):
    assert "one experiment, one process" in seen["answers"]["refused"]


if __name__ == "__main__":
    _main(sys.argv[1])
