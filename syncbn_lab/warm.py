"""The warm parent: a process that has imported torch once, and forks a child for every run.

``warm_parent()`` gives the client's end of it; the rest is the process itself. It reads one
request per line from standard input, a JSON object with an experiment, and writes one reply per
line to standard output. It runs no tensor operation and asks nothing of torch.cuda, because
either would break its children: a parent whose thread pool has started leaves forked children
hanging, and a parent that has touched CUDA leaves them without it. For the same reason it holds
torch to one thread before the first fork.

Ranks are forked from it too, one child each, and a last child judges what they left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncbn_lab.errors import InputError
from syncbn_lab.experiment import experiment_from_dict

GRACE = 2.0
"""Seconds that the other ranks get to end by themselves once one rank has failed."""
JUDGE_LIMIT = 120.0
_CLIENT = os.getppid()
"""In the warm parent: the process that started it."""


class WarmParent:
    """The client's end of the warm parent."""

    def __init__(self) -> None:
        package = str(Path(__file__).resolve().parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "syncbn_lab.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The caller's folder must not shadow torch or apex with a file of that name.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
        )
        self._errors: list[str] = []
        self._drain = threading.Thread(target=self._read_errors, daemon=True)
        self._drain.start()
        self._ready: dict[str, Any] | None = None
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request and wait for its reply; one at a time."""
        with self._lock:
            if self._ready is None:
                self._ready = self._receive()
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._fail()
            try:
                return self._receive()
            except BaseException:
                # Interrupted: the reply is still to come, and the next request must not get it.
                self.close()
                raise

    def close(self) -> None:
        """End the warm parent, and with it any child still at work."""
        # It ends its children's process groups and removes what they left before it goes.
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return json.loads(line)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stderr:
                self._errors.append(line)
                del self._errors[:-200]

    def _fail(self) -> None:
        self._process.wait()
        self._drain.join(1.0)
        said = "".join(self._errors).strip()
        last = said.splitlines()[-1] if said else f"exit code {self._process.returncode}"
        raise RuntimeError(
            f"the process that runs experiments ended: {last}\n{said}\n"
            "(`python -m syncbn_lab doctor` checks this installation.)"
        )


_PARENT: WarmParent | None = None
_PARENT_LOCK = threading.Lock()


def warm_parent() -> WarmParent:
    """The warm parent of this process, started when there is none or it has ended."""
    global _PARENT
    with _PARENT_LOCK:
        if _PARENT is None or not _PARENT.alive:
            if not hasattr(os, "fork"):
                raise InputError(
                    "experiments run in forked processes, which this system does not have; "
                    "allowed are Linux and macOS (on Windows, its Linux subsystem)."
                )
            _PARENT = WarmParent()
            atexit.register(_PARENT.close)
        return _PARENT


def serve() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Nothing but replies may reach the client's pipe, whatever torch or apex print.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    import torch
    import torch._dynamo  # torch.optim imports it lazily: 2 s in every child otherwise

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    from syncbn_lab import forked

    forked.prepare()
    # What is here stays for good: no child's garbage collector needs to look at it, and so to
    # copy its pages.
    gc.freeze()
    print(json.dumps({"ready": torch.__version__}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=replies, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="syncbn-lab-"))
    try:
        if "experiment" in request:
            return _run(request["experiment"], folder)
        return _describe(folder)
    except Exception:
        return {"status": "broken", "message": traceback.format_exc()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    from syncbn_lab import forked

    experiment = experiment_from_dict(fields)
    start = time.monotonic()
    deadline = start + experiment.time_limit
    pids = [
        _fork(functools.partial(forked.rank, experiment, rank, folder), folder, f"rank{rank}")
        for rank in range(experiment.world_size)
    ]
    # Forked now, so that it is there when the ranks are done; it waits for a byte to begin.
    waiting, begin = os.pipe()
    judging = _fork(
        functools.partial(forked.judge, experiment, folder, waiting, begin), folder, "judge"
    )
    os.close(waiting)
    ends = _wait(pids, deadline, folder)
    reply: dict[str, Any] = {
        "ranks": [_rank_reply(rank, end, folder) for rank, end in enumerate(ends)]
    }
    completed = all(rank.get("status") == "completed" for rank in reply["ranks"])
    if completed:
        os.write(begin, b"1")
    os.close(begin)
    _wait([judging], time.monotonic() + JUDGE_LIMIT, folder)
    if completed:
        path = folder / "verdict.json"
        reply["verdict"] = json.loads(path.read_text()) if path.exists() else None
        if reply["verdict"] is None:
            reply["judge_log"] = _tail(folder / "judge.log")
    reply["seconds"] = time.monotonic() - start
    return reply


def _describe(folder: Path) -> dict[str, Any]:
    from syncbn_lab import forked

    pid = _fork(lambda: forked.find_devices(folder), folder, "machine")
    _wait([pid], time.monotonic() + 60.0, folder)
    path = folder / "machine.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"status": "broken", "message": _tail(folder / "machine.log")}


def _rank_reply(rank: int, end: tuple[str, int], folder: Path) -> dict[str, Any]:
    path = folder / f"rank{rank}.json"
    said, ended = end
    reply = json.loads(path.read_text()) if path.exists() else {"status": said, "message": said}
    return reply | {"ended": ended, "log": _tail(folder / f"rank{rank}.log")}


def _fork(work: Callable[[], None], folder: Path, name: str) -> int:
    """Fork a child that does one piece of work and ends; its output goes to ``<name>.log``."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        # A group of its own, so that ending it ends whatever it started.
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent()
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's own exit handlers are not this child's to run.
        os._exit(code)


def _die_with_parent() -> None:
    """Ask Linux to end this child when the warm parent ends; elsewhere there is no such call."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def _wait(pids: list[int], deadline: float, folder: Path) -> list[tuple[str, int]]:
    """Wait for all children: what became of each, and in which look around it was seen.

    What became of it is "exited", "timed out" or "died: …". The numbers order the ends: a rank
    that fails takes others with it, and the first one tells why. When one has failed the others
    may wait for it in a collective for ever, so they get ``GRACE`` seconds and are then ended.
    """
    try:
        return _ends(pids, deadline, folder)
    finally:
        # Also when interrupted, or when the client is gone; and what a child left running.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _ends(pids: list[int], deadline: float, folder: Path) -> list[tuple[str, int]]:
    ends: dict[int, tuple[str, int]] = {}
    stop_at = deadline
    look = 0
    while len(ends) < len(pids):
        look += 1
        for pid in pids:
            if pid in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            ends[pid] = _said(status), look
            if not _completed(folder, pids.index(pid)):
                stop_at = min(stop_at, time.monotonic() + GRACE)
        if len(ends) < len(pids) and time.monotonic() > stop_at:
            late = "timed out" if stop_at >= deadline else "died: ended after another rank failed"
            for pid in pids:
                if pid not in ends:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ends[pid] = late, look
        if len(ends) < len(pids):
            if os.getppid() != _CLIENT:
                sys.exit(1)  # the client is gone, and nobody will read the reply
            time.sleep(0.002)
    return [ends[pid] for pid in pids]


def _completed(folder: Path, rank: int) -> bool:
    path = folder / f"rank{rank}.json"
    return path.exists() and json.loads(path.read_text()).get("status") == "completed"


def _said(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return "exited" if code == 0 else f"died: it exited with code {code}"
    name = signal.Signals(-code).name
    hint = "; the system sends it when memory runs out" if name == "SIGKILL" else ""
    return f"died: killed by {name}{hint}"


def _tail(path: Path, characters: int = 4000) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else ""


if __name__ == "__main__":
    serve()
