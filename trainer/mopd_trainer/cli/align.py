"""``mopd align``: how two tokenizers cut one text, side by side."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mopd_losses.alignment.byte_alignment import Alignment
from mopd_losses.alignment.byte_alignment import align as aligned
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_trainer.cli.readable_bytes import readable
from mopd_trainer.cli.tokenizer_argument import NamedTokenizer, read_tokenizer

#: One-to-one spans that share a line, at most.
_SPANS_A_LINE = 12


@dataclass(frozen=True)
class _Stretch:
    """Tokens ``[start, end)`` of both sides: a span, or what lies between two of them."""

    student: tuple[int, int]
    teacher: tuple[int, int]
    in_span: bool

    @property
    def one_to_one(self) -> bool:
        sizes = (self.student[1] - self.student[0], self.teacher[1] - self.teacher[0])
        return self.in_span and sizes == (1, 1)


def align(
    student_name: str,
    teacher_name: str,
    *,
    text: str,
    rows: int,
    as_json: bool,
    api_key_env: str | None,
    console: Console,
) -> None:
    """Prints the spans of a text as both tokenize it in the middle of a completion.

    Args:
        rows: lines to print at most; 0 for all.

    Raises:
        MopdError: when a tokenizer cannot be read, or the text is none.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):  # of a shell's other bytes
        raise DataError("--text is not UTF-8; give it as a file in UTF-8 (--file)")
    student = read_tokenizer(student_name, api_key_env=api_key_env)
    teacher = read_tokenizer(teacher_name, api_key_env=api_key_env)
    left, right = (side.table.sequence(side.encoder.encode(text)) for side in (student, teacher))
    alignment = aligned(left, right)
    stretches = list(_stretches(alignment, left, right))
    if as_json:
        plain = _plain(alignment, stretches, (student, left), (teacher, right))
        sys.stdout.write(json.dumps(plain, ensure_ascii=False) + "\n")
        return
    console.print(_side_by_side(stretches, left, right, rows))
    console.print(_summary(alignment, (student, left), (teacher, right)))


def text_of(file: str) -> str:
    """The text of a UTF-8 file, or of standard input for ``-``; line ends stay as they are.

    Raises:
        ConfigError: when there is no such file.
        DataError: when it is not UTF-8.
    """
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from error


def _stretches(
    alignment: Alignment, left: TokenSequence, right: TokenSequence
) -> Iterator[_Stretch]:
    """Every token of both sides once, in order."""
    student_done = teacher_done = 0
    columns = (
        alignment.student_starts,
        alignment.student_ends,
        alignment.teacher_starts,
        alignment.teacher_ends,
    )
    for s, s_end, t, t_end in zip(*(column.tolist() for column in columns), strict=True):
        if s > student_done or t > teacher_done:
            yield _Stretch((student_done, s), (teacher_done, t), in_span=False)
        yield _Stretch((s, s_end), (t, t_end), in_span=True)
        student_done, teacher_done = s_end, t_end
    if student_done < len(left) or teacher_done < len(right):
        yield _Stretch((student_done, len(left)), (teacher_done, len(right)), in_span=False)


def _side_by_side(
    stretches: Sequence[_Stretch], left: TokenSequence, right: TokenSequence, rows: int
) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    table.add_column("byte", justify="right", style="dim", no_wrap=True)
    table.add_column("student", ratio=1, overflow="fold")
    table.add_column("teacher", ratio=1, overflow="fold")
    table.add_column("tokens", no_wrap=True)
    lines = list(_lines(stretches))
    for line in lines[: rows or None]:
        first, last = line[0], line[-1]
        student = (first.student[0], last.student[1])
        teacher = (first.teacher[0], last.teacher[1])
        sizes = f"{student[1] - student[0]}-{teacher[1] - teacher[0]}"
        style = "yellow" if first.in_span else "red"
        if first.one_to_one:
            style, sizes = "green", "1-1" if len(line) == 1 else f"1-1 × {len(line)}"
        table.add_row(
            str(_start(left, student[0])),
            _pieces(left, student, style),
            _pieces(right, teacher, style),
            Text(sizes if first.in_span else "apart", style=style),
        )
    if rows and len(lines) > rows:
        table.add_row("", Text(f"… {len(lines) - rows:,} more lines; --rows 0 shows all"), "", "")
    return table


