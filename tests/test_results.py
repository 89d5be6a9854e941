"""Results are recorded into a notebook, read back from its file, and printed as one table."""

import json
import re
import subprocess
import sys

import nbformat
import pytest

import syncbn_lab as lab
from syncbn_lab.errors import InputError
from syncbn_lab.params import choose
from syncbn_lab.results import MEDIA_TYPE, read_results, record, summary_row, text_table

REPORTED = (
    "Function SyncBatchnormFunctionBackward returned an invalid gradient at index 0 - expected "
    "type torch.cuda.HalfTensor but got torch.cuda.FloatTensor"
)


@pytest.fixture(scope="module")
def made(runs):
    """What repro.ipynb records, for the three reported configurations and a control."""
    rows = {
        "o1": ("o1", "o1_today"),
        "o2": ("o2", "o2_today"),
        "o3_keep": ("o3_keep", "o2_today"),
        "control": ("plain", "single"),
    }
    return {
        name: lab.reproduction(
            choose({**_fields(runs[run].experiment), "model": "toy"}),
            runs[run],
            runs[today],
            runs["plain"],
        )
        for name, (run, today) in rows.items()
    }


def _fields(experiment):
    wanted = ("opt_level", "keep_batchnorm_fp32", "implementation")
    return {name: getattr(experiment, name) for name in wanted}


def test_a_reproduction_says_what_was_reported_and_what_was_seen(made):
    o1, o2 = made["o1"], made["o2"]
    assert (o1["case"], o1["outcome"], o1["phase"]) == ("apex-481-o1", "reproduced", "backward")
    assert o1["expected_message"] == REPORTED
    assert o1["messages_match"] == "but for the device"
    assert (o2["file"], o2["line"], o2["traceback_line"]) == (
        "apex/parallel/sync_batchnorm.py",
        109,
        108,
    )
    assert o2["source"] == "raised by our rule"
    assert o2["today"]["module"] == "3"  # the convolution behind the layer
    assert o1["today"]["silent_casts"] == 2  # one gradient for each of the two layers
    assert o1["fixed_outcome"] is None
    assert o1["torch"]
    assert o1["apex"]["sha256"]
    assert json.loads(json.dumps(o1)) == o1


def test_for_a_control_the_fields_of_a_report_are_empty(made):
    control = made["control"]
    for name in ("case", "expected_message", "messages_match", "revision"):
        assert control[name] is None
    assert control["outcome"] == "completed"
    assert control["verdict"] == "right"


# ---------------------------------------------------------------- recorded and read back

IN_A_SHELL = """
import json, sys
import nbformat
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
shell.user_ns["results"] = json.load(sys.stdin)
shell.run_cell("import syncbn_lab as lab")
with capture_output() as shown:
    shell.run_cell("lab.record(results)").raise_error()
outputs = [nbformat.v4.new_output("display_data", data=o.data) for o in shown.outputs]
notebook = nbformat.v4.new_notebook(cells=[
    nbformat.v4.new_markdown_cell("# t"),
    nbformat.v4.new_code_cell("lab.record(results)", outputs=outputs),
    nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", text="1")]),
])
nbformat.write(notebook, sys.argv[1])
"""


def test_what_a_cell_recorded_is_read_back_from_the_file(made, tmp_path):
    file = tmp_path / "out.ipynb"
    subprocess.run(
        [sys.executable, "-c", IN_A_SHELL, str(file)],
        input=json.dumps(made["o2"]),
        text=True,
        check=True,
        timeout=60,
    )
    assert read_results(file) == made["o2"]
    assert read_results(str(file)) == made["o2"]
    # A viewer that knows nothing of the media type shows one line of text beside it.
    (output,) = nbformat.read(file, as_version=4).cells[1].outputs
    assert set(output.data) == {MEDIA_TYPE, "text/plain"}
    assert "\n" not in output.data["text/plain"]


def test_outside_a_notebook_results_are_printed(capsys):
    record({"outcome": "completed", "line": 109})
    assert json.loads(capsys.readouterr().out) == {"outcome": "completed", "line": 109}


