"""Make what is missing of a comparison, print its tables, and save figures and a picture."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from bench.numerals.distillation import Run
from bench.numerals.matrix import Folders, run_all
from bench.numerals.pairs import Pair, shortened
from bench.numerals.plot import draw
from bench.numerals.report import comparison, table, warnings
from mopd_trainer import ImportanceConfig

#: Steps of ``--quick``, of each model and run.
_QUICK_STEPS = 2


def chosen_pairs(options: argparse.Namespace, known: Mapping[str, Pair]) -> list[Pair]:
    """Return the pairs that the options name, with the settings of the options."""
    steps = _QUICK_STEPS if options.quick else options.steps
    model_steps = _QUICK_STEPS if options.quick else options.model_steps
    return [
        replace(
            shortened(known[name], steps, model_steps),
            temperature=options.temperature,
            teacher_temperature=options.teacher_temperature,
            importance=ImportanceConfig(least=options.least_importance),
            corrections=options.corrections,
        )
        for name in options.pairs
    ]


def compare(options: argparse.Namespace, pairs: Sequence[Pair], console: Console) -> None:
    """Compare the losses of the options on pairs."""
    folders = Folders(options.runs)
    runs = runs_by_seed(pairs, options.losses, options.seeds, options.evaluations)
    results = run_all(runs, folders, console, options.processes)
    compared = comparison(results, pairs, folders.models)
    for pair in pairs:
        console.print(table(compared, pair.name))
        for line in warnings(compared, pair.name):
            console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(compared, indent=1) + "\n")
    picture = options.plot or (options.json or folders.root / "figures").with_suffix(".png")
    draw(compared, picture)
    console.print(f"curves in {picture}", soft_wrap=True)


def runs_by_seed(
    pairs: Sequence[Pair], losses: Sequence[str], seeds: int, evaluations: int
) -> list[Run]:
    """List the runs seed by seed, so that an interruption leaves complete seeds."""
    return [
        Run(pair, loss, seed, evaluations)
        for seed in range(seeds)
        for loss in losses
        for pair in pairs
        if loss in pair.losses
    ]
