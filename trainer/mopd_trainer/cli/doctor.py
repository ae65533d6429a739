"""``mopd doctor``."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add ``mopd doctor``."""
    summary = "check a run in a minute: teachers, templates, losses, gradients, learnability"
    doctor = commands.add_parser("doctor", help=summary, description=summary)
    doctor.add_argument("run_file", type=Path, metavar="RUN.YAML", help="settings of the run")
    doctor.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed settings")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON lines")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> None:
    from mopd_trainer.api import doctor

    def show(finding: Any) -> None:
        text = json.dumps(asdict(finding)) if options.json else finding.line()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    findings = doctor(options.run_file, options.overrides, show=show)
    if any(finding.status == "failed" for finding in findings):
        sys.exit(1)
