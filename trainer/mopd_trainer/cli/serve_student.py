"""``mopd serve-student``."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add ``mopd serve-student``."""
    summary = "serve a student to clients of the OpenAI API, to try an agent before a run"
    parser = commands.add_parser("serve-student", help=summary, description=summary)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub name of a model, or RUN.YAML: the student and the sampling of a run",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed settings")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8400, help="0 for a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        help="longest turn of a MODEL (default: %(default)s)",
    )
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> None:
    from mopd_trainer.api import serve_student

    def announce(address: str) -> None:
        sys.stdout.write(f"serving {address} (stop with Ctrl-C)\n")
        sys.stdout.flush()

    model = Path(options.model)
    serve_student(
        model if model.suffix in (".yaml", ".yml") else options.model,
        options.overrides,
        host=options.host,
        port=options.port,
        max_new_tokens=options.max_new_tokens,
        announce=announce,
    )
