"""``mopd evaluate``, ``mopd watch``, ``mopd report`` and ``mopd merge``."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mopd_trainer.cli.page import add_address, serve_page


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    summary = "evaluate a model on the held-out sets of a run, without training"
    evaluate = commands.add_parser("evaluate", help=summary, description=summary)
    evaluate.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model or checkpoint, hub name, name of a teacher of the run, or address "
        "of a teacher service",
    )
    evaluate.add_argument("run_file", type=Path, metavar="RUN.YAML", help="settings of the run")
    evaluate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed settings")
    evaluate.add_argument("--json", action="store_true", help="print the metrics as JSON")
    evaluate.set_defaults(run=_evaluate)
    summary = "serve the page of a running or finished run: live curves, completions, teachers"
    watch = commands.add_parser("watch", help=summary, description=summary)
    add_runs(watch)
    add_address(watch)
    watch.set_defaults(run=_watch)
    summary = "write the page of a finished or running run to a file, which needs no network"
    report = commands.add_parser("report", help=summary, description=summary)
    add_runs(report)
    report.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the folder of RUN"
    )
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


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add ``RUN`` and ``OTHER``."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="output_dir of the run")
    parser.add_argument(
        "compared", type=Path, metavar="OTHER", nargs="?", help="a second run, side by side"
    )


def _evaluate(options: argparse.Namespace) -> None:
    from mopd_trainer.api import evaluate
    from mopd_trainer.reporting.console import make_console
    from mopd_trainer.reporting.evaluation_text import set_text

    results = evaluate(options.model, options.run_file, options.overrides)
    if options.json:
        sys.stdout.write(json.dumps(results) + "\n")
        return
    for name, metrics in results.items():
        make_console().print(set_text(name, metrics), markup=False, highlight=False)


def _watch(options: argparse.Namespace) -> None:
    from mopd_trainer.pages.watch import watch_server

    folders = [folder for folder in (options.run_folder, options.compared) if folder is not None]
    server = watch_server(folders, host=options.host, port=options.port)
    serve_page(server, is_opened=options.open)


def _report(options: argparse.Namespace) -> None:
    from mopd_trainer.api import report

    path = report(options.run_folder, options.compared, output=options.output)
    sys.stdout.write(f"{path}\n")


def _merge(options: argparse.Namespace) -> None:
    from mopd_trainer.reporting.console import make_console
    from mopd_trainer.run_folder.merge import merge

    folder = merge(options.run_folder, options.output, dtype=options.dtype)
    make_console().print(f"saved the model to {folder}", markup=False, soft_wrap=True)
