"""Experiments in their child processes: every reported configuration, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from syncbn_lab import run as run_experiment
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.run import machine, require_device
from syncbn_lab.run_result import result_from_dict
from syncbn_lab.warm import warm_parent

TOY = Experiment(model="toy")
LINE_109 = "expected device cpu and dtype Float but got device cpu and dtype Half"
GRADIENT = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.HalfTensor but got torch.FloatTensor"
)
NONE = "relu(): argument 'input' (position 1) must be Tensor, not NoneType"
NEXT_CONV_12 = (
    "Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same"
)
NEXT_CONV = "Input type (float) and bias type (c10::Half) should be the same"
LEVELS = {
    "O0": {"opt_level": "O0"},
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2 keep=False": {"opt_level": "O2", "keep_batchnorm_fp32": False},
    "O3 keep=True": {"opt_level": "O3", "keep_batchnorm_fp32": True},
    "O3": {"opt_level": "O3"},
}


def _run(**fields: object):
    return run_experiment(dataclasses.replace(TOY, **fields))


# What each revision does, with both sets of rules: every row was measured once with the real
# apex by other means (a loose script), so a change here is a change of the product.
# None: the run completes; a text: the message of the error.
EXPECTED = {
    ("reported", "torch-1.2"): [None, GRADIENT, LINE_109, None, LINE_109, None],
    ("reported", "installed"): [None, None, NEXT_CONV, None, NEXT_CONV, None],
    ("cast-added", "torch-1.2"): [NONE] * 6,
    ("cast-added", "installed"): [NONE] * 6,
    ("return-fixed", "torch-1.2"): [None, None, NEXT_CONV_12, None, NEXT_CONV_12, None],
    ("return-fixed", "installed"): [None, None, NEXT_CONV, None, NEXT_CONV, None],
}


@pytest.mark.parametrize(("revision", "rules"), EXPECTED)
@pytest.mark.parametrize("level", LEVELS)
def test_every_revision_under_both_rules(revision: str, rules: str, level: str) -> None:
    expected = EXPECTED[revision, rules][list(LEVELS).index(level)]
    result = _run(revision=revision, rules=rules, **LEVELS[level])
    assert result.message == expected
    assert (result.outcome == "completed") == (expected is None)
    reported = revision == "reported" and rules == "torch-1.2" and expected is not None
    assert (result.outcome == "reproduced") == reported


@pytest.mark.parametrize("model", ["toy", "encoder"])
@pytest.mark.parametrize("level", ["O2", "O3 keep=True"])
def test_forward_errors_are_reproduced_at_line_109(level: str, model: str) -> None:
    result = _run(model=model, **LEVELS[level])
    assert result.outcome == "reproduced"
    assert result.messages_match == "but for the device"
    assert result.source == "raised by our rule"
    assert (result.phase, result.error_type) == ("forward", "RuntimeError")
    assert result.file is not None
    assert result.file.endswith("apex/parallel/sync_batchnorm.py")
    assert result.line == 109
    assert result.traceback_line == 108
    assert result.place is not None
    assert "108 to 109" in result.place["note"]
    assert "self.running_mean = self.momentum * mean" in result.place["statement"]
    operands = {name: t["dtype"] for name, t in result.place["operands"].items()}
    assert operands == {"mean": "float16", "self.running_mean": "float32"}
    assert result.dtypes["input"]["dtype"] == "float16"
    assert result.dtypes["weight"]["dtype"] == "float32"
    assert result.verdict == "not judged"


def test_backward_error_of_o1_is_reproduced() -> None:
    result = _run(opt_level="O1")
    assert result.outcome == "reproduced"
    assert result.messages_match == "but for the device"
    assert result.phase == "backward"
    assert result.file is not None
    assert result.file.endswith("sync_batchnorm_kernel.py")
    assert result.line == 87
    assert result.dtypes["input"]["dtype"] == "float16"
    assert result.dtypes["grad_output"]["dtype"] == "float32"
    assert result.dtypes["grad_input"]["dtype"] == "float32"
    assert "SyncBatchnormFunctionBackward" in result.nodes


@pytest.mark.parametrize("rules", ["torch-1.2", "installed"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3 keep=True"])
def test_plain_batch_norm_completes_and_is_right(level: str, rules: str) -> None:
    result = _run(implementation="batchnorm", rules=rules, **LEVELS[level])
    assert (result.outcome, result.verdict, result.findings) == ("completed", "right", [])
    assert result.case is None
    assert result.messages_match is None
    assert "NativeBatchNormBackward0" in result.nodes


def test_o0_with_apex_is_right() -> None:
    result = _run(opt_level="O0")
    assert (result.outcome, result.verdict) == ("completed", "right")
    assert "SyncBatchnormFunctionBackward" in result.nodes


def test_todays_torch_hides_the_o1_error() -> None:
    result = _run(opt_level="O1", rules="installed")
    assert (result.outcome, result.verdict) == ("completed", "degraded")
    assert "y is float32 where float16 belongs" in result.findings[0]
    gradients = [cast for cast in result.silent_casts if cast["gradient_index"] is not None]
    # One per layer: the engine casts the float32 gradient to the input's float16.
    assert [(g["operation"], g["got"], g["expected"]) for g in gradients] == [
        ("SyncBatchnormFunctionBackward", "float32", "float16")
    ] * 2


def test_todays_torch_casts_before_it_fails_under_o2() -> None:
    result = _run(opt_level="O2", rules="installed")
    first = result.silent_casts[0]
    assert (first["operation"], first["result_dtype"]) == ("add", "float32")
    assert first["file"].endswith("sync_batchnorm.py")
    assert first["line"] == 109
    assert result.module == "3"
    # The convolution that today's torch refuses itself is an error, not a silent cast.
    assert all(cast["operation"] != "conv2d" for cast in result.silent_casts)


def test_half_statistics_are_not_right() -> None:
    result = _run(opt_level="O3", rules="installed")
    assert result.verdict in ("degraded", "wrong")
    quantities = {finding.split(": ")[1].split(" is ")[0] for finding in result.findings}
    # The output, normalized with a float16 variance, and the gradient that depends on it.
    assert {"y", "dx"} <= quantities


@pytest.mark.parametrize("policy", ["autocast-fp16", "autocast-bf16"])
def test_the_cure_of_the_readme_runs_and_is_right(policy: str) -> None:
    result = _run(opt_level=policy, implementation="torch", rules="installed")
    assert (result.outcome, result.verdict) == ("completed", "right")


def test_input_is_the_photograph_and_two_threads_work_in_the_child() -> None:
    result = _run(opt_level="O0", implementation="batchnorm")
    assert "grace_hopper.jpg" in result.environment["input"]
    # A convolution on two threads, forked from the warm parent: it hangs when that parent has
    # run anything on its own threads.
    assert result.environment["threads"] == 2
    noise = _run(opt_level="O0", implementation="batchnorm", input="noise")
    assert "noise" in noise.environment["input"]
    assert noise.loss != result.loss


def test_a_run_repeats_bit_for_bit_whatever_ran_before() -> None:
    first = _run(opt_level="O0")
    # O1 patches torch's functions for its whole process; the next run must not see it.
    _run(opt_level="O1")
    second = _run(opt_level="O0")
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)
    assert _run(opt_level="O0", seed=1).loss != first.loss


def test_result_survives_json() -> None:
    result = _run(opt_level="O2")
    again = result_from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.to_dict() == json.loads(json.dumps(result.to_dict()))
    with pytest.raises(InputError, match="schema 99"):
        result_from_dict({**result.to_dict(), "schema": 99})


def test_what_apex_prints_is_kept_and_does_not_reach_the_caller(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = _run(opt_level="O2")
    assert "keep_batchnorm_fp32    : True" in result.log
    assert capfd.readouterr() == ("", "")


def test_two_ranks_are_judged_together() -> None:
    result = _run(opt_level="O0", world_size=2)
    assert (result.outcome, result.verdict) == ("completed", "right")
    # 2 ranks, 4 crops each, 14x14 after the first convolution.
    assert result.layers[0]["count"] == 2 * 4 * 14 * 14


def test_plain_batch_norm_is_judged_rank_by_rank() -> None:
    # Each rank has crops of its own, and nothing is shared: right, though not synchronized.
    result = _run(opt_level="O0", implementation="batchnorm", world_size=2)
    assert (result.outcome, result.verdict, result.findings) == ("completed", "right", [])


def test_two_ranks_reproduce_the_error_and_none_hangs() -> None:
    start = time.monotonic()
    result = _run(opt_level="O2", world_size=2)
    assert result.outcome == "reproduced"
    assert time.monotonic() - start < 30


def test_torch_layer_refuses_several_ranks_on_a_cpu() -> None:
    result = _run(opt_level="O0", implementation="torch", world_size=2, rules="installed")
    assert result.outcome == "different error"
    assert result.message is not None
    assert "SyncBatchNorm expected input tensor to be on GPU" in result.message


def test_steps_move_the_buffers_and_the_last_one_is_judged() -> None:
    result = _run(opt_level="O0", steps=3)
    assert result.verdict == "right"
    assert len({layer["name"] for layer in result.layers}) == len(result.layers) == 2


def test_a_run_past_its_limit_is_an_outcome() -> None:
    result = _run(opt_level="O0", steps=10**6, time_limit=1.0)
    assert result.outcome == "timed out"
    assert "1 s" in result.reason
    # The warm parent goes on.
    assert _run(opt_level="O0").outcome == "completed"


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="finds the child through /proc")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_child_that_is_killed_is_an_outcome(world_size: int) -> None:
    _run(opt_level="O0")
    parent = warm_parent()._process.pid
    found = []
    fields = {"opt_level": "O0", "steps": 10**6, "time_limit": 60.0, "world_size": world_size}
    worker = threading.Thread(target=lambda: found.append(_run(**fields)))
    worker.start()
    while len(_children(parent)) < world_size:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(_children(parent)[0], signal.SIGKILL)
    worker.join(30)
    assert found[0].outcome == "died"
    assert "SIGKILL" in found[0].reason
    assert "memory" in found[0].reason
    assert _children(parent) == []


def test_a_killed_warm_parent_is_started_again() -> None:
    _run(opt_level="O0")
    process = warm_parent()._process
    process.kill()
    process.wait()
    assert _run(opt_level="O0").outcome == "completed"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_the_warm_parent_ends_with_its_client() -> None:
    program = (
        "from syncbn_lab.run import machine; from syncbn_lab.warm import warm_parent; machine()\n"
        "print(warm_parent()._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


def test_an_interrupted_run_leaves_no_reply_for_the_next_one() -> None:
    program = (
        "import signal, syncbn_lab as lab\n"
        "toy = lab.Experiment(opt_level='O0', model='toy')\n"
        "lab.run(toy)\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.5)\n"
        "try:\n"
        "    lab.run(toy.replace(steps=10**6))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', lab.run(toy.replace(opt_level='O2')).outcome)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "interrupted reproduced", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes in /proc")
def test_nothing_runs_on_when_the_client_is_killed() -> None:
    program = (
        "from syncbn_lab.run import machine; from syncbn_lab.warm import warm_parent; machine()\n"
        "import syncbn_lab as lab; print(warm_parent()._process.pid, flush=True)\n"
        "lab.run(lab.Experiment(opt_level='O0', model='toy', steps=10**6))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        parent = int(client.stdout.readline())
        while not (children := _children(parent)):
            time.sleep(0.01)
        client.kill()
    deadline = time.monotonic() + 10
    left = {parent, *children}
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if Path(f"/proc/{pid}").exists()}
        time.sleep(0.05)
    assert not left


def test_runs_from_two_threads_take_turns() -> None:
    found = []
    workers = [
        threading.Thread(target=lambda level=level: found.append(_run(opt_level=level)))
        for level in ("O0", "O2")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(result.outcome for result in found) == ["completed", "reproduced"]


def test_a_gpu_that_is_not_there() -> None:
    if machine()["cuda_available"]:
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match=r"device is 'cuda', but torch .* allowed here is cpu"):
        require_device(Experiment(device="cuda"))
    result = _run(device="cuda")
    assert result.outcome == "not runnable here"
    assert "sees no GPU" in result.reason


def test_a_callers_folder_does_not_shadow_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    program = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        "import syncbn_lab as lab\n"
        "print(lab.run(lab.Experiment(opt_level='O0', model='toy')).outcome)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "completed", done.stderr
