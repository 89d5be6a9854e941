"""Tables show their cells whole and escaped, whatever a message or a statement holds."""

import dataclasses
import html
import re
from html.parser import HTMLParser

import pytest

from syncbn_lab import recorded, replays, tables
from syncbn_lab.cases import cases, find_case
from syncbn_lab.rules import comparison

HOSTILE = "<script>alert('x')</script> & \"<b>\""


class _Cells(HTMLParser):
    """The texts of a table's cells, and every tag that was opened."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self._inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self._inside = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.cells[-1] += data


def test_a_long_message_is_whole_in_the_page(runs):
    # 1200 characters: pandas itself cuts a cell at 50.
    long = "expected " + "a very long message " * 60
    result = dataclasses.replace(runs["o2"], message=long.strip())
    page = tables.runs(this_run=result)._repr_html_()
    assert long.strip() in _Cells(page).cells
    assert "..." not in page


def test_every_row_of_a_long_table_is_shown(runs):
    # pandas itself shows 60 rows: 80 layers give more.
    layer = runs["half"].layers[0]
    many = [{**layer, "name": f"layer{i}"} for i in range(80)]
    page = tables.layers(dataclasses.replace(runs["half"], layers=many))._repr_html_()
    for i in range(80):
        assert f"layer{i}<" in page


def test_a_hostile_message_is_escaped(runs):
    result = dataclasses.replace(
        runs["o2"], message=HOSTILE, reason=HOSTILE, module=HOSTILE, findings=[HOSTILE]
    )
    parsed = _Cells(tables.runs(**{"<script>": result})._repr_html_())
    assert "script" not in parsed.tags
    assert parsed.cells.count(HOSTILE) == 3
    assert "<script>" in parsed.cells  # the column's name


def test_cells_are_left_aligned_and_wrap(runs):
    page = tables.runs(this_run=runs["o2"])._repr_html_()
    cells = re.findall(r"<t[dh]\b[^>]*>", page)
    assert len(cells) > 20
    for cell in cells:
        assert "text-align:left" in cell or "text-align: left" in cell or cell == "<th></th>", cell
    assert page.startswith('<div style="overflow-x:auto">')


# ---------------------------------------------------------------- each table


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.case)
def test_a_reported_case_is_told_without_holes(case):
    table = tables.reported(case)
    page = html.unescape(table._repr_html_())
    for text in (case.seen, case.cause, case.cure, case.report):
        # Without Markdown's code marks, which a table would show as they are.
        assert text.replace("`", "") in page.replace("`", "")
    # A field that a case does not have is left out, not shown as "None".
    assert "None" not in page.replace(case.cause.replace("`", ""), "")


def test_where_a_case_was_raised():
    column = "what was reported"
    assert tables.reported(find_case("apex-481-o2")).loc["where", column] == (
        "forward, apex/parallel/sync_batchnorm.py line 109"
    )
    assert tables.reported(find_case("apex-481-o1")).loc["where", column] == (
        "backward, raised by the autograd engine"
    )
    # A silent fault was raised by nothing.
    assert tables.reported(find_case("torch-half-counts")).loc["where", column] == "not said"


def test_a_control_has_nothing_reported():
    assert tables.reported(None).iloc[0, 0] == "nothing: this configuration is a control"


def test_runs_side_by_side(runs):
    table = tables.runs(this_run=runs["o2"], today=runs["o2_today"], plain=runs["plain"])
    assert list(table.columns) == ["this run", "today", "plain"]
    assert table.loc["place", "this run"] == "apex/parallel/sync_batchnorm.py line 109"
    assert table.loc["outcome"].tolist() == ["reproduced", "different error", "completed"]
    assert table.loc["in layer", "today"] == "3"
    assert table.loc["message", "plain"] == "–"


def test_dtypes_by_role(runs):
    table = tables.dtypes(this_run=runs["o1"], today=runs["o1_today"], died=runs["died"])
    assert list(table.columns) == ["this run (cpu)", "today (cpu)", "died"]
    # The reported fault itself: a float32 gradient for a float16 input.
    assert table.loc["input of the layer", "this run (cpu)"] == "float16"
    assert table.loc["gradient returned for the input", "this run (cpu)"] == "float32"
    assert set(table["died"]) == {"–"}


def test_operands_by_name(runs):
    table = tables.operands(runs["o2"])
    assert table.loc["mean", "dtype"] == "float16"
    assert table.loc["self.running_mean", "dtype"] == "float32"
    assert table.loc["mean", "shape"] == (8,)
    assert len(tables.operands(runs["plain"])) == 0


def test_silent_casts_are_counted_by_place(runs):
    result = runs["o2_today"]
    table = tables.silent_casts(result)
    assert table["times"].sum() == len(result.silent_casts)
    assert table["values"].sum() == sum(cast["numel"] for cast in result.silent_casts)
    assert "sync_batchnorm.py line 109" in set(table["where"])
    gradients = tables.silent_casts(runs["o1_today"])
    assert gradients["times"].tolist() == [2]
    assert gradients["what happens"].tolist() == ["gradient float32 → float16"]
    empty = tables.silent_casts(runs["plain"])
    assert len(empty) == 0
    assert "times" in empty.columns


def test_layers_against_the_oracle(runs):
    table = tables.layers(runs["half"])
    first = runs["half"].layers[0]
    assert len(table) == sum(len(layer["comparisons"]) for layer in runs["half"].layers)
    row = table.iloc[0]
    assert row["layer"] == first["name"]
    assert row["worst error, ulp"] == first["comparisons"][0]["worst_ulp"]
    assert row["share of the channel's scale"] == max(first["comparisons"][0]["per_channel"])
    assert len(tables.layers(runs["died"])) == 0


# ---------------------------------------------------------------- source


def test_the_source_around_line_109_with_the_statement_marked(runs):
    lines = str(tables.source(runs["o2"])).splitlines()
    assert lines[0] == "apex/parallel/sync_batchnorm.py"
    marked = [line for line in lines if line.startswith(">")]
    assert [int(line.split()[1]) for line in marked] == [108, 109]
    assert marked[1].endswith("(1 - self.momentum) * self.running_mean")
    # Six lines before and six behind, then the note on the line.
    numbers = [int(line.strip("> ").split()[0]) for line in lines[1:-1]]
    assert numbers == list(range(102, 116))
    assert lines[-1].startswith("The statement stands on lines 108 to 109. ")


def test_a_place_outside_the_layers_file_shows_its_statement(runs):
    lines = str(tables.source(runs["o2_today"])).splitlines()
    assert lines[0] == "torch/nn/modules/conv.py"
    assert all(line.startswith(">") for line in lines[1:4])
    assert "return F.conv2d(" in lines[1]


def test_no_place_no_source(runs):
    assert str(tables.source(runs["plain"])) == "no statement to show"
    assert "no statement to show" in tables.source(runs["died"])._repr_html_()


def test_a_hostile_source_is_escaped(runs):
    result = runs["o2_today"]
    place = {**result.place, "statement": f"x = {HOSTILE!r}", "note": HOSTILE}
    result = dataclasses.replace(result, place=place, file=HOSTILE)
    page = tables.source(result)._repr_html_()
    assert set(_Cells(page).tags) == {"p", "b", "pre", "div"}
    assert page.count(html.escape("<script>")) == 3  # title, statement, note
    source = dataclasses.replace(
        runs["o2"], source_text=runs["o2"].source_text.replace("self.running_mean", "<script>")
    )
    assert "script" not in _Cells(tables.source(source)._repr_html_()).tags


# ---------------------------------------------------------------- a real torch 1.2


@pytest.fixture(scope="module")
def compared():
    return comparison.compare(rule="pow") + comparison.compare(rule="cat")


def _unexplained(compared):
    """The first row that agrees, as if it did not."""
    one = next(one for one in compared if one.agreement == comparison.AGREES)
    ours = one.ours._replace(message="else", outcome="error", error_type="RuntimeError")
    return dataclasses.replace(one, ours=ours, agreement=comparison.DIFFERS)


def test_rules_are_counted(compared):
    table = tables.rules([*compared, _unexplained(compared)])
    assert list(table.index) == ["cat", "pow", "all"]
    total = table.loc["all"]
    assert total["rows"] == len(compared) + 1
    assert total["rows"] == total.drop("rows").sum()
    assert total["differ, reason not known"] == 1
    assert table.loc["pow", "differ, reason known"] == 48


def test_differences_show_the_unexplained_first(compared):
    table = tables.rule_differences([*compared, _unexplained(compared)])
    assert list(table.index) == ["NOT KNOWN", "torch 1.2 had no such operator, whatever the dtypes"]
    assert list(table["rows"]) == [1, 48]
    assert table.iloc[0]["we say"] == "RuntimeError: else"
    assert table.iloc[1]["torch 1.2 said"] == "RuntimeError: in-place pow not implemented"
    assert (
        len(tables.rule_differences([one for one in compared if one.recorded.rule == "cat"])) == 0
    )


def test_rows_by_name(compared):
    table = tables.rule_rows(compared, "cat(float16[3], float32[3])", "no such row")
    ((said, ours),) = table.to_numpy().tolist()
    assert said.startswith("RuntimeError: Expected object of scalar type Half but got scalar type")
    assert ours == "the same"


def test_replays_are_one_row_for_both_models():
    kept = [r for r in recorded.read_replays().results if r.experiment.opt_level == "O2"]
    reported = [r for r in kept if r.experiment.revision == "reported"]
    same = [replays.ComparedReplay(r, r, {}, None) for r in reported]
    table = tables.replays(same)
    assert list(table["we"]) == ["agree", "agree"]
    assert list(table["place"]) == ["forward, sync_batchnorm.py:109", "–"]
    assert table["torch 1.2"].iloc[1].startswith("encoder: completed, degraded; toy: completed")
    wrong = replays.ComparedReplay(reported[0], reported[0], {"line": (109, 7)}, None)
    assert tables.replays([wrong])["we"].iloc[0] == "NOT KNOWN why: line: 7"
