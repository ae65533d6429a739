"""``mopd align``: show the tokens of two tokenizers side by side."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd_protocol.errors import ConfigError, DataError
from mopd_trainer.cli.page import add_address, serve_page

if TYPE_CHECKING:
    from rich.table import Table

    from mopd_losses.alignment.chunks import Chunk
    from mopd_trainer.inspection.alignment import TextAlignment

TOKENIZERS = """\
STUDENT and TEACHER are each a model folder, a Hugging Face hub name, the path of a
tokenizer.json, or the URL of a running teacher (http://host:8101).
"""
#: Maximum number of one-to-one spans in a line.
_SPANS_PER_LINE = 12


def add_parser(commands: Any) -> None:
    """Add ``mopd align``."""
    summary = "show how two or more tokenizers split a text, side by side"
    parser = commands.add_parser(
        "align",
        help=summary,
        description=summary,
        epilog=TOKENIZERS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("student", metavar="STUDENT")
    parser.add_argument("teachers", metavar="TEACHER", nargs="+")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", help="the text")
    source.add_argument("--file", help="a UTF-8 file, or - for standard input")
    page = parser.add_mutually_exclusive_group()
    page.add_argument(
        "--serve", action="store_true", help="serve the explorer, a page for any text"
    )
    page.add_argument(
        "--output", type=Path, metavar="FILE", help="write the explorer's page of this text"
    )
    add_address(parser)
    parser.add_argument(
        "--rows", type=row_count, default=100, help="maximum lines; 0 for all (default: 100)"
    )
    add_common_options(parser)
    parser.set_defaults(run=_run)


def add_common_options(parser: argparse.ArgumentParser, *, with_json: bool = True) -> None:
    """Add ``--json`` and ``--api-key-env``."""
    if with_json:
        parser.add_argument("--json", action="store_true", help="print all facts as JSON")
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with a teacher's API key"
    )


def row_count(text: str) -> int:
    """Parse a number of lines."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid number of lines (found {text!r}, expected 0+)")
    return int(text)


def read_text(file: str) -> str:
    """Read a UTF-8 file, or standard input for ``-``, without changing line ends.

    Raises:
        ConfigError: if the file cannot be read.
        DataError: if the content is not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: reading failed: {error.strerror}", key=file) from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: not UTF-8 ({error.reason} at byte {error.start})", key=file
        ) from error


def _run(options: argparse.Namespace) -> None:
    text: str | None = options.text
    if options.file is not None:
        text = read_text(options.file)
    if options.serve or options.output is not None:
        _explore(options, text)
        return
    if text is None or len(options.teachers) > 1:
        raise ConfigError(
            "align: a table needs one TEACHER and --text or --file. Add --serve or --output for "
            "a page with a sample text and several teachers.",
            key="text" if text is None else "teachers",
        )
    from mopd_trainer.inspection.alignment import align
    from mopd_trainer.reporting.console import make_console

    console = make_console()
    result = align(options.student, options.teachers[0], text, api_key_env=options.api_key_env)
    if options.json:
        sys.stdout.write(json.dumps(result.facts(), ensure_ascii=False) + "\n")
        return
    console.print(_side_by_side(result, options.rows))
    console.print(_summary(result))


def _explore(options: argparse.Namespace, text: str | None) -> None:
    from mopd_trainer.inspection.explorer import Explorer
    from mopd_trainer.inspection.tokenizers import load_tokenizer
    from mopd_trainer.pages.alignment_page import SAMPLE, alignment_server, write_alignment
    from mopd_trainer.reporting.console import make_console

    make_console()
    names = [options.student, *options.teachers]
    explorer = Explorer([load_tokenizer(name, api_key_env=options.api_key_env) for name in names])
    text = SAMPLE if text is None else text
    if options.output is not None:
        sys.stdout.write(f"{write_alignment(explorer, text, options.output)}\n")
        return
    server = alignment_server(explorer, text, host=options.host, port=options.port)
    serve_page(server, is_opened=options.open)


def _side_by_side(result: "TextAlignment", rows: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    table.add_column("byte", justify="right", style="dim", no_wrap=True)
    table.add_column("student", ratio=1, overflow="fold")
    table.add_column("teacher", ratio=1, overflow="fold")
    table.add_column("tokens", no_wrap=True)
    sequence = result.sequences[0]
    starts = [*sequence.byte_starts.tolist(), len(sequence.text)]
    lines = [*_lines(result.chunks)]
    for line in lines[: rows or None]:
        first, last = line[0], line[-1]
        student = (first.student[0], last.student[1])
        teacher = (first.teacher[0], last.teacher[1])
        style, label = "yellow", f"{student[1] - student[0]}-{teacher[1] - teacher[0]}"
        if first.one_to_one:
            style, label = "green", "1-1" if len(line) == 1 else f"1-1 × {len(line)}"
        elif not first.in_span:
            style, label = "red", "unaligned"
        cells = (
            Text(" ").join(
                Text(piece, style=f"{style} dim" if index % 2 else style)
                for index, piece in enumerate(result.pieces(side, tokens))
            )
            for side, tokens in enumerate((student, teacher))
        )
        table.add_row(str(starts[student[0]]), *cells, Text(label, style=style))
    if rows and len(lines) > rows:
        table.add_row("", Text(f"… {len(lines) - rows:,} more lines; --rows 0 shows all"), "", "")
    return table


def _lines(chunks: "Sequence[Chunk]") -> "Iterator[list[Chunk]]":
    """Group consecutive one-to-one spans."""
    line: list[Chunk] = []
    for chunk in chunks:
        joins = chunk.one_to_one and line and line[-1].one_to_one and len(line) < _SPANS_PER_LINE
        if line and not joins:
            yield line
            line = []
        line.append(chunk)
    if line:
        yield line


def _summary(result: "TextAlignment") -> "Table":
    from rich.text import Text

    from mopd_trainer.reporting.console import key_value_table

    facts = result.facts()
    rows: list[tuple[str, str | Text]] = [("", "")]
    for role, tokenizer, sequence in zip(
        ("student", "teacher"), result.tokenizers, result.sequences, strict=True
    ):
        per_token = len(sequence.text) / len(sequence) if len(sequence) else 0.0
        rows.append(
            (role, f"{tokenizer.name}: {len(sequence):,} tokens, {per_token:.2f} bytes each")
        )
    complete = facts["aligned_bytes"] == facts["bytes"]
    aligned = (
        f"{facts['aligned_bytes']:,} of {facts['bytes']:,} bytes ({facts['aligned_share']:.2%})"
    )
    rows.append(("aligned", Text(aligned, style="green" if complete else "red")))
    rows.append(("spans", f"{facts['spans']:,}, {facts['one_to_one_share']:.2%} one-to-one"))
    if not facts["same_text"]:
        reason = "texts differ: one tokenizer normalizes, or cannot represent this text"
        rows.append(("texts", Text(reason, "red")))
    return key_value_table(rows)
