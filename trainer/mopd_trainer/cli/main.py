"""``mopd``: parse the command line and report errors. Nothing heavy is imported for ``--help``."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from mopd_protocol.errors import MopdError, message_of
from mopd_trainer.cli import align, doctor, projection, results, run, score, serve_student
from mopd_trainer.interruption import Interrupted

EXAMPLES = """\
examples:
  mopd demo                                  the complete path on tiny models, on a CPU, in minutes
  mopd check run.yaml                        validate a run and print the resolved plan
  mopd doctor run.yaml                       a minute of checks before a long run
  mopd train run.yaml                        train, save checkpoints and a Hugging Face folder
  mopd train run.yaml max_steps=10 teachers.math.top_k=32
  mopd train run.yaml resume_from_checkpoint=true
  torchrun --nproc-per-node 2 -m mopd train run.yaml student.sharding=fsdp
  mopd score data.jsonl --teacher http://localhost:8101 --output scores
  mopd serve-student run.yaml                try an agent against the student of a run
  mopd evaluate runs/two-families/final run.yaml
  mopd watch runs/two-families               live curves and completions in a browser
  mopd report runs/two-families runs/other   the same page as a file; two runs side by side
  mopd merge runs/lora merged                merge LoRA adapters into a model folder
  mopd align STUDENT http://localhost:8101 --text "1 + 2 = 3"
  mopd align STUDENT TEACHER OTHER --serve   alignment explorer in a browser
  mopd projection inspect STUDENT TEACHER    how two vocabularies overlap

Teachers are served by mopd-teacher (see mopd-teacher --help).
"""

#: ``add_parser`` of argparse.
AddCommand = Callable[..., argparse.ArgumentParser]


def main(
    arguments: Sequence[str] | None = None,
    *,
    extend: Callable[[AddCommand], None] | None = None,
) -> None:
    """Run a command. An invalid input prints one sentence on stderr and exits with code 2.

    Args:
        extend: adds more commands, each with a default ``run`` that takes the parsed options.
    """
    options = _parser(extend).parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        options.run(options)
    except (MopdError, BaseExceptionGroup) as error:
        message = message_of(error)
        if message is None:
            raise
        _exit(message, 2)
    except Interrupted as interrupted:
        _exit(str(interrupted), interrupted.exit_code)
    except KeyboardInterrupt:
        _exit("interrupted. Resume with resume_from_checkpoint=true.", 130)


def _parser(extend: Callable[[AddCommand], None] | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mopd",
        description="On-policy distillation from several teachers with any tokenizer, served over "
        "HTTP.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mopd {_version()}")
    parser.add_argument("--verbose", action="store_true", help="log at level DEBUG")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_parsers(commands)
    doctor.add_parser(commands)
    score.add_parser(commands)
    serve_student.add_parser(commands)
    results.add_parsers(commands)
    if extend is not None:
        extend(commands.add_parser)
    align.add_parser(commands)
    projection.add_parser(commands)
    return parser


def _version() -> str:
    try:
        return version("mopd")
    except PackageNotFoundError:  # a source tree on the path
        return "(not installed)"


def _exit(message: str, code: int) -> NoReturn:
    try:
        sys.stderr.write(f"mopd: {message}\n")
        sys.stderr.flush()
    except OSError:  # the terminal is closed
        from mopd_trainer.reporting.console import silence

        silence(sys.stderr)
    sys.exit(code)
