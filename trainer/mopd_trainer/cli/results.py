"""``mopd report`` and ``mopd merge``."""

import argparse
from pathlib import Path
from typing import Any


def add_parsers(commands: Any) -> None:
    """Add ``mopd report`` and ``mopd merge``."""
    summary = "write report.html of a finished or running run: curves, timings and completions"
    report = commands.add_parser("report", help=summary, description=summary)
    report.add_argument("run_folder", type=Path, metavar="RUN", help="output_dir of the run")
    report.set_defaults(run=_report)
    summary = "merge the adapters of a LoRA run into an ordinary model folder"
    merge = commands.add_parser("merge", help=summary, description=summary)
    merge.add_argument(
        "run_folder", type=Path, metavar="RUN", help="output_dir of the run, or a checkpoint"
    )
    merge.add_argument("output", type=Path, metavar="OUT", help="folder to create")
    merge.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the saved weights (default: float32)",
    )
    merge.set_defaults(run=_merge)


def _report(options: argparse.Namespace) -> None:
    from mopd_trainer.api import report
    from mopd_trainer.reporting.console import make_console

    make_console().print(str(report(options.run_folder)), markup=False, soft_wrap=True)


def _merge(options: argparse.Namespace) -> None:
    from mopd_trainer.reporting.console import make_console
    from mopd_trainer.run_folder.merge import merge

    folder = merge(options.run_folder, options.output, dtype=options.dtype)
    make_console().print(f"saved the model to {folder}", markup=False, soft_wrap=True)
