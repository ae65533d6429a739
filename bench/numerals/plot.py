"""Plot of a comparison: accuracy over steps, and bars of the final accuracy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from bench.numerals.pairs import LOSSES, SFT

mpl.use("Agg")  # writes files, also without a display

_COLOURS = mpl.color_sequences["tab10"]
_PALETTE: Mapping[str, Any] = {
    **dict(zip((loss for loss in LOSSES if loss != SFT), _COLOURS, strict=True)),
    SFT: "0.35",
}


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Save the plot of a ``report.summary``: thin lines are seeds, thick lines their mean."""
    names = list(summary["pairs"])
    figure, axes = plt.subplots(
        2, len(names), figsize=(4.4 * len(names), 7.2), squeeze=False, layout="constrained"
    )
    for column, name in enumerate(names):
        pair = summary["pairs"][name]
        runs = [run for run in summary["runs"] if run["pair"] == name]
        _draw_curves(axes[0, column], pair, runs)
        axes[0, column].set_title(fill(f"{name}: {pair['title']}", width=60), fontsize=8)
        _draw_bars(axes[1, column], pair)
    for row in axes:
        row[0].set_ylabel("accuracy on held-out exercises")
    shown = [loss for loss in LOSSES if any(run["loss"] == loss for run in summary["runs"])]
    handles = [
        plt.Line2D([], [], color=_PALETTE[loss], linestyle=_style(loss), label=loss)
        for loss in shown
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(shown), fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_curves(axis: Any, pair: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    axis.axhline(pair["teacher"], color="black", linewidth=0.8, linestyle=":")
    for loss in pair["losses"]:
        curves = [run["curve"] for run in runs if run["loss"] == loss]
        steps = [point["step"] for point in curves[0]]
        shares = np.array([[point["accuracy"] for point in curve] for curve in curves])
        style = {"color": _PALETTE[loss], "linestyle": _style(loss)}
        axis.plot(steps, shares.T, linewidth=0.6, alpha=0.6, **style)
        axis.plot(steps, shares.mean(axis=0), linewidth=2.0, **style)
    axis.set_ylim(-0.02, 1.02)
    axis.set_xlabel("steps")


def _draw_bars(axis: Any, pair: Mapping[str, Any]) -> None:
    bars = {loss: figures["accuracy"] for loss, figures in pair["losses"].items()}
    labels = ["teacher", "before", *bars]
    spreads = [pair["before"], *bars.values()]
    means = [pair["teacher"], *(spread["mean"] for spread in spreads)]
    below = [0.0, *(spread["mean"] - spread["lowest"] for spread in spreads)]
    above = [0.0, *(spread["highest"] - spread["mean"] for spread in spreads)]
    colours = ["black", "0.75", *(_PALETTE[loss] for loss in bars)]
    axis.bar(labels, means, color=colours, yerr=[below, above], capsize=2, width=0.7)
    for at, (mean, over) in enumerate(zip(means, above, strict=True)):
        place = (at, mean + over)
        axis.annotate(
            f"{mean:.0%}", place, (0, 3), textcoords="offset points", ha="center", fontsize=7
        )
    axis.set_ylim(0, 1.12)
    axis.tick_params(axis="x", labelrotation=60, labelsize=7)


def _style(loss: str) -> Literal["-", "--"]:
    return "--" if loss == SFT else "-"
