"""Compare losses between tokenizers that split numbers differently.

    python -m bench.numerals --json OUT
    python -m bench.numerals --pairs digits_to_numerals --losses prefix_kl,gold,sft --seeds 1

A teacher is trained to add (or to reverse lists of words), a student only on the output format.
Each loss distils the teacher on the student's samples, without reference answers, with the same
steps, prompts and learning rate. Cross entropy on reference answers (``sft``) measures how much the
student can learn in that budget.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from bench.numerals.distillation import Run
from bench.numerals.material import held_out_accuracy
from bench.numerals.matrix import Folders, run_all
from bench.numerals.options import comparison_parser
from bench.numerals.pairs import LOSSES, PAIRS, Pair, shortened
from bench.numerals.plot import draw
from bench.numerals.report import summary, table
from mopd_trainer import ImportanceConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing comparisons, print tables and save figures."""
    options = _parser().parse_args(arguments)
    console = Console()
    importance = ImportanceConfig(least=options.least_importance)
    pairs = [
        replace(
            shortened(PAIRS[name], options.steps, options.model_steps),
            importance=importance,
            temperature=options.temperature,
        )
        for name in options.pairs
    ]
    folders = Folders(options.runs)
    runs = runs_by_seed(pairs, options.losses, options.seeds, options.evaluations)
    results = run_all(runs, folders, console, options.processes)
    teachers = {
        pair.name: held_out_accuracy(side, "teacher", 0, folders.models)["greedy"]
        for pair in pairs
        for side in pair.teachers.values()
    }
    results_summary = summary(results, pairs, teachers)
    for pair in pairs:
        console.print(table(results_summary, pair.name))
    if options.json:
        options.json.write_text(json.dumps(results_summary, indent=1) + "\n")
    picture = options.plot or (options.json or folders.root / "numerals").with_suffix(".png")
    draw(results_summary, picture)
    console.print(f"curves and bars in {picture}", soft_wrap=True)


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


def _parser() -> argparse.ArgumentParser:
    parser = comparison_parser(
        "numerals",
        __doc__,
        LOSSES,
        tuple(PAIRS),
        all_losses="all, where a pair can have them",
        all_steps="each pair's own",
    )
    parser.add_argument(
        "--model-steps", type=int, help="of training teachers and warm students, to try things"
    )
    parser.add_argument(
        "--evaluations", type=int, default=20, help="points of a curve (default: 20)"
    )
    return parser


if __name__ == "__main__":
    main()
