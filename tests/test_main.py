"""The command line: what each command prints, its exit code, and what it does not load."""

import dataclasses
import json
import subprocess
import sys

import nbformat
import pytest

import syncbn_lab as lab
from syncbn_lab.__main__ import main
from syncbn_lab.experiment import Experiment
from syncbn_lab.results import MEDIA_TYPE


def command(capsys, *arguments):
    """Exit code, output and errors of one command."""
    try:
        code = main(list(arguments))
    except SystemExit as end:  # argparse's own way out
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refusal(capsys, *arguments):
    """The one sentence of a command that ends in exit code 1."""
    code, out, err = command(capsys, *arguments)
    assert code == 1
    assert out == ""
    assert err.startswith("syncbn_lab: ")
    assert err.count("\n") == 1
    return err.removeprefix("syncbn_lab: ").strip()


# ---------------------------------------------------------------- help

LOADED = """
import sys
from syncbn_lab.__main__ import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
heavy = {"torch", "numpy", "pandas", "matplotlib", "apex", "IPython"} & set(sys.modules)
print("loaded:", *sorted(heavy), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["cases"], ["cases", "--json"], ["--version"]]
)
def test_help_and_cases_load_neither_torch_nor_pandas(arguments):
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr.strip() == "loaded:"


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "syncbn_lab", "run", "--seed", "-1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        "syncbn_lab: seed is -1; allowed is a whole number from 0 to 9223372036854775807.\n"
    )


def test_help_lists_every_command_and_every_field(capsys):
    code, out, _ = command(capsys, "--help")
    assert code == 0
    for name in ("doctor", "cases", "run", "results", "writeup", "bench", "torch12"):
        assert name in out
    code, out, _ = command(capsys, "run", "--help")
    assert code == 0
    for field in dataclasses.fields(Experiment):
        assert f"--{field.name.replace('_', '-')}" in out


def test_the_version(capsys):
    assert command(capsys, "--version")[:2] == (0, f"syncbn-lab {lab.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["rum"], "invalid choice: 'rum'"),
        (["run", "--optlevel", "O3"], "unrecognized arguments: --optlevel O3"),
        (["run", "--seed", "1.5"], "argument --seed: invalid int value: '1.5'"),
        (["results"], "the following arguments are required: OUT.ipynb"),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2(capsys, arguments, said):
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]


# ---------------------------------------------------------------- cases


def test_cases_in_short(capsys):
    code, out, _ = command(capsys, "cases")
    assert code == 0
    for case in lab.cases():
        assert f"{case.case}: {case.title}\n  seen:    {case.seen}\n" in out
        assert f"  command: {case.command}\n" in out
    assert "cause:" not in out


def test_one_case_whole(capsys):
    code, out, _ = command(capsys, "cases", "apex-481-o2")
    case = lab.find_case("apex-481-o2")
    assert code == 0
    assert out == (
        f"{case.case}: {case.title}\n"
        f"  seen:    {case.seen}\n"
        f"  report:  {case.report}\n"
        f"  cause:   {case.cause}\n"
        f"  cure:    {case.cure}\n"
        f"  command: {case.command}\n"
    )


def test_cases_as_json(capsys):
    code, out, _ = command(capsys, "cases", "--json")
    assert code == 0
    assert json.loads(out) == [dataclasses.asdict(case) for case in lab.cases()]
    code, out, _ = command(capsys, "cases", "--json", "apex-481-o1")
    assert [case["case"] for case in json.loads(out)] == ["apex-481-o1"]


def test_an_unknown_case(capsys):
    names = ", ".join(case.case for case in lab.cases())
    assert refusal(capsys, "cases", "apex-482") == f"case is 'apex-482'; allowed are {names}."
    assert refusal(capsys, "run", "--case", "x") == f"case is 'x'; allowed are {names}."


# ---------------------------------------------------------------- run


def test_a_run_in_text(capsys, runs):
    code, out, err = command(capsys, "run", "--opt-level", "O2", "--model", "toy")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == runs["o2"].sentence()
    told = dict(line.strip().split(":", 1) for line in lines)
    assert {name: text.strip() for name, text in told.items() if name != "seconds"} == {
        "message": runs["o2"].message,
        "source": "raised by our rule",
        "rests on": "add(float16[3], float32[3]), for which torch 1.2.0 said the same",
        "phase": "forward",
        "place": "apex/parallel/sync_batchnorm.py line 109",
        "traceback line": "108",
        "in layer": "1",
        "matches": "but for the device (case apex-481-o2)",
        "torch": runs["o2"].environment["torch"],
    }


def test_a_run_as_json(capsys):
    code, out, err = command(
        capsys, "run", "--case", "apex-481-o3-keep", "--model", "toy", "--json", "--seed", "3"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == 2
    assert found["outcome"] == "reproduced"
    assert found["case"] == "apex-481-o3-keep"
    experiment = found["experiment"]
    assert (experiment["opt_level"], experiment["keep_batchnorm_fp32"]) == ("O3", True)
    assert (experiment["seed"], experiment["model"]) == (3, "toy")


def test_a_control_that_raises_matches_nothing(capsys):
    arguments = ("--opt-level", "O0", "--revision", "cast-added", "--model", "toy")
    code, out, _ = command(capsys, "run", *arguments)
    assert code == 0
    assert "  message:" in out
    assert "matches" not in out
    assert "None" not in out.replace("NoneType", "")


def test_keep_on_the_command_line(capsys):
    arguments = ("run", "--model", "toy", "--json", "--opt-level", "O3", "--keep-batchnorm-fp32")
    _, out, _ = command(capsys, *arguments, "true")
    assert json.loads(out)["case"] == "apex-481-o3-keep"
    assert refusal(capsys, *arguments, "maybe") == (
        "keep_batchnorm_fp32 is 'maybe'; allowed are True, False, None and 'as reported'."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--opt-level", "O7"], "opt_level is 'O7'; allowed are O0, O1, "),
        (["--revision", "newest"], "revision is 'newest'; allowed are reported, cast-added, "),
        (["--time-limit", "nan"], "time_limit is nan; allowed is a number of seconds above 0 "),
        (["--opt-level", "O1", "--keep-batchnorm-fp32", "True"], "keep_batchnorm_fp32=True does "),
        (["--case", "apex-481-o1", "--opt-level", "O2"], "case apex-481-o1 is opt_level O1, and "),
        (["--case", "apex-import-amp"], "case apex-import-amp has no experiment: "),
    ],
)
def test_a_wrong_value_is_refused_before_anything_runs(capsys, arguments, said):
    assert refusal(capsys, "run", *arguments).startswith(said)


# ---------------------------------------------------------------- results, writeup


@pytest.fixture
def executed(tmp_path, runs):
    """A notebook with a record, as papermill leaves it."""
    from syncbn_lab.params import choose

    record = lab.reproduction(
        choose({"opt_level": "O2"}), runs["o2"], runs["o2_today"], runs["plain"]
    )
    output = nbformat.v4.new_output("display_data", data={MEDIA_TYPE: record, "text/plain": "x"})
    file = tmp_path / "out.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])]), file
    )
    return str(file)


def test_results_of_one_file_and_of_two(capsys, executed):
    code, out, _ = command(capsys, "results", executed)
    assert code == 0
    assert json.loads(out)["line"] == 109
    code, out, _ = command(capsys, "results", executed, executed)
    assert [found["line"] for found in json.loads(out)] == [109, 109]


def test_results_as_a_table(capsys, executed):
    code, out, _ = command(capsys, "results", "--table", executed, executed, executed)
    assert code == 0
    assert out.startswith("configuration")
    assert max(len(line) for line in out.splitlines()) <= 118


def test_results_and_writeups_of_what_is_not_there(capsys, tmp_path, executed):
    missing = str(tmp_path / "no.ipynb")
    for name in ("results", "writeup"):
        assert refusal(capsys, name, missing) == f"{missing} does not exist."
    # One bad file among several: nothing is printed by halves.
    assert refusal(capsys, "results", executed, missing) == f"{missing} does not exist."
    empty = tmp_path / "empty.ipynb"
    nbformat.write(nbformat.v4.new_notebook(), empty)
    assert refusal(capsys, "results", str(empty)).startswith(f"{empty} holds no results of this ")


def test_a_writeup_prints_where_it_is(capsys, executed):
    code, out, _ = command(capsys, "writeup", executed)
    assert code == 0
    assert out.strip() == executed.removesuffix(".ipynb") + ".html"
