"""Figures, made of results; nothing here runs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

from syncbn_lab.run_result import RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Two colours that differ in lightness and for every kind of colour vision, and two markers.
_STYLES = (("#b45309", "o"), ("#1d4ed8", "s"))
_ROUNDOFFS = {"float16": 2.0**-11, "float32": 2.0**-24, "bfloat16": 2.0**-8}
_FLOOR = 1e-18
_PANELS = (
    ("batch mean", "running_mean", "batch mean"),
    ("batch var", "running_var", "batch variance"),
    ("dx", "dx", "input gradient"),
)


def cost(low: RunResult, high: RunResult, layer: str | None = None) -> Figure:
    """Error of one layer in low and in high precision, channel by channel, on a log scale.

    Three panels: batch mean and variance (the running ones where a layer does not show its
    own), and the input gradient. Each value is the largest error in the channel over the
    channel's scale (what was added up to make it), both against the float64 oracle fed with
    that run's own inputs.
    Dashed lines: the unit roundoff of each dtype, what one rounding alone may cost.
    """
    chosen = layer or _first_layer(low) or _first_layer(high)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    figure.subplots_adjust(left=0.08, right=0.99, bottom=0.15, top=0.82, wspace=0.05)
    for axis, (own, running, title) in zip(axes, _PANELS, strict=True):
        for result, (colour, marker) in zip((low, high), _STYLES, strict=True):
            comparison = _comparison(result, chosen, own) or _comparison(result, chosen, running)
            if comparison is None:
                continue
            values = [max(value, _FLOOR) for value in comparison["per_channel"]]
            label = f"{result.experiment.configuration}: {comparison['dtype']}"
            axis.semilogy(range(len(values)), values, marker, color=colour, label=label)
            roundoff = _ROUNDOFFS.get(comparison["dtype"])
            if roundoff:
                axis.axhline(roundoff, color=colour, linestyle="--", linewidth=1)
        axis.set_title(title)
        axis.set_xlabel("channel")
        axis.grid(True, which="major", alpha=0.3)
        axis.minorticks_off()
        if axis.has_data():
            axis.legend(fontsize=8)
    axes[0].set_ylabel("error / channel's scale")
    figure.suptitle(
        f"layer {chosen}: half against single precision, each against float64"
        if chosen
        else "neither run completed: there is nothing to compare"
    )
    return figure


def cost_text(low: RunResult, high: RunResult, layer: str | None = None) -> str:
    """The figure in words: the worst channel of each panel, for both precisions."""
    chosen = layer or _first_layer(low) or _first_layer(high)
    missing = [result for result in (low, high) if not result.layers]
    if missing:
        return " ".join(
            f"There is nothing to compare: {result.experiment.configuration} gave "
            f"{result.outcome}: {(result.message or result.reason).rstrip('.')}."
            for result in missing
        )
    sentences = []
    for own, running, title in _PANELS:
        said = []
        for result in (low, high):
            comparison = _comparison(result, chosen, own) or _comparison(result, chosen, running)
            if comparison is not None and comparison["per_channel"]:
                worst = max(comparison["per_channel"])
                said.append(f"{worst:.1e} in {result.experiment.configuration}")
        if said:
            sentences.append(f"{title} off by at most {' and '.join(said)}")
    return f"In layer {chosen}, of the channel's scale: {'; '.join(sentences)}."


def _first_layer(result: RunResult) -> str | None:
    return result.layers[0]["name"] if result.layers else None


def _comparison(result: RunResult, layer: str | None, quantity: str) -> dict | None:
    for found in result.layers:
        if found["name"] == layer:
            for comparison in found["comparisons"]:
                judged = len(comparison["per_channel"]) - comparison["unjudged_channels"]
                if comparison["quantity"] == quantity and judged:
                    return comparison
    return None
