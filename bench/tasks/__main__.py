"""Compare losses on tasks of a stranger: dates in words, subtraction, rows of CSV as JSON.

    python -m bench.tasks --json OUT
    python -m bench.tasks --pairs dates+subtraction,dates --losses prefix_kl,topk_kl --seeds 1
    python -m bench.tasks --oracle --pairs dates+subtraction --losses prefix_kl,ctkd
    python -m bench.tasks --quick

Each task has a teacher with a tokenizer of another kind. A student that completes 10 to 20 % of
the prompts correctly is distilled from one teacher, and from several at once: 400 steps of 64
prompts for every loss. ``topk_kl`` has the same teachers with the student's own tokenizer, the
ceiling of what a transfer can reach; ``sft`` is cross entropy on reference answers.

``--oracle`` trains nothing but the models: it lists the positions at which a loss pushes the
student away from the correct token, worst first (``bench/tasks/oracle.py``).
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from bench.numerals.__main__ import runs_by_seed
from bench.numerals.distillation import Run
from bench.numerals.matrix import Folders, run_all, train_models
from bench.numerals.options import add_corrections, comparison_parser
from bench.numerals.pairs import CEILING, SFT, shortened
from bench.tasks.oracle import measure, summary
from bench.tasks.pairs import LOSSES, PAIRS
from bench.tasks.plot import draw
from bench.tasks.report import comparison, oracle_table, show_worst, table, warnings
from mopd_trainer import ImportanceConfig

#: Steps of ``--quick``, of each model and run.
_QUICK_STEPS = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing comparisons, print tables and save figures; or run the oracle."""
    options = _parser().parse_args(arguments)
    console = Console()
    steps = _QUICK_STEPS if options.quick else options.steps
    model_steps = _QUICK_STEPS if options.quick else None
    pairs = [
        replace(
            shortened(PAIRS[name], steps, model_steps),
            temperature=options.temperature,
            teacher_temperature=options.teacher_temperature,
            importance=ImportanceConfig(least=options.least_importance),
            corrections=options.corrections,
        )
        for name in options.pairs
    ]
    folders = Folders(options.runs)
    runs = runs_by_seed(pairs, options.losses, 1 if options.oracle else options.seeds, 20)
    if options.oracle:
        _run_oracle([run for run in runs if run.loss != SFT], folders, console, options)
        return
    results = run_all(runs, folders, console, options.processes)
    compared = comparison(results, pairs, folders.models)
    for pair in pairs:
        console.print(table(compared, pair.name))
        for line in warnings(compared, pair.name):
            console.print(line, highlight=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps(compared, indent=1) + "\n")
    picture = options.plot or (options.json or folders.root / "tasks").with_suffix(".png")
    draw(compared, picture)
    console.print(f"curves in {picture}", soft_wrap=True)


def _run_oracle(
    runs: Sequence[Run], folders: Folders, console: Console, options: argparse.Namespace
) -> None:
    train_models(
        [replace(run, loss=loss) for run in runs for loss in (run.loss, CEILING)],
        folders,
        console,
        options.processes,
    )
    figures: dict[str, object] = {}
    for run in runs:
        pushes = measure(run, folders.models, options.prompts, distilled=options.distilled)
        console.print(oracle_table(run, summary(pushes)))
        show_worst(console, pushes, options.worst)
        figures[run.name] = summary(pushes)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = comparison_parser("tasks", __doc__, LOSSES, tuple(PAIRS), all_steps="400")
    parser.add_argument(
        "--teacher-temperature",
        type=float,
        metavar="T",
        help="of the teachers' distributions; below 1, targets are sharper (default: 1)",
    )
    add_corrections(parser)
    parser.add_argument(
        "--quick", action="store_true", help="2 steps of everything, to test the program"
    )
    oracle = parser.add_argument_group("oracle")
    oracle.add_argument(
        "--oracle",
        action="store_true",
        help="list positions that are pushed the wrong way, or not at all",
    )
    oracle.add_argument(
        "--prompts", type=int, default=64, help="held-out prompts per task (default: 64)"
    )
    oracle.add_argument(
        "--distilled", action="store_true", help="use the students of finished runs"
    )
    oracle.add_argument("--worst", type=int, default=8, help="positions to show (default: 8)")
    return parser


if __name__ == "__main__":
    main()
