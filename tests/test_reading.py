"""What a notebook says under its tables, for every way a run can end."""

import dataclasses

import pytest

import syncbn_lab as lab
from syncbn_lab import reading, recorded, replays
from syncbn_lab.cases import find_case
from syncbn_lab.params import choose
from syncbn_lab.rules import comparison

O2 = find_case("apex-481-o2")
LINE_109 = "expected device cpu and dtype Float but got device cpu and dtype Half"
NONE = "relu(): argument 'input' (position 1) must be Tensor, not NoneType"
NEXT_CONV = "Input type (float) and bias type (c10::Half) should be the same"


def test_a_sentence_shows_itself_as_markdown():
    assert reading.Sentence("**x**")._repr_markdown_() == "**x**"


# ---------------------------------------------------------------- the run


def test_outcome_of_a_reproduced_run(runs):
    assert reading.outcome(runs["o2"], O2) == (
        "**reproduced.** The reported error was raised in forward, "
        "apex/parallel/sync_batchnorm.py line 109. Message (raised by our rule): "
        f"`{LINE_109}`. It rests on a recorded row: for `add(float16[3], float32[3])` a real torch "
        "1.2.0 on a CPU said exactly this. It matches the reported message: **but for the "
        "device**."
    )


def test_outcome_of_a_run_that_completed_right(runs):
    assert reading.outcome(runs["plain"], None) == (
        "**completed, right.** It ran to the end. This is a control."
    )


def test_outcome_of_a_run_that_completed_degraded(runs):
    result = runs["o1_today"]
    text = reading.outcome(result, find_case("apex-481-o1"))
    assert text.startswith(
        "**completed, degraded.** It ran to the end, where the reported run raised an error; "
    )
    assert result.findings[0] in text
    assert "matches" not in text  # there is no message to match


def test_outcome_of_a_different_error(runs):
    text = reading.outcome(runs["o2_today"], O2)
    assert text.startswith("**different error.** An error was raised in forward in layer 3, ")
    assert f"`{NEXT_CONV}`" in text
    assert text.endswith("It matches the reported message: **no**.")


def test_outcome_of_a_control_that_raises_shows_its_message(runs):
    text = reading.outcome(runs["control_raises"], None)
    assert text.startswith("**different error.** An error was raised in forward ")
    assert f"`{NONE}`" in text
    assert "matches" not in text
    assert text.endswith("This is a control.")


def test_outcome_of_a_run_that_died(runs):
    text = reading.outcome(runs["died"], None)
    assert text.startswith("**died.** The child died: killed by SIGKILL")
    assert "memory" in text


def test_outcome_of_a_run_that_was_ended(runs):
    assert reading.outcome(runs["timed_out"], O2) == (
        "**timed out.** The run was ended after 0.01 s."
    )


# ---------------------------------------------------------------- the place


def test_place_counts_by_statement_and_says_what_the_traceback_says(runs):
    text = reading.place(runs["o2"])
    assert text.startswith(
        "The error stands at **apex/parallel/sync_batchnorm.py line 109** (this Python's "
        "traceback says 108), in layer `1`. It held "
    )
    assert "`mean` float16" in text
    assert "`self.running_mean` float32" in text


def test_place_of_a_refused_gradient_names_no_line_of_another_file(runs):
    result = runs["o1"]
    text = reading.place(result)
    # The traceback ends in torch; its number says nothing about this file.
    assert result.traceback_line != result.line
    assert "traceback" not in text
    assert text.startswith("The error stands at **apex/parallel/sync_batchnorm_kernel.py line ")
    # What the statement returned, and nothing else that the function held.
    assert text.endswith("It held `grad_input`, `grad_weight`, `grad_bias` float32.")
    assert "Gradient 0 is float32 where" in result.place["note"]


def test_place_with_many_operands_counts_those_it_does_not_name(runs):
    tensor = runs["o2"].place["operands"]["mean"]
    operands = {f"t{i}": tensor for i in range(6)}
    result = dataclasses.replace(runs["o2"], place={**runs["o2"].place, "operands": operands})
    text = reading.place(result)
    # Four names of a dtype are enough, and the rest is counted, not dropped.
    assert "It held `t0`, `t1`, `t2`, `t3` and 2 more float16." in text


