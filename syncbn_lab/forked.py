"""What the children forked from the warm parent do: one rank's work, or the judging of a run."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import torch
import torch.utils.serialization  # torch.load imports it lazily, in every child otherwise

from syncbn_lab import child, elsewhere, inputs, models
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import Experiment
from syncbn_lab.implementations import IMPLEMENTATIONS
from syncbn_lab.implementations.apex import require_apex, source_of
from syncbn_lab.layers import LayerRecord
from syncbn_lab.policies import POLICIES
from syncbn_lab.rules import record, torch12_rules
from syncbn_lab.verdict import judge as judge_records


def prepare() -> None:
    """Do once what every child would do anew; no tensor is touched."""
    with contextlib.suppress(InputError):
        require_apex()
    record.evidence_for("", "", "")
    photo = inputs.sample_photo()
    if photo is not None:
        inputs.read_photo(photo)


def rank(experiment: Experiment, number: int, folder: Path) -> None:
    """In the child: do one rank's work here, or hand it over to another interpreter."""

    def work() -> child.Work:
        made = _work(experiment, number)
        if experiment.python is not None:
            apex = (require_apex().location or "") if made.fallback else ""
            elsewhere.hand_over(experiment.python, made, apex, number, str(folder))
        return made

    child.run_rank(work, number, str(folder))


def _work(experiment: Experiment, rank: int) -> child.Work:
    """Everything that a rank is told: its input, the layer's source, the rules."""
    x, labels, origin = inputs.load(experiment.input, experiment.model, experiment.seed, rank)
    here = experiment.python is None
    wants_source = experiment.needs_apex and (here or experiment.revision != "installed")
    return child.Work(
        experiment=experiment,
        policy=POLICIES[experiment.opt_level],
        fallback=source_of(experiment.revision) if wants_source else None,
        x=x,
        labels=labels,
        input_origin=origin,
        # Drawn here for every torch, since each may draw others from one seed.
        parameters=None if here else models.build(experiment.model, experiment.seed).state_dict(),
        rules=torch12_rules(on_violation="raise" if experiment.rules == "torch-1.2" else "record")
        if here
        else None,
    )


def judge(experiment: Experiment, folder: Path, waiting: int, begin: int) -> None:
    """In the child, which apex never patched: judge what the ranks left, once told so.

    It ends if the pipe closes without a word.
    """
    os.close(begin)
    if not os.read(waiting, 1):
        return
    # weights_only builds a list of allowed names first, 15 ms; these files are our own.
    ranks = [
        [LayerRecord(**fields) for fields in torch.load(path, weights_only=False)]
        for path in sorted(folder.glob("rank*.pt"))
    ]
    try:
        judged = judge_records(ranks, IMPLEMENTATIONS[experiment.implementation].synchronized)
    except ValueError as error:
        judged = {"verdict": "not judged", "findings": [str(error)], "layers": []}
    (folder / "verdict.json").write_text(json.dumps(judged))


def find_devices(folder: Path) -> None:
    """In the child, so that the parent stays clean: what torch finds here."""
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    found = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_available": available,
        "devices": [torch.cuda.get_device_name(i) for i in range(count)],
    }
    (folder / "machine.json").write_text(json.dumps(found))
