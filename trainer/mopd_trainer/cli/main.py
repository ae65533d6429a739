"""``mopd``: the student's side. Nothing heavy is imported before a command is known."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mopd_protocol.errors import ConfigError, MopdError
from mopd_trainer.interruption import Interrupted

EXAMPLES = """\
examples:
  mopd check run.yaml                      who, which hashes, which loss, how much; trains nothing
  mopd train run.yaml                      train, checkpoint, and write a Hugging Face folder
  mopd train run.yaml max_steps=10 teachers.math.top_k=32
  mopd train run.yaml resume_from_checkpoint=true
  mopd report runs/two-families            its curves, timings and completions as one page
  mopd merge runs/lora merged              a LoRA student as an ordinary model folder
  mopd demo                                the whole path on tiny models, on a CPU, in minutes
  mopd align STUDENT http://localhost:8101 --text "1 + 2 = 3"     who cuts a text where
  mopd projection inspect STUDENT TEACHER  how much of two vocabularies meets, and what does not
"""


#: ``add_parser`` of argparse: a command's name and description become its parser.
AddCommand = Callable[..., argparse.ArgumentParser]


def main(
    arguments: Sequence[str] | None = None,
    *,
    extend: Callable[[AddCommand], None] | None = None,
) -> None:
    """Run a command. An invalid input is one sentence on stderr and exit code 2.

    Args:
        extend: adds further commands, each with a ``run`` default that takes the parsed options.
    """
    options = _parser(extend).parse_args(arguments)
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
    except Interrupted as interrupted:
        _fail(str(interrupted), interrupted.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; checkpoints are whole, go on with resume_from_checkpoint=true", 130)


def _parser(
    extend: Callable[[AddCommand], None] | None = None,
) -> argparse.ArgumentParser:
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
    summary = "curves, timings and completions of a run, also of one under way, as one page"
    report = commands.add_parser("report", help=summary, description=summary)
    report.add_argument("run_folder", type=Path, metavar="RUN", help="a run's output_dir")
    report.set_defaults(run=_report)
    summary = "write the student of a LoRA run as an ordinary model folder"
    merge = commands.add_parser("merge", help=summary, description=summary)
    merge.add_argument(
        "run_folder", type=Path, metavar="RUN", help="a run's output_dir, or one of its checkpoints"
    )
    merge.add_argument("output", type=Path, metavar="OUT", help="the folder to write")
    merge.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights that are written (default: float32)",
    )
    merge.set_defaults(run=_merge)
    if extend is not None:
        extend(commands.add_parser)
    summary = "build the matrix between two vocabularies, or look into one"
    _add_projection(commands.add_parser("projection", help=summary, description=summary))
    summary = "show where two tokenizers cut a text, side by side"
    _add_align(
        commands.add_parser(
            "align",
            help=summary,
            description=summary,
            epilog=TOKENIZERS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    return parser


TOKENIZERS = """\
STUDENT and TEACHER are each a model folder, a hub id, the path of a tokenizer.json,
or the URL of a running teacher (http://host:8101), which is asked for its tokenizer.
"""


def _add_projection(projection: argparse.ArgumentParser) -> None:
    actions = projection.add_subparsers(title="actions", required=True, metavar="ACTION")
    build = actions.add_parser(
        "build",
        help="write the projection of two tokenizers to a file",
        description="Writes the projection of two tokenizers to a file.",
        epilog=TOKENIZERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("student", metavar="STUDENT")
    build.add_argument("teacher", metavar="TEACHER")
    build.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="a .safetensors file, or a folder (default: here), where it gets the name that a "
        "run with this projection_cache looks for",
    )
    build.set_defaults(run=_projection_build)
    inspect = actions.add_parser(
        "inspect",
        help="show what a projection covers, and its worst rows",
        description="Shows what a projection covers, and its worst rows.",
        epilog=TOKENIZERS + "A FILE alone gives numbers; with both tokenizers after it, bytes.\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mopd projection inspect [options] FILE | STUDENT TEACHER | FILE STUDENT TEACHER",
    )
    inspect.add_argument("sources", nargs="+", metavar="FILE, STUDENT, TEACHER")
    inspect.add_argument("--rows", type=_count, default=10, help="of each list (default: 10)")
    inspect.add_argument("--json", action="store_true", help="everything, for programs")
    inspect.set_defaults(run=_projection_inspect)
    for action in (build, inspect):
        action.add_argument(
            "--weights",
            choices=("first", "decay"),
            default="first",
            help="a token that the teacher does not have goes to its first piece, or to its "
            "first pieces with decaying weights (default: first)",
        )
        _add_api_key(action)


def _add_align(align: argparse.ArgumentParser) -> None:
    align.add_argument("student", metavar="STUDENT")
    align.add_argument("teacher", metavar="TEACHER")
    given = align.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", help="the text itself")
    given.add_argument("--file", help="a UTF-8 file, or - for standard input")
    align.add_argument(
        "--rows", type=_count, default=100, help="lines at most; 0 for all (default: 100)"
    )
    align.add_argument("--json", action="store_true", help="everything, for programs")
    _add_api_key(align)
    align.set_defaults(run=_align)


def _add_api_key(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with a teacher's API key"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines; expected 0 or more")
    return int(text)


def _train(options: argparse.Namespace) -> None:
    config, prompts = _load(options)
    console = make_console()
    if config.resources is not None:
        _need_ray()
        from mopd_trainer.launch.cluster import train_on_ray

        _tell_folder(console, train_on_ray(config))
        return
    from mopd_trainer.distributed.process_group import init_distributed
    from mopd_trainer.launch.follower import follow
    from mopd_trainer.loop import train

    with init_distributed(config.student.device) as ranks:
        if ranks.rank > 0:
            follow(config.student, ranks)
            return
        folder = asyncio.run(train(config, console, prompts=prompts, ranks=ranks))
    _tell_folder(console, folder)


def _tell_folder(console: Any, folder: Path) -> None:
    console.print(f"the student is in {folder}", markup=False, soft_wrap=True)


def _check(options: argparse.Namespace) -> None:
    config, prompts = _load(options)
    console = make_console()
    from mopd_trainer.cli.check import check

    asyncio.run(check(config, console, prompts=prompts))
    console.print("all of this fits together; mopd train will run it")


def _report(options: argparse.Namespace) -> None:
    console = make_console()
    from mopd_trainer.reporting.report import write_report

    console.print(str(write_report(options.run_folder)), markup=False, soft_wrap=True)


def _merge(options: argparse.Namespace) -> None:
    console = make_console()
    from mopd_trainer.cli.merge import merge

    _tell_folder(console, merge(options.run_folder, options.output, dtype=options.dtype))


def _projection_build(options: argparse.Namespace) -> None:
    console = make_console()
    from mopd_losses.config import ProjectionSettings
    from mopd_trainer.cli.projection import build

    build(
        options.student,
        options.teacher,
        settings=ProjectionSettings(weights=options.weights),
        output=options.output,
        api_key_env=options.api_key_env,
        console=console,
    )


def _projection_inspect(options: argparse.Namespace) -> None:
    console = make_console()
    from mopd_losses.config import ProjectionSettings
    from mopd_trainer.cli.projection import inspect

    inspect(
        options.sources,
        settings=ProjectionSettings(weights=options.weights),
        rows=options.rows,
        as_json=options.json,
        api_key_env=options.api_key_env,
        console=console,
    )


def _align(options: argparse.Namespace) -> None:
    console = make_console()
    from mopd_trainer.cli.align import align, text_of

    align(
        options.student,
        options.teacher,
        text=text_of(options.file) if options.text is None else options.text,
        rows=options.rows,
        as_json=options.json,
        api_key_env=options.api_key_env,
        console=console,
    )


def _load(options: argparse.Namespace):
    """The run's settings and prompts: what is wrong with them is told before torch is loaded."""
    _need_trainer()
    from mopd_trainer.config.loading import load_run
    from mopd_trainer.data.prompts import read_prompts

    config = load_run(options.run_file, options.overrides)
    return config, read_prompts(config.data, config.scoring_teachers)


def make_console():
    _need_trainer()
    # Tokenizers warn about threads after a fork; nothing here forks after using them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers.utils import logging as transformers_logging

    from mopd_trainer.cli.console import ResilientConsole

    transformers_logging.disable_progress_bar()
    return ResilientConsole()


def _need_trainer() -> None:
    from importlib.util import find_spec

    missing = [
        name
        for name in ("jaxtyping", "omegaconf", "rich", "torch", "transformers")
        if not find_spec(name)
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed; training needs the trainer extra: "
            "pip install 'mopd[trainer]'"
        )


def _need_ray() -> None:
    from importlib.util import find_spec

    if not find_spec("ray"):
        raise ConfigError(
            "the run has resources, so it needs Ray, which is not installed: pip install "
            "'mopd[ray]'; or remove the section"
        )


def _first(group: BaseExceptionGroup[MopdError]) -> MopdError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _fail(sentence: str, code: int) -> NoReturn:
    try:
        sys.stderr.write(f"mopd: {sentence}\n")
        sys.stderr.flush()
    except OSError:  # the terminal is gone, which changes nothing of why this ends
        from mopd_trainer.cli.console import silence

        silence(sys.stderr)
    sys.exit(code)
