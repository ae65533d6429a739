"""``mopd score``: score a data set once, check the stored scores, export them."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_protocol.errors import ConfigError

if TYPE_CHECKING:
    from mopd_trainer.dataset_scoring.scoring import Progress
    from mopd_trainer.dataset_scoring.settings import ScoringJob

EXAMPLES = """\
DATA is what mopd train reads: JSONL, JSON or parquet, or a dataset with data.split=train. The
completions are its reference answers; data.answer_key=KEY names another field.

  mopd score data.jsonl --teacher http://localhost:8101 --output scores
  mopd score data.jsonl data.answer_key=solution --teacher http://localhost:8101 --output scores
  mopd score data.jsonl --teacher math=http://a:8101 --teacher code=http://b:8101 --output scores

Stop it at any time; the same command continues. Equal completions of a prompt are scored once.
Train from the scores, with any loss and any student, without a teacher:

  data: {prompts: data.jsonl, source: answers}
  teachers: {math: {scores: scores, top_k: 64}}

Compare a sample with the running teacher, or write the rows of another trainer:

  mopd score data.jsonl --teacher http://localhost:8101 --output scores --check 100
  mopd score data.jsonl --output scores --export axolotl --student Qwen/Qwen3-4B

KEY=VALUE settings follow DATA: data.* and teachers.NAME.* of docs/pages/configuration.md.
"""


def add_parser(commands: Any) -> None:
    """Add ``mopd score``."""
    parser = commands.add_parser(
        "score",
        help="score a data set once with its teachers, to train on the scores later",
        description="Score the reference answers of a data set with one or several teachers, and "
        "store the scores: in the teachers' tokens, for any loss and any student.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="data with reference answers")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, see below")
    parser.add_argument(
        "--teacher",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a teacher service; repeat it with names for several teachers, between which the data "
        "chooses, and with one name for replicas",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder of the scores"
    )
    parser.add_argument(
        "--top-k", type=int, default=64, metavar="K", help="ids for each token (default: 64)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="softmax temperature (default: 1)"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the teachers' API key"
    )
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="requests at once (default: 8)"
    )
    parser.add_argument(
        "--student",
        metavar="MODEL",
        help="folder or hub name of a student: send the texts of its tokens, and score the "
        "lookaheads of prefix_kl for it; with --export, the student that will be trained",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check",
        type=int,
        metavar="N",
        help="compare N random stored scores with the teachers; exit status 1 if they differ",
    )
    action.add_argument(
        "--export",
        choices=("axolotl", "trl"),
        help="write the scores for a student of the teacher's vocabulary, as DIR/FORMAT.jsonl",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.concurrency < 1:
        raise ConfigError(
            f"concurrency: found {options.concurrency}, expected 1 or more", key="concurrency"
        )
    if options.check is not None and options.check < 1:
        raise ConfigError(f"check: found {options.check}, expected 1 or more", key="check")
    from mopd_trainer.api import require_trainer_extra

    require_trainer_extra()
    try:
        if options.export:
            _export(options)
        elif options.check is not None:
            _check(options)
        else:
            _score(options)
    except KeyboardInterrupt:
        sys.stderr.write("mopd: interrupted. Run the same command again to continue.\n")
        sys.exit(130)


def _job(options: argparse.Namespace) -> "ScoringJob":
    from mopd_trainer.dataset_scoring.settings import ScoringJob

    if not options.teacher:
        raise ConfigError(
            "teacher: missing. Add --teacher URL of a running service.", key="teacher"
        )
    return ScoringJob.of(
        options.data,
        options.output,
        options.teacher,
        options.overrides,
        student=options.student,
        top_k=options.top_k,
        temperature=options.temperature,
        api_key_env=options.api_key_env,
        max_concurrency=options.concurrency,
    )


def _score(options: argparse.Namespace) -> None:
    import asyncio

    from mopd_trainer.dataset_scoring.requests import count_rows
    from mopd_trainer.dataset_scoring.scoring import open_scorer
    from mopd_trainer.reporting.console import make_console
    from mopd_trainer.reporting.row_progress import RowProgress
    from mopd_trainer.run_folder.lock import run_lock

    job, console = _job(options), make_console()
    with console.status("reading the data"):
        total = count_rows(job)

    async def score() -> "Progress":
        async with open_scorer(job, concurrency=options.concurrency) as scorer:
            with RowProgress(console, total=total) as shown:
                return await scorer.run(lambda done: shown.update(done.rows))

    with run_lock(job.output):
        done = asyncio.run(score())
    too_long = f", {done.too_long:,} too long for the teacher" if done.too_long else ""
    console.print(
        f"{total:,} rows: {done.scored:,} sequences scored ({done.tokens:,} tokens), "
        f"{done.repeated:,} rows with a score from before{too_long}\nscores in {job.output}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _check(options: argparse.Namespace) -> None:
    import asyncio

    from mopd_trainer.dataset_scoring.comparison import compare

    compared = asyncio.run(compare(_job(options), sample=options.check))
    sys.stdout.write("".join(f"{line}\n" for line in compared.lines()))
    if compared.differences:
        sys.exit(1)


def _export(options: argparse.Namespace) -> None:
    from mopd_trainer.dataset_scoring.export import export

    path, rows = export(
        options.data, options.output, options.export, options.student, options.overrides
    )
    sys.stdout.write(f"{rows:,} rows in {path}\n")
