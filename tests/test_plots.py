"""The figure of what half precision costs, and the same in words."""

import dataclasses

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pytest

from syncbn_lab import plots


@pytest.fixture
def drawn(runs):
    made = []

    def draw(*arguments):
        made.append(plots.cost(*arguments))
        return made[-1]

    yield draw
    for figure in made:
        plt.close(figure)


def _values(result, layer, quantity):
    comparisons = next(found for found in result.layers if found["name"] == layer)["comparisons"]
    return next(c for c in comparisons if c["quantity"] == quantity)["per_channel"]


def _points(axis):
    """The plotted values of each run, by its label; the dashed lines have none of their own."""
    return {
        line.get_label(): list(line.get_ydata())
        for line in axis.lines
        if not line.get_label().startswith("_")
    }


def test_three_panels_with_the_results_values(runs, drawn):
    figure = drawn(runs["half"], runs["single"])
    assert [axis.get_title() for axis in figure.axes] == [
        "batch mean",
        "batch variance",
        "input gradient",
    ]
    for axis, quantity in zip(figure.axes, ("batch mean", "batch var", "dx"), strict=True):
        points = _points(axis)
        assert list(points) == ["O3: float16", "O0: float32"]
        for label, name in (("O3: float16", "half"), ("O0: float32", "single")):
            expected = [max(v, 1e-18) for v in _values(runs[name], "1", quantity)]
            assert points[label] == expected
            assert len(expected) == 8  # the toy's channels
        assert axis.get_yscale() == "log"
        dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
        # One rounding: 11 bits of significand in float16, 24 in float32.
        assert [line.get_ydata()[0] for line in dashed] == [2.0**-11, 2.0**-24]


def test_a_layer_without_statistics_of_its_own_shows_the_running_ones(runs, drawn):
    figure = drawn(runs["plain"], runs["single"])
    assert _points(figure.axes[0])["O0: float32"]
    first = figure.axes[0].lines[0]
    assert list(first.get_ydata()) == [
        max(v, 1e-18) for v in _values(runs["plain"], "1", "running_mean")
    ]


def test_another_layer_is_drawn_on_request(runs, drawn):
    figure = drawn(runs["half"], runs["single"], "4")
    assert "layer 4" in figure.get_suptitle()
    assert _points(figure.axes[2])["O3: float16"] == [
        max(v, 1e-18) for v in _values(runs["half"], "4", "dx")
    ]


def test_an_exact_channel_is_drawn_at_the_floor(runs, drawn):
    layers = [
        {**layer, "comparisons": [{**c, "per_channel": [0.0, 1e-3]} for c in layer["comparisons"]]}
        for layer in runs["half"].layers
    ]
    figure = drawn(dataclasses.replace(runs["half"], layers=layers), runs["single"])
    assert _points(figure.axes[0])["O3: float16"] == [1e-18, 1e-3]


def test_the_figure_of_runs_that_did_not_complete_says_so(runs, drawn):
    figure = drawn(runs["died"], runs["timed_out"])
    assert figure.get_suptitle() == "neither run completed: there is nothing to compare"
    # One of two is drawn by itself.
    assert list(_points(drawn(runs["o2"], runs["single"]).axes[0])) == ["O0: float32"]


# ---------------------------------------------------------------- in words


def test_the_words_name_the_worst_channel_of_each_panel(runs):
    text = plots.cost_text(runs["half"], runs["single"])
    assert text.startswith("In layer 1, of the channel's scale: batch mean off by at most ")
    for title, quantity in (
        ("batch mean", "batch mean"),
        ("batch variance", "batch var"),
        ("input gradient", "dx"),
    ):
        low, high = (max(_values(runs[name], "1", quantity)) for name in ("half", "single"))
        assert f"{title} off by at most {low:.1e} in O3 and {high:.1e} in O0" in text
    assert text.endswith(".")


def test_a_panel_without_values_is_left_out_of_the_words(runs):
    def without(result):
        layers = [
            {**layer, "comparisons": [c for c in layer["comparisons"] if c["quantity"] != "dx"]}
            for layer in result.layers
        ]
        return dataclasses.replace(result, layers=layers)

    text = plots.cost_text(without(runs["half"]), without(runs["single"]))
    assert "input gradient" not in text
    assert "batch variance off by at most " in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "o2",
            "There is nothing to compare: O2 gave reproduced: expected device cpu and dtype Float "
            "but got device cpu and dtype Half.",
        ),
        ("timed_out", "There is nothing to compare: O2 gave timed out: The run was ended after "),
    ],
)
def test_the_words_say_which_run_did_not_complete(runs, name, said):
    text = plots.cost_text(runs[name], runs["single"])
    assert text.startswith(said)
    assert text.endswith(".")
    assert ".." not in text
    assert plots.cost_text(runs["single"], runs[name]) == text


def test_the_words_name_both_runs_that_did_not_complete(runs):
    text = plots.cost_text(runs["o2"], runs["died"])
    assert "O2 gave reproduced" in text
    assert "gave died: The child died" in text
