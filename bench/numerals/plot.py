"""Plot of a comparison: accuracy on held-out prompts over steps, one panel per pair and teacher."""

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from bench.numerals.pairs import SFT

mpl.use("Agg")  # writes files, also without a display


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Save the plot: thin lines are seeds, thick lines their mean."""
    losses = dict.fromkeys(run["loss"] for run in figures["runs"])
    colours = dict(zip(losses, cycle(mpl.color_sequences["tab10"]), strict=False))
    panels = [(name, task) for name, pair in figures["pairs"].items() for task in pair["tasks"]]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained"
    )
    for axis, (name, task) in zip(axes.flat, panels, strict=False):
        pair = figures["pairs"][name]
        axis.set_title(f"{task} ({pair['title']})", fontsize=8)
        axis.set_ylim(-0.02, 1.02)
        teacher = (pair["teachers"] or pair["ceiling"])[task]["greedy"]
        axis.axhline(teacher, color="black", linewidth=0.8, linestyle=":")
        for loss in pair["losses"]:
            runs = [r for r in figures["runs"] if (r["pair"], r["loss"]) == (name, loss)]
            style = {"color": colours[loss], "linestyle": "--" if loss == SFT else "-"}
            curves = [
                {point["step"]: point["accuracies"][task] for point in run["curve"]} for run in runs
            ]
            for curve in curves:
                axis.plot(list(curve), list(curve.values()), linewidth=0.6, alpha=0.6, **style)
            steps = sorted(set.intersection(*map(set, curves)))  # of runs that were not stopped
            means = [fmean(curve[step] for curve in curves) for step in steps]
            axis.plot(steps, means, linewidth=1.8, label=loss, **style)
    for axis in list(axes.flat)[len(panels) :]:
        axis.axis("off")
    handles = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(losses), fontsize=8
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