def _notebook(tmp_path, *recorded):
    cells = [
        nbformat.v4.new_code_cell(
            "lab.record(results)",
            outputs=[nbformat.v4.new_output("display_data", data={MEDIA_TYPE: results})],
        )
        for results in recorded
    ]
    file = tmp_path / "n.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells or [nbformat.v4.new_code_cell("1")]), file)
    return file


def test_the_last_record_counts(tmp_path):
    assert read_results(_notebook(tmp_path, {"seed": 1}, {"seed": 2})) == {"seed": 2}


def _refusal(file):
    with pytest.raises(InputError) as caught:
        read_results(file)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{file} ")
    assert text.endswith(".")
    return text.removeprefix(f"{file} ")


def test_a_missing_file(tmp_path):
    assert _refusal(tmp_path / "no.ipynb") == "does not exist."


def test_a_notebook_that_was_not_executed(tmp_path):
    assert _refusal(_notebook(tmp_path)) == (
        "holds no results of this kit; run it with papermill first."
    )


def test_a_folder(tmp_path):
    assert _refusal(tmp_path).startswith("can't be read as a notebook: ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not json", "can't be read as a notebook: "),
        (b"", "can't be read as a notebook: "),  # an interrupted write
        (b"\x89PNG\xff", "can't be read as a notebook: "),  # not UTF-8
        (b"[]", "is not a notebook: it holds no list of cells."),
        (b"5", "is not a notebook: it holds no list of cells."),
        (b"{}", "is not a notebook: it holds no list of cells."),
        (b'{"cells": 5}', "is not a notebook: it holds no list of cells."),
        (b'{"cells": [5]}', "is not a notebook: it holds no list of cells."),
        (b'{"worksheets": []}', "is not a notebook: it holds no list of cells."),  # nbformat 3
    ],
)
def test_a_file_that_is_no_notebook(tmp_path, content, said):
    file = tmp_path / "x.ipynb"
    file.write_bytes(content)
    assert _refusal(file).startswith(said)


# ---------------------------------------------------------------- the table of `make repro`


def test_a_run_as_a_row(made):
    row = summary_row(made["o2"])
    assert row["configuration"] == "O2"
    assert row["outcome"] == "reproduced"
    assert row["reported message"] == made["o2"]["expected_message"]
    assert row["message seen"] == made["o2"]["message"]
    assert row["place"] == "forward, apex/parallel/sync_batchnorm.py:109"
    assert row["match"] == "but for the device"
    assert row["today's torch"] == (
        "different error: Input type (float) and bias type (c10::Half) should be the same (in 3)"
    )
    assert summary_row(made["o3_keep"])["configuration"] == "O3 + keep_batchnorm_fp32=True"
    assert summary_row(made["o1"])["today's torch"] == "completed, degraded; 2 silent casts"


def test_a_control_as_a_row(made):
    row = summary_row(made["control"])
    assert row["outcome"] == "completed, right"
    for name in ("reported message", "message seen", "its source", "place", "match"):
        assert row[name] == "–"


@pytest.mark.parametrize("width", [118, 80])  # the default, and a terminal's
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])  # 9: more columns than fit beside each other
def test_the_table_keeps_to_its_width_and_loses_no_word(made, count, width):
    rows = [summary_row(made[name]) for name in [*made, *made, *made][:count]]
    text = text_table(rows, width)
    assert max(len(line) for line in text.splitlines()) <= width
    for rule in (line for line in text.splitlines() if "─┼─" in line):
        assert min(len(column) for column in rule.split("─┼─")[1:]) >= 20  # still to be read
    for name in rows[0]:
        assert any(line.startswith(name) for line in text.splitlines())
    # Read down a column, every cell is there whole; wrapping may break inside a long word.
    squeezed = ["".join(column) for column in _columns(text)]
    for row in rows:
        assert "".join("".join(row.values()).split()) in squeezed


def _columns(text):
    """The text of each column of each table, blanks left out."""
    columns = []
    for table in text.split("\n\n"):
        lines = [re.split(" │ ?", line)[1:] for line in table.splitlines() if "─┼─" not in line]
        for i in range(max(len(cells) for cells in lines)):
            columns.append(["".join(cells[i].split()) for cells in lines if i < len(cells)])
    return columns


def test_no_rows_no_table():
    assert text_table([]) == ""
