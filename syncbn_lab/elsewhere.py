"""Code of this kit inside another interpreter, which has a torch of its own and nothing of ours.

Run by its path, ``python3.7 …/syncbn_lab/elsewhere.py rank FOLDER RANK``, it takes the few
modules that keep to Python 3.6 and the standard library from the folder it stands in, and
carries out one rank of an experiment that ``hand_over`` has made ready there. ``rules`` in the
place of ``rank`` writes the record of that torch's dtype rules to standard output.

Nothing is installed into that interpreter. It may be any command that takes a script's path and
its arguments: a shell script that starts a container which can see this folder and the
temporary one will do.
"""

import hashlib
import json
import os
import shutil
import sys
import types
from typing import Any, Dict, List

MODULES = (
    "child.py",
    "elsewhere.py",
    "errors.py",
    "implementations/loading.py",
    "implementations/pair.py",
    "implementations/stand_ins.py",
    "layers.py",
    "models.py",
    "recipes.py",
    "trace/frames.py",
)
"""What runs in another interpreter when it carries out an experiment; Python 3.6, all of it."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# What the caller's Python was told does not hold for another one.
_OWN_TO_A_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")


def modules_hash() -> str:
    """sha256 over ``MODULES``: what a recorded replay was made with."""
    total = hashlib.sha256()
    for name in MODULES:
        with open(os.path.join(_PACKAGE, name), "rb") as file:
            total.update(name.encode() + b"\0" + file.read() + b"\0")
    return total.hexdigest()


def environment() -> Dict[str, str]:
    """The environment variables that another interpreter gets: all but those about this one."""
    kept = {k: v for k, v in os.environ.items() if k not in _OWN_TO_A_PYTHON}
    if not any("UTF" in kept.get(name, "").upper() for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        # Python 3.6 takes the names of files for ASCII in any other locale.
        kept["LC_ALL"] = "C.UTF-8"
    return kept


def hand_over(python: str, work: Any, apex: str, rank: int, folder: str) -> None:
    """Make a rank's work ready in ``folder``, and go on as that interpreter; never returns.

    The process keeps its id, its group and its output, so whoever waits for it sees no
    difference. ``apex`` is the folder of this environment's apex, which is lent to an interpreter
    that has none; "" for no apex.
    """
    import torch

    from syncbn_lab.errors import InputError

    start = os.path.join(folder, f"rank{rank}.")
    if apex and rank == 0:
        # A copy, because a container sees this folder and not the environment.
        shutil.copytree(apex, os.path.join(folder, "lent.tmp", "apex"))
        os.rename(os.path.join(folder, "lent.tmp"), os.path.join(folder, "lent"))
    tensors = {"x": work.x, "labels": work.labels, "parameters": dict(work.parameters)}
    # The serialization of torch before 1.6, which every torch reads.
    torch.save(tensors, start + "in", _use_new_zipfile_serialization=False)
    fields = {
        "experiment": dict(work.experiment.to_dict(), needs_apex=work.experiment.needs_apex),
        "policy": vars(work.policy),
        "fallback": work.fallback,
        "input_origin": work.input_origin,
        "lends_apex": bool(apex),
    }
    with open(start + "work", "w") as file:
        json.dump(fields, file)
    command = [python, os.path.abspath(__file__), "rank", folder, str(rank)]
    try:
        os.execve(python, command, environment())
    except OSError as error:
        raise InputError(f"{python} can't be run: {error.strerror}.") from error


def _take_up(folder: str, rank: int) -> Any:
    """In the other interpreter: what ``hand_over`` left, as the rank's work."""
    import torch

    from syncbn_lab.child import Work

    start = os.path.join(folder, f"rank{rank}.")
    with open(start + "work") as file:
        fields = json.load(file)
    if fields["lends_apex"] and not _has_apex():
        _wait_for(os.path.join(folder, "lent"))
        sys.path.insert(0, os.path.join(folder, "lent"))
    tensors = torch.load(start + "in")
    fallback = fields["fallback"]
    return Work(
        experiment=types.SimpleNamespace(**fields["experiment"]),
        policy=types.SimpleNamespace(**fields["policy"]),
        fallback=tuple(fallback) if fallback else None,
        x=tensors["x"],
        labels=tensors["labels"],
        input_origin=fields["input_origin"],
        parameters=tensors["parameters"],
    )


def _wait_for(path: str) -> None:
    import time

    while not os.path.exists(path):
        time.sleep(0.01)


def _has_apex() -> bool:
    """Whether this interpreter has NVIDIA's apex with amp and the fallback; nothing is imported."""
    import importlib.util

    spec = importlib.util.find_spec("apex")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        parts = (("amp", "__init__.py"), ("parallel", "sync_batchnorm.py"))
        if all(os.path.isfile(os.path.join(folder, *part)) for part in parts):
            return True
    return False


def _stand_for_package() -> None:
    """Let ``syncbn_lab`` and its rooms be bare folders here: their ``__init__`` needs more."""
    # The script's own folder stands first on the path, and would shadow modules such as trace.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _PACKAGE]
    for name in ("", ".rules", ".trace", ".implementations"):
        module = types.ModuleType("syncbn_lab" + name)
        module.__path__ = [os.path.join(_PACKAGE, name[1:])]
        sys.modules[module.__name__] = module


def main(arguments: List[str]) -> int:
    """Run one rank, or record the rules."""
    _stand_for_package()
    sys.dont_write_bytecode = True  # the package may belong to somebody else
    if arguments[:1] == ["rules"]:
        import torch

        from syncbn_lab.rules.recorder import answers

        torch.set_num_threads(1)
        answers.write(sys.stdout, lambda text: print(text, file=sys.stderr, flush=True))
        return 0
    _, folder, rank = arguments
    try:
        import torch
    except ImportError as error:
        path = os.path.join(folder, f"rank{rank}")
        _write_not_runnable(path, f"{sys.executable} can't import torch: {error}")
        return 1
    from syncbn_lab import child

    child.run_rank(lambda: _take_up(folder, int(rank)), int(rank), folder)
    return 0


def _write_not_runnable(path: str, message: str) -> None:
    with open(path + ".tmp", "w") as file:
        json.dump({"status": "not runnable", "message": message}, file)
    os.rename(path + ".tmp", path + ".json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