def test_place_where_nothing_was_raised(runs):
    assert reading.place(runs["plain"]) == (
        "Nothing was raised, so there is no place to show. It ran to the end."
    )
    assert reading.place(runs["died"]).startswith("Nothing was raised, so there is no place ")


def test_place_of_an_error_that_names_none(runs):
    result = dataclasses.replace(runs["o2"], place=None)
    assert reading.place(result).startswith(
        "The error names no statement, so there is no place to show. "
    )


# ---------------------------------------------------------------- today's rules


def test_today_breaks_later(runs):
    text = reading.today(runs["o2"], runs["o2_today"])
    assert "**different error**" in text
    assert f"{len(runs['o2_today'].silent_casts)} operations went through without a word, " in text
    assert text.endswith(f"It breaks later, in forward in layer `3`: `{NEXT_CONV}`.")


def test_today_completes_and_costs(runs):
    text = reading.today(runs["o1"], runs["o1_today"])
    # The two layers' gradients are what the engine cast.
    assert "2 operations went through without a word, 2 of them gradients" in text
    assert f"It costs: {runs['o1_today'].findings[0]}." in text
    assert text.endswith("The error is gone; that is not the same as being right.")


def test_today_raises_the_same_error(runs):
    text = reading.today(runs["cast_added"], runs["cast_added_today"])
    assert "It breaks as well, in forward" in text
    assert "later" not in text


def test_today_costs_nothing(runs):
    text = reading.today(runs["plain"], runs["plain"])
    assert "torch 1.2 would have refused nothing on the way. " in text
    assert text.endswith("within its error budget, so it costs nothing here.")


@pytest.mark.parametrize("name", ["died", "timed_out"])
def test_today_says_nothing_of_a_run_that_has_no_end(runs, name):
    # What would have been refused on a way that nobody saw to its end is not known.
    text = reading.today(runs["o2"], runs[name])
    assert "refused" not in text
    assert text.endswith(runs[name].reason)


# ---------------------------------------------------------------- the control


def test_control_that_completes(runs):
    assert reading.control(runs["plain"]) == (
        "The same configuration with `batchnorm`: completed, right."
    )
    half = reading.control(runs["half"])
    assert half.startswith(
        f"The same configuration with `apex`: completed, {runs['half'].verdict}: "
    )
    assert runs["half"].findings[0] in half


def test_control_that_does_not(runs):
    assert reading.control(runs["timed_out"]).endswith(
        "`apex`: timed out. The run was ended after 0.01 s."
    )


# ---------------------------------------------------------------- the summing up


def _record(runs, result, today, keep="as reported"):
    fields = {n: getattr(runs[result].experiment, n) for n in ("opt_level", "implementation")}
    chosen = choose({**fields, "keep_batchnorm_fp32": keep})
    return lab.reproduction(chosen, runs[result], runs[today], runs["plain"])


def test_showed_for_a_reproduced_run(runs):
    lines = reading.showed(_record(runs, "o2", "o2_today")).splitlines()
    assert lines == [
        "- **The reported error happens: O2 with `apex` at revision `reported`, in forward, at "
        "sync_batchnorm.py line 109; message but for the device, raised by our rule.**",
        f"- Today's torch fails elsewhere, in forward: `{NEXT_CONV}`.",
        "- Plain batch norm in its place: completed, right.",
        "- This kit's own layer is not there yet, so nothing is said for it.",
    ]


def test_showed_for_today_with_silent_casts(runs):
    text = reading.showed(_record(runs, "o1", "o1_today"))
    finding = runs["o1_today"].findings[0]
    assert f"- Today's torch: completed, degraded, 2 silent casts: {finding}.\n" in text


def test_showed_for_another_error_than_the_reported_one(runs):
    lines = reading.showed(_record(runs, "cast_added", "cast_added_today")).splitlines()
    assert lines[0] == (
        "- **The reported error does not happen so: O2 with `apex` at revision `cast-added`: "
        "different error.**"
    )
    assert lines[1].startswith(f"- What was raised instead: `{NONE}` (raised by ")
    # The same error is not "elsewhere".
    assert lines[2] == f"- Today's torch fails with the same error, in forward: `{NONE}`."
    assert len(lines) == 5  # the most that a summary holds


