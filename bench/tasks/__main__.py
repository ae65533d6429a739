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

from bench.numerals.comparison import chosen_pairs, compare, runs_by_seed
from bench.numerals.distillation import Run
from bench.numerals.matrix import Folders, train_models
from bench.numerals.options import comparison_parser
from bench.numerals.pairs import CEILING, SFT
from bench.tasks.oracle import measure, summary
from bench.tasks.oracle_report import oracle_table, show_worst
from bench.tasks.pairs import LOSSES, PAIRS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing comparisons, print tables and save figures; or run the oracle."""
    options, console = _parser().parse_args(arguments), Console()
    pairs = chosen_pairs(options, PAIRS)
    if not options.oracle:
        compare(options, pairs, console)
        return
    runs = runs_by_seed(pairs, options.losses, 1, options.evaluations)
    _run_oracle([run for run in runs if run.loss != SFT], console, options)


def _run_oracle(runs: Sequence[Run], console: Console, options: argparse.Namespace) -> None:
    folders = Folders(options.runs)
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
    parser = comparison_parser("tasks", __doc__, LOSSES, tuple(PAIRS))
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
