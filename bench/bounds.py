"""Accuracy by step with and without the bounds of prefix KL.

    python -m bench.bounds --tasks dates,rows,german,chinese_dates,hindi --seeds 3 --bounds on,off
    python -m bench.bounds --tasks hindi --seeds 1 --steps 100

The students, teachers and steps are those of ``bench.tasks``; the only difference between two runs
is ``bounds`` of the loss. A finished run is a JSON file in ``--runs``, and is not made again, so
that the comparison can be made in parts: seeds first, then tasks.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.numerals.distillation import Run
from bench.numerals.matrix import Folders, finished, run_all
from bench.numerals.options import NameList
from bench.numerals.pairs import WITHOUT_BOUNDS, shortened
from bench.numerals.report import percentages, spread
from bench.tasks.pairs import PAIRS

#: Name of a task here -> name of a pair of ``bench.tasks``.
TASKS: Mapping[str, str] = {
    "dates": "dates",
    "rows": "rows",
    "german": "german_numbers",
    "chinese_dates": "chinese_from_bytes",
    "hindi": "hindi_dates",
}
_LOSSES: Mapping[str, str] = {"on": "prefix_kl", "off": WITHOUT_BOUNDS}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, print a table of each task, and save figures."""
    options = _parser().parse_args(arguments)
    console, folders = Console(), Folders(options.runs)
    runs = [
        Run(
            shortened(PAIRS[TASKS[task]], options.steps, options.model_steps),
            _LOSSES[bounds],
            seed,
            options.evaluations,
        )
        for seed in range(options.seeds)
        for task in options.tasks
        for bounds in options.bounds
    ]
    if not options.report:
        run_all(runs, folders, console, options.processes)
    figures = summary(runs, folders)
    for pair, by_bounds in figures.items():
        console.print(table(pair, by_bounds))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def summary(runs: Sequence[Run], folders: Folders) -> dict[str, dict[str, Any]]:
    """Return the figures of finished runs: pair -> ``on`` or ``off`` -> seeds, accuracy by step
    (mean, lowest, highest), the loss in the last part, and seconds of a processor."""
    figures: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(run.pair.name for run in runs):
        for bounds, loss in _LOSSES.items():
            chosen = [run for run in runs if (run.pair.name, run.loss) == (name, loss)]
            results = [each for run in chosen if (each := finished(run, folders)) is not None]
            if results:
                figures.setdefault(name, {})[bounds] = _figures(results)
    return figures


def _figures(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [point["step"] for point in results[0]["curve"]]
    curves = [{point["step"]: point["accuracy"] for point in each["curve"]} for each in results]
    return {
        "seeds": len(results),
        # A run that was stopped has no later points.
        "accuracy": {
            step: spread([curve[step] for curve in curves if step in curve]) for step in steps
        },
        "loss": fmean(each["curve"][-1].get("loss", 0.0) for each in results),
        "processor_seconds": fmean(each["processor_seconds"]["total"] for each in results),
    }


def table(pair: str, figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the accuracies of one task: a row for each evaluated step."""
    seeds = ", ".join(f"{each['seeds']} with bounds {name}" for name, each in figures.items())
    shown = Table(
        title=f"\n{PAIRS[pair].title}: % of held-out prompts (seeds: {seeds})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    shown.add_column("step", justify="right")
    for name in figures:
        shown.add_column(f"bounds {name}", justify="right", no_wrap=True)
    for step in next(iter(figures.values()))["accuracy"]:
        columns = (each["accuracy"].get(step) for each in figures.values())
        shown.add_row(str(step), *("–" if each is None else percentages(each) for each in columns))
    for label, key, format_ in (
        ("loss", "loss", "{:.4f}"),
        ("processor s", "processor_seconds", "{:.0f}"),
    ):
        shown.add_row(label, *(format_.format(each[key]) for each in figures.values()))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, known in (("tasks", tuple(TASKS)), ("bounds", tuple(_LOSSES))):
        parser.add_argument(
            f"--{name}",
            type=NameList(known),
            default=known,
            metavar="A,B",
            help=f"of {', '.join(known)} (default: all)",
        )
    parser.add_argument("--seeds", type=int, default=3, help="students of each (default: 3)")
    parser.add_argument("--steps", type=int, help="of every run (default: 400)")
    parser.add_argument("--model-steps", type=int, help="of training models, to try things")
    parser.add_argument("--evaluations", type=int, default=20, help="of a run (default: 20)")
    parser.add_argument("--processes", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--report", action="store_true", help="only show finished runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where the figures go")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs", "tasks"),
        metavar="DIR",
        help="models and finished runs (default: %(default)s, as bench.tasks)",
    )
    return parser


if __name__ == "__main__":
    main()
