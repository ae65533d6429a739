"""``mopd train`` and ``mopd check``."""

import argparse
from pathlib import Path
from typing import Any

OVERRIDES = """\
KEY=VALUE replaces a setting of the file, with dots for nesting:
  max_steps=10 teachers.math.top_k=32 student.betas=[0.9,0.99]
An empty section is KEY={}; ~KEY removes a setting or a teacher:
  ~teachers.code ~student.lora
All settings are described in docs/pages/configuration.md.
"""


def add_parsers(commands: Any) -> None:
    """Add ``mopd train`` and ``mopd check``."""
    for name, run, summary in (
        ("train", _train, "train a student with its teachers; saves checkpoints and a model"),
        ("check", _check, "validate a run and print the resolved plan, without training"),
    ):
        parser = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=OVERRIDES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("run_file", type=Path, metavar="RUN.YAML", help="settings of the run")
        parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed settings")
        parser.set_defaults(run=run)


def _train(options: argparse.Namespace) -> None:
    from mopd_trainer.api import train

    train(options.run_file, options.overrides)


def _check(options: argparse.Namespace) -> None:
    from mopd_trainer.api import check

    check(options.run_file, options.overrides)
