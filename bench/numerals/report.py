"""Results of a comparison: means over seeds, as tables and as JSON."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table

from bench.numerals.pairs import LOSSES, SFT, Pair

Result = dict[str, Any]
Summary = dict[str, Any]


def summary(
    results: Sequence[Result], pairs: Sequence[Pair], teachers: Mapping[str, float]
) -> Summary:
    """Return mean, lowest and highest accuracy over the seeds by pair and loss, and every run.

    Args:
        teachers: pair's name -> the teacher's accuracy on the held-out exercises.
    """
    return {
        "machine": {
            "processor": platform.processor(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "pairs": {
            pair.name: {
                "title": pair.title,
                "steps": pair.steps,
                "held_out": sum(len(task.held_out()) for task in pair.tasks.values()),
                "teacher": teachers[pair.name],
                "before": spread([r["before"] for r in _distinct_students(results, pair)]),
                "losses": {
                    loss: _loss_summary(matches)
                    for loss in LOSSES
                    if (matches := [r for r in results if _is_of(r, pair, loss)])
                },
            }
            for pair in pairs
        },
        "runs": list(results),
    }


def table(comparison: Summary, name: str) -> Table:
    """Return the table of one pair: the baselines, then the losses, best first."""
    pair = comparison["pairs"][name]
    shown = Table(
        title=f"\n{name}: {pair['title']}\n{pair['steps']:,} steps, accuracy on "
        f"{pair['held_out']} held-out exercises",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("")
    for heading in ("mean", "lowest", "highest", "seeds", "first loss, nats", "processor s"):
        shown.add_column(heading, justify="right")
    shown.add_row("teacher", f"{pair['teacher']:.1%}", "", "", "", "", "")
    shown.add_row("student before", *_accuracies(pair["before"]), "", "")
    losses: Mapping[str, Summary] = pair["losses"]
    ranked = sorted(losses, key=lambda loss: (loss != SFT, -losses[loss]["accuracy"]["mean"]))
    for at, loss in enumerate(ranked):
        figures = losses[loss]
        shown.add_row(
            "sft on reference answers" if loss == SFT else loss,
            *_accuracies(figures["accuracy"]),
            f"{figures['first_loss']['mean']:.6f}",
            f"{figures['processor_seconds']:.0f}",
            end_section=loss == SFT or at == len(ranked) - 1,
        )
    return shown


def _loss_summary(results: Sequence[Result]) -> Summary:
    return {
        "accuracy": spread([result["accuracy"] for result in results]),
        "first_loss": spread([result["first_loss"] for result in results]),
        "processor_seconds": statistics.fmean(r["processor_seconds"]["total"] for r in results),
    }


def spread(values: Sequence[float]) -> Summary:
    """Return mean, lowest and highest value, and their number."""
    return {
        "mean": statistics.fmean(values),
        "lowest": min(values),
        "highest": max(values),
        "seeds": len(values),
    }


def _accuracies(spread: Summary) -> list[str]:
    shares = [f"{spread[key]:.1%}" for key in ("mean", "lowest", "highest")]
    return [*shares, str(spread["seeds"])]


def _distinct_students(results: Sequence[Result], pair: Pair) -> list[Result]:
    """Return one run of every seed: all losses start from the same student."""
    return list({r["seed"]: r for r in results if r["pair"] == pair.name}.values())


def _is_of(result: Result, pair: Pair, loss: str) -> bool:
    return result["pair"] == pair.name and result["loss"] == loss