def test_showed_for_a_control(runs):
    text = reading.showed(_record(runs, "plain", "single"))
    assert text.startswith("- **O0 with `batchnorm` is a control: completed, right.**\n")
    raised = reading.showed(_record(runs, "control_raises", "cast_added_today"))
    assert f"- What was raised: `{NONE}` (" in raised  # instead of what? nothing was reported


def test_showed_names_keep_whatever_it_is(runs):
    record = _record(runs, "half", "half", keep=False)
    for keep, said in ((False, "O3 + keep_batchnorm_fp32=False with"), (None, "O3 with")):
        text = reading.showed({**record, "keep_batchnorm_fp32": keep})
        assert text.startswith(f"- **{said} ")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("a `b` c", "`` a `b` c ``"),  # torch quotes names in backticks here and there
        ("a\nb", "`a b`"),  # a message of several lines would end a list item
        ("<script>x</script>", "`<script>x</script>`"),  # as code, a renderer escapes it
    ],
)
def test_a_message_stays_code_whatever_it_holds(runs, message, code):
    result = dataclasses.replace(runs["o2_today"], message=message)
    assert code in reading.outcome(result, O2)
    assert code in reading.today(runs["o2"], result)
    assert code in reading.showed(
        {**_record(runs, "o2", "o2_today"), "outcome": "different error", "message": message}
    )


def test_what_was_run_on_a_real_torch12_is_said_in_one_box():
    text = reading.real_torch12()
    assert text.startswith("> ")
    assert "\n" not in text
    assert "never run on a real torch 1.2" in text


# ---------------------------------------------------------------- a real torch 1.2


def test_the_comparison_of_rules():
    kept, rows = comparison.compare_with("recorded", "pow")
    text = reading.rules(rows, kept)
    assert text.startswith("**132 of 180 comparable rows agree with torch 1.2.0, in outcome and")
    assert "48 differ, each for a known reason" in text
    lost = [dataclasses.replace(one, reason=None) for one in rows]
    assert "**48 of them for no known reason: `__ipow__(" in reading.rules(lost, kept)


def test_the_comparison_of_replays():
    kept = recorded.read_replays().results
    same = [replays.ComparedReplay(r, r, {}, None) for r in kept]
    assert reading.replays(same) == (
        "**36 of 36 replays agree with our run of the same experiment: outcome, message, phase, "
        "place and every dtype.**"
    )
    other = [
        replays.ComparedReplay(kept[0], dataclasses.replace(kept[0], verdict="wrong"), {}, None),
        replays.ComparedReplay(kept[1], kept[1], {"message": ("a", "b")}, "a known one"),
        replays.ComparedReplay(kept[2], kept[2], {"line": (1, 2)}, None),
    ]
    text = reading.replays(other)
    assert "1 differ in the message alone: a known one." in text
    assert "**1 differ for no known reason.**" in text
    assert "In 1 the verdict on the values is another one" in text


def test_the_sum_of_both():
    kept, rows = comparison.compare_with("recorded", "cat")
    same = [replays.ComparedReplay(r, r, {}, None) for r in recorded.read_replays().results[:3]]
    results = lab.comparison("recorded", kept, rows, same)
    text = reading.compared(results)
    assert "**178 of 178 comparable rows agree with a real torch 1.2.0 letter for letter;" in text
    assert "`apex-481-o1`, `apex-481-o2`, `apex-481-o3-keep`" in text
    assert f"were recorded on {kept.provenance['date']}" in text
    lost = reading.compared({**results, "differ_unexplained": ["cat(a)"], "torch12": "live"})
    assert "Without a reason: `cat(a)`." in lost
    assert "were asked now" in lost


def test_where_a_record_comes_from():
    text = reading.recorded_in(recorded.read_replays().provenance)
    assert "in torch 1.2.0 (git 8554416a19), CPython 3." in text


def test_the_evidence_of_a_message(runs):
    assert "said `Function GivenBackward returned an invalid gradient" in reading.outcome(
        runs["o1"], runs["o1"].case and lab.find_case(runs["o1"].case)
    )
