"""The command line: ``python -m syncbn_lab doctor | cases | run | results | writeup | …``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from syncbn_lab import __version__
from syncbn_lab.errors import InputError
from syncbn_lab.experiment import DEVICES, DTYPE_PAIRS, INPUTS, MODELS, RULES, Experiment
from syncbn_lab.implementations import IMPLEMENTATIONS
from syncbn_lab.implementations.revisions import REVISION_NAMES
from syncbn_lab.messages import VERBATIM
from syncbn_lab.policies import POLICIES


def main(arguments: list[str] | None = None) -> int:
    """Run one command; bad input is one sentence on standard error and exit code 1."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that can't show a character gets an escape, never a traceback.
            stream.reconfigure(errors="backslashreplace")
    chosen = _parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except InputError as error:
        print(f"syncbn_lab: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output has gone, as `| head` does; nothing is left to be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("syncbn_lab: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m syncbn_lab",
        description="What happens when synchronized batch norm meets mixed precision, and why.",
    )
    parser.add_argument("--version", action="version", version=f"syncbn-lab {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what is installed here, each trap with its cure")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(run=_doctor)

    listing = commands.add_parser("cases", help="the reported cases: seen, cause, cure, command")
    listing.add_argument("name", nargs="?", help="show this one whole")
    listing.add_argument("--json", action="store_true", help="print JSON instead of text")
    listing.add_argument("--markdown", action="store_true", help="print the README's table")
    listing.set_defaults(run=_cases)

    run = commands.add_parser(
        "run", help="run one experiment in a child process; its outcome is no exit code"
    )
    _add_experiment(run)
    run.add_argument("--json", action="store_true", help="print the whole result as JSON")
    run.set_defaults(run=_run)

    results = commands.add_parser("results", help="what an executed notebook recorded, as JSON")
    results.add_argument("files", nargs="+", metavar="OUT.ipynb")
    results.add_argument("--table", action="store_true", help="one text table, a column a file")
    results.set_defaults(run=_results)

    writeup = commands.add_parser("writeup", help="an executed notebook as one offline HTML page")
    writeup.add_argument("files", nargs="+", metavar="OUT.ipynb")
    writeup.set_defaults(run=_writeup)

    bench = commands.add_parser("bench", help="what a notebook and an experiment cost here")
    bench.add_argument("--repeats", type=int, default=5, help="pairs of notebooks (default: 5)")
    bench.add_argument("--csv", metavar="FILE", help="append the rows to this file too")
    bench.set_defaults(run=_bench)

    torch12 = commands.add_parser("torch12", help="make an environment with the real torch 1.2.0")
    torch12.add_argument("--python", metavar="PATH", help="a CPython 3.7 or 3.6 to make it with")
    torch12.add_argument(
        "--record",
        metavar="FOLDER",
        help="write what it says to this folder too, rules.csv and replays.json (about a minute)",
    )
    torch12.set_defaults(run=_torch12)
    return parser


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    """Options of one experiment; the values themselves are checked by ``Experiment``."""
    helps = {
        "opt_level": f"precision recipe: {', '.join(POLICIES)}",
        "implementation": f"batch norm layer: {', '.join(IMPLEMENTATIONS)}",
        "revision": f"apex's file: {', '.join(REVISION_NAMES)}",
        "rules": f"dtype rules: {', '.join(RULES)}",
        "device": ", ".join(DEVICES),
        "world_size": "ranks",
        "model": ", ".join(MODELS),
        "input": ", ".join(INPUTS),
        "seed": "seeds parameters, crops and labels",
        "steps": "training steps",
        "time_limit": "seconds until the run is ended",
        "dtype_pair": ", ".join(DTYPE_PAIRS),
    }
    parser.add_argument("--case", help="a reported case, which fills in the defaults")
    parser.add_argument(
        "--keep-batchnorm-fp32", help="True, False or None: apex amp's argument of that name"
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="another interpreter, whose torch runs the experiment by its own rules; given several "
        "times, one table compares them",
    )
    for field in dataclasses.fields(Experiment):
        if field.name in helps:
            kind = type(field.default)
            shown = f"{helps[field.name]} (default: {field.default})"
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=kind, help=shown, metavar=field.name.upper())


def _experiments(chosen: argparse.Namespace) -> list[Experiment]:
    """The experiment of a command line: one, or one for each interpreter."""
    from syncbn_lab.params import choose

    defaults = Experiment().to_dict()
    given = {n: getattr(chosen, n) for n in defaults if getattr(chosen, n, None) is not None}
    pythons = given.pop("python", [None])
    if chosen.python:
        given.setdefault("rules", "installed")
    return [
        choose({"case": chosen.case, **given, "python": python}, defaults).experiment
        for python in pythons
    ]


