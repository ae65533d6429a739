"""``mopd projection``: build or inspect the projection between two vocabularies."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_protocol.errors import ConfigError
from mopd_trainer.cli.align import TOKENIZERS, add_common_options, row_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from mopd_losses.projection.matrix import ProjectionMatrix

Facts = dict[str, Any]


def add_parser(commands: Any) -> None:
    """Add ``mopd projection build`` and ``mopd projection inspect``."""
    summary = "build or inspect the projection matrix between two vocabularies"
    projection = commands.add_parser("projection", help=summary, description=summary)
    actions = projection.add_subparsers(title="actions", required=True, metavar="ACTION")
    raw = argparse.RawDescriptionHelpFormatter
    summary = "save the projection of two tokenizers"
    build = actions.add_parser(
        "build", help=summary, description=summary, epilog=TOKENIZERS, formatter_class=raw
    )
    build.add_argument("student", metavar="STUDENT")
    build.add_argument("teacher", metavar="TEACHER")
    build.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="a .safetensors file, or a folder (default: the current one), in which the file gets "
        "the name that a run with this projection_cache expects",
    )
    build.set_defaults(run=_build)
    summary = "show the coverage of a projection, and its worst rows"
    inspect = actions.add_parser(
        "inspect",
        help=summary,
        description=summary,
        epilog=TOKENIZERS + "FILE shows numbers; FILE STUDENT TEACHER also shows tokens.\n",
        formatter_class=raw,
        usage="mopd projection inspect [options] FILE | STUDENT TEACHER | FILE STUDENT TEACHER",
    )
    inspect.add_argument("sources", nargs="+", metavar="FILE, STUDENT, TEACHER")
    inspect.add_argument(
        "--rows", type=row_count, default=10, help="maximum length of each list (default: 10)"
    )
    inspect.set_defaults(run=_inspect)
    for action in (build, inspect):
        action.add_argument(
            "--weights",
            choices=("first", "decay"),
            default="first",
            help="project a token that the teacher does not have to its first piece, or to its "
            "first pieces with decaying weights (default: first)",
        )
        add_common_options(action, with_json=action is inspect)


def _build(options: argparse.Namespace) -> None:
    from mopd_losses.config import ProjectionSettings
    from mopd_losses.projection.cache import cache_key
    from mopd_trainer.inspection.projection import project, token_facts
    from mopd_trainer.inspection.tokenizers import load_tokenizer
    from mopd_trainer.reporting.console import make_console

    console, settings = make_console(), ProjectionSettings(weights=options.weights)
    student, teacher = (
        load_tokenizer(name, api_key_env=options.api_key_env)
        for name in (options.student, options.teacher)
    )
    matrix = project(student, teacher, settings)
    path = options.output or Path()
    if path.suffix != ".safetensors":
        width = student.logit_width
        key = cache_key(student.table, teacher.table, student_width=width, settings=settings)
        path /= f"projection-{key}.safetensors"
    matrix.save(path)
    tokens = token_facts(matrix, student.table, teacher.table, rows=0)
    _print_numbers(console, matrix, tokens, [student.summary, teacher.summary])
    size = path.stat().st_size
    console.print(f"\nsaved to {path}, {size:,} bytes", soft_wrap=True, markup=False)


def _inspect(options: argparse.Namespace) -> None:
    from mopd_losses.config import ProjectionSettings
    from mopd_losses.projection.matrix import ProjectionMatrix
    from mopd_trainer.inspection.projection import project, projection_facts, token_facts
    from mopd_trainer.inspection.tokenizers import load_tokenizer
    from mopd_trainer.reporting.console import make_console

    sources: list[str] = options.sources
    if len(sources) > 3 or (len(sources) == 2 and sources[0].endswith(".safetensors")):
        raise ConfigError(
            f"{len(sources)} arguments, expected FILE, or STUDENT TEACHER, or FILE STUDENT TEACHER"
        )
    console = make_console()
    matrix = None if len(sources) == 2 else ProjectionMatrix.load(Path(sources[0]))
    names: list[str] = []
    tokens: Facts | None = None
    if len(sources) > 1:
        student, teacher = (
            load_tokenizer(name, api_key_env=options.api_key_env) for name in sources[-2:]
        )
        if matrix is None:
            matrix = project(student, teacher, ProjectionSettings(weights=options.weights))
        matrix.require(student.table.fingerprint, teacher.table.fingerprint)
        tokens = token_facts(matrix, student.table, teacher.table, rows=options.rows)
        names = [student.summary, teacher.summary]
    assert matrix is not None
    if tokens is None:
        fingerprints = (matrix.student_fingerprint, matrix.teacher_fingerprint)
        names = [f"tokenizer {fingerprint[:12]}" for fingerprint in fingerprints]
    if options.json:
        facts = {**projection_facts(matrix), "tokenizers": tokens}
        sys.stdout.write(json.dumps(facts, ensure_ascii=False) + "\n")
        return
    _print_numbers(console, matrix, tokens, names)
    if tokens is not None:
        _print_tokens(console, tokens, options.rows)
    else:
        console.print(
            "\nA file contains only the fingerprints of its tokenizers. FILE STUDENT TEACHER shows "
            "rows, control tokens and roles.",
            style="dim",
        )


def _print_numbers(
    console: "Console", matrix: "ProjectionMatrix", tokens: Facts | None, names: list[str]
) -> None:
    from rich.text import Text

    from mopd_trainer.inspection.projection import projection_facts
    from mopd_trainer.reporting.console import key_value_table

    facts, settings = projection_facts(matrix), matrix.settings
    weights = "all on the first piece"
    if settings.weights == "decay":
        weights = f"on the first {settings.max_length} pieces, each {settings.decay:g} of the last"
    unsupported = f"{facts['unsupported']:,} not reachable"
    most = f"id {facts['most_fed_id']}"
    if tokens is not None:
        unsupported += f", {tokens['unsupported_text']:,} of them text"
        most = f"{tokens['most_fed']} ({most})"
    rows: list[tuple[str, str]] = [
        ("student", names[0]),
        ("teacher", names[1]),
        ("", ""),
        ("weights", weights),
        ("student ids", _share(facts["projected"], facts["student_ids"], "projected")),
    ]
    if tokens is not None:
        same = _share(tokens["same_bytes"], tokens["text_ids"], "text ids to the same bytes")
        rows.append(("", same))
    rows += [
        ("", _share(facts["one_hot"], facts["projected"], "projected to one teacher id")),
        ("", f"{facts['unprojected']:,} without a target (part of the loss tail)"),
        ("teacher ids", _share(facts["reached"], facts["teacher_ids"], "reached")),
        ("", unsupported),
        ("", f"{facts['fed_by_several']:,} reached from several student ids"),
    ]
    if facts["most_fed_by"] > 1:
        rows.append(("", f"at most {facts['most_fed_by']:,} student ids, for {most}"))
    console.print(key_value_table([(key, Text(value)) for key, value in rows]))


def _print_tokens(console: "Console", tokens: Facts, rows: int) -> None:
    from rich.text import Text

    roles = [
        (role["role"], role["student"] or "–", role["teacher"] or "–", role["target"] or "–")
        for role in tokens["roles"]
    ]
    projected = f"{tokens['controls_projected']:,} of {tokens['controls']:,} projected"
    roles.append(("all controls", projected, "", ""))
    console.print("", _table(("role", "student", "teacher", "student's target"), roles))
    for title, key in (
        ("student tokens without a target", "unprojected"),
        ("teacher control tokens without a source", "unsupported_controls"),
    ):
        if tokens[key]:
            more = " …" if len(tokens[key]) == rows else ""
            console.print(
                "", Text(title, style="bold"), Text("  ".join(tokens[key]) + more), sep="\n"
            )
    if tokens["worst"]:
        worst = [
            (
                str(row["student_id"]),
                row["bytes"],
                "  ".join(n if w == 1 else f"{n} {w:.4f}" for _, n, w in row["targets"]),
                f"{row['first_share']:.0%} of bytes",
            )
            for row in tokens["worst"]
        ]
        title = Text("worst rows: the first piece covers the fewest bytes", style="bold")
        console.print("", title, sep="\n")
        console.print(_table(("student id", "bytes", "targets", "first piece"), worst))


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold", max_width=34)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _share(part: int, total: int, what: str) -> str:
    return f"{part:,} of {total:,} {what} ({part / total:.2%})" if total else f"0 {what}"
