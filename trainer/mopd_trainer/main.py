"""``mopd``: the student's side. Nothing heavy is imported before a command is known."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mopd_protocol.errors import ConfigError, MopdError

EXAMPLES = """\
examples:
  mopd check run.yaml                      who, which hashes, which loss, how much; trains nothing
  mopd train run.yaml                      train, checkpoint, and write a Hugging Face folder
  mopd train run.yaml max_steps=10 teachers.math.top_k=32
  mopd train run.yaml resume_from_checkpoint=true
  mopd demo                                the whole path on tiny models, on a CPU, in minutes
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command. A refusal is one sentence on stderr and exit code 2."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        options.run(options)
    except MopdError as error:
        _fail(str(error), 2)
    except BaseExceptionGroup as group:
        refusals, bugs = group.split(MopdError)
        if refusals is None or bugs is not None:
            raise
        _fail(str(_first(refusals)), 2)
    except KeyboardInterrupt:
        _fail("interrupted; the last checkpoint is whole", 130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mopd",
        description="Multi-teacher on-policy distillation: the student's side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--verbose", action="store_true", help="log every request and decision")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, run, summary in (
        ("train", _train, "distil a student from its teachers"),
        ("check", _check, "resolve a run, meet its teachers and print the plan; train nothing"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("run_file", type=Path, metavar="RUN.YAML", help="the run's settings")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="KEY=VALUE",
            help="settings that replace those of the file, with dots for nesting",
        )
        command.set_defaults(run=run)
    demo = commands.add_parser(
        "demo",
        help="two teachers, two services, one student, on this machine",
        description="Trains two tiny teachers with different tokenizers (once), serves each over "
        "HTTP, and distils a student with a third tokenizer from both.",
    )
    demo.add_argument(
        "--output-dir", type=Path, default=Path("runs/demo"), help="default: runs/demo"
    )
    demo.add_argument("--seed", type=int, default=0, help="default: 0")
    demo.add_argument(
        "--steps", type=int, default=None, help="distillation steps; fewer to look around"
    )
    demo.set_defaults(run=_demo)
    return parser


def _train(options: argparse.Namespace) -> None:
    config = _load(options)
    console = _console()
    from mopd_trainer.loop import train

    folder = asyncio.run(train(config, console))
    console.print(f"the student is in {folder}")


def _check(options: argparse.Namespace) -> None:
    config = _load(options)
    console = _console()
    from mopd_trainer.check import check

    asyncio.run(check(config, console))
    console.print("all of this fits together; mopd train will run it")


def _demo(options: argparse.Namespace) -> None:
    console = _console()
    from mopd_trainer.demo.run import run_demo

    run_demo(options.output_dir, seed=options.seed, steps=options.steps, console=console)


def _load(options: argparse.Namespace):
    _need_trainer()
    from mopd_trainer.run_file import load_run

    return load_run(options.run_file, options.overrides)


def _console():
    _need_trainer()
    # Tokenizers warn about threads after a fork; nothing here forks after using them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return Console()


def _need_trainer() -> None:
    from importlib.util import find_spec

    missing = [
        name for name in ("omegaconf", "rich", "torch", "transformers") if not find_spec(name)
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed; training needs the trainer extra: "
            "pip install 'mopd[trainer]'"
        )


def _first(group: BaseExceptionGroup[MopdError]) -> MopdError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _fail(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"mopd: {sentence}\n")
    sys.exit(code)