def _doctor(chosen: argparse.Namespace) -> int:
    from syncbn_lab import doctor

    return doctor.main(chosen.json)


def _cases(chosen: argparse.Namespace) -> int:
    from syncbn_lab.cases import cases, find_case, markdown_table

    if chosen.markdown:
        print(markdown_table())
        return 0
    found = [find_case(chosen.name)] if chosen.name else cases()
    if chosen.json:
        print(json.dumps([dataclasses.asdict(case) for case in found], indent=1))
        return 0
    for case in found:
        print(f"{case.case}: {case.title}\n  seen:    {case.seen}")
        if chosen.name:
            print(f"  report:  {case.report}\n  cause:   {case.cause}\n  cure:    {case.cure}")
        print(f"  command: {case.command}")
    return 0


def _run(chosen: argparse.Namespace) -> int:
    from syncbn_lab.results import text_table
    from syncbn_lab.run import require_device, run

    experiments = _experiments(chosen)
    for experiment in experiments:
        require_device(experiment)
    results = [run(experiment) for experiment in experiments]
    if chosen.json:
        plain = [result.to_dict() for result in results]
        print(json.dumps(plain if len(plain) > 1 else plain[0], indent=1, allow_nan=False))
        return 0
    if len(results) > 1:
        print(text_table([result.row() for result in results]))
        return 0
    result = results[0]
    print(result.sentence())
    lines = {
        "message": result.message,
        "source": result.source,
        "rests on": _evidence(result.recorded),
        "phase": result.phase,
        "place": f"{result.file} line {result.line}" if result.file else None,
        "traceback line": result.traceback_line,
        "in layer": result.module,
        "matches": f"{result.messages_match} (case {result.case})"
        if result.message and result.case
        else None,
        "silent casts": len(result.silent_casts or []) or None,
        "findings": "\n                  ".join(result.findings[:5]) or None,
        "torch": result.environment.get("torch"),
        "seconds": f"{result.seconds:.2f}",
    }
    for name, value in lines.items():
        if value is not None:
            print(f"  {name + ':':<16}{value}")
    if result.outcome == "died" and result.log:
        print(result.log, file=sys.stderr)
    return 0


def _evidence(recorded: dict[str, str] | None) -> str | None:
    """The recorded row behind a message of our rules, in a line."""
    if recorded is None:
        return None
    said = "the same" if recorded["match"] == VERBATIM else recorded["message"]
    return f"{recorded['row']}, for which torch 1.2.0 said {said}"


def _results(chosen: argparse.Namespace) -> int:
    from syncbn_lab.results import read_results, summary_row, text_table

    found = [read_results(file) for file in chosen.files]
    if chosen.table:
        print(text_table([summary_row(results) for results in found]))
    else:
        print(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    return 0


def _writeup(chosen: argparse.Namespace) -> int:
    from syncbn_lab.writeup import write

    for file in chosen.files:
        print(write(file))
    return 0


def _bench(chosen: argparse.Namespace) -> int:
    from syncbn_lab import bench

    if chosen.repeats < 1:
        raise InputError(f"--repeats is {chosen.repeats}; allowed is a whole number from 1.")
    rows = bench.experiment_cost(4 * chosen.repeats) + bench.notebook_cost(chosen.repeats)
    for row in rows:
        print(
            f"{row['subject']:<34} {row['metric']:<10} median {row['median']} {row['unit']}, "
            f"{row['low']} to {row['high']}, n = {row['n']}"
        )
    if chosen.csv:
        bench.append(rows, Path(chosen.csv))
    return 0


def _torch12(chosen: argparse.Namespace) -> int:
    from syncbn_lab import real_torch12

    python = real_torch12.build(chosen.python)
    print(f"{python}\n  The kit finds it; {real_torch12.VARIABLE}=PATH names another one instead.")
    if chosen.record:
        _record(python, Path(chosen.record))
    return 0


def _record(python: Path, folder: Path) -> None:
    """Record a real torch 1.2's rules and replays; neither file is touched before both are made."""
    from syncbn_lab import replays
    from syncbn_lab.rules.record import ask_there

    if not folder.is_dir():
        raise InputError(f"--record is {folder}, which is no folder.")
    print("asking it every row …", flush=True)
    rules = ask_there(python)
    replayed = replays.record(python, print)
    for name, text in (("rules.csv", rules), ("replays.json", replayed)):
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    sys.exit(main())