def _lines(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """One-to-one spans that follow each other share a line."""
    line: list[_Stretch] = []
    for stretch in stretches:
        joins = stretch.one_to_one and line and line[-1].one_to_one and len(line) < _SPANS_A_LINE
        if not joins and line:
            yield line
            line = []
        line.append(stretch)
    if line:
        yield line


def _pieces(sequence: TokenSequence, tokens: tuple[int, int], style: str) -> Text:
    """Tokens apart by a space; a space of the text is written as ``␣``."""
    shown = Text()
    for number, position in enumerate(range(*tokens)):
        if number:
            shown.append(" ")
        shown.append(_shown(sequence, position), style=style if number % 2 == 0 else f"{style} dim")
    return shown


def _shown(sequence: TokenSequence, position: int) -> str:
    if position in sequence.marks:
        return f"<{sequence.marks[position]}>"
    return readable(sequence.text[_start(sequence, position) : int(sequence.byte_ends[position])])


def _start(sequence: TokenSequence, position: int) -> int:
    return int(sequence.byte_ends[position - 1]) if position else 0


def _summary(
    alignment: Alignment,
    student: tuple[NamedTokenizer, TokenSequence],
    teacher: tuple[NamedTokenizer, TokenSequence],
) -> Table:
    left = student[1]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("", "")
    for role, (side, sequence) in (("student", student), ("teacher", teacher)):
        per_token = len(sequence.text) / len(sequence) if len(sequence) else 0.0
        table.add_row(
            role, Text(f"{side.name}: {len(sequence):,} tokens, {per_token:.2f} bytes each")
        )
    covered = alignment.aligned_bytes(left)
    share = _share(covered, len(left.text))
    complete = covered == len(left.text)
    table.add_row(
        "aligned",
        Text(
            f"{covered:,} of {len(left.text):,} bytes ({share:.2%})",
            style="green" if complete else "red",
        ),
    )
    exact = int(alignment.one_to_one.sum())
    table.add_row("spans", f"{len(alignment):,}, {_share(exact, len(alignment)):.2%} one-to-one")
    if left.text != teacher[1].text:
        table.add_row(
            "texts", Text("differ: one tokenizer normalizes, or has no way to write this", "red")
        )
    return table


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _plain(
    alignment: Alignment,
    stretches: Sequence[_Stretch],
    student: tuple[NamedTokenizer, TokenSequence],
    teacher: tuple[NamedTokenizer, TokenSequence],
) -> dict[str, object]:
    left, right = student[1], teacher[1]
    covered = alignment.aligned_bytes(left)
    exact = int(alignment.one_to_one.sum())
    return {
        "student": _side(*student),
        "teacher": _side(*teacher),
        "bytes": len(left.text),
        "aligned_bytes": covered,
        "aligned_share": _share(covered, len(left.text)),
        "spans": len(alignment),
        "one_to_one_spans": exact,
        "one_to_one_share": _share(exact, len(alignment)),
        "same_text": left.text == right.text,
        "stretches": [
            {
                "in_span": stretch.in_span,
                "student_tokens": stretch.student,
                "teacher_tokens": stretch.teacher,
                "student_pieces": [_shown(left, n) for n in range(*stretch.student)],
                "teacher_pieces": [_shown(right, n) for n in range(*stretch.teacher)],
            }
            for stretch in stretches
        ],
    }


def _side(side: NamedTokenizer, sequence: TokenSequence) -> dict[str, object]:
    return {
        "name": side.name,
        "fingerprint": side.table.fingerprint,
        "token_ids": sequence.token_ids.tolist(),
        "byte_ends": sequence.byte_ends.tolist(),
    }
