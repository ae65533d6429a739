"""Writes the two drawings: how data flows, and what alignment and projection make of a sentence.

The second is computed: two tokenizers, ``align`` and ``build_projection`` of this project.
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.projection.matrix import build_projection
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of
from tests import tiny_models

PAGES = Path(__file__).parent / "pages"
SENTENCE = "2045 items, Привет"
_STUDENT, _TEACHER, _BOTH, _INK = "#3949ab", "#00897b", "#8e24aa", "#263238"


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 14,
    fill: str = _INK,
    anchor: str = "middle",
    weight: str = "normal",
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, color: str, *, fill: str = "white") -> str:
    """A rounded rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{fill}" stroke="{color}" stroke-width="1.5"/>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str = _INK,
    *,
    arrow: bool = False,
    dashed: bool = False,
    width: float = 1.5,
) -> str:
    """A straight line."""
    end = ' marker-end="url(#arrow)"' if arrow else ""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" '
        f'stroke-width="{width:g}"{dash}{end}/>'
    )


def drawing(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """A whole SVG on white, so that it can be read on dark pages too."""
    arrow = (
        '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L10 5L0 10z" fill="#263238"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif"><title>{escape(title)}</title>',
            f"<defs>{arrow}</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def data_flow() -> str:
    """Prompts, the student, the teachers, and the way back."""
    parts = [
        box(15, 20, 410, 360, _STUDENT),
        text(30, 42, "the student's machine", anchor="start", fill=_STUDENT, weight="bold"),
    ]
    steps = [
        ("prompts.jsonl", "a line names its teachers"),
        ("student writes", "temperature 1, its own tokenizer"),
        ("align by bytes", "spans end where both end a token"),
        ("project and compare", "nats per student token, block by block"),
        ("one optimizer step", "divided once, by the step's tokens"),
    ]
    for at, (title, told) in enumerate(steps):
        y = 58 + at * 64
        parts += [
            box(35, y, 250, 48, _STUDENT, fill="#e8eaf6"),
            text(160, y + 20, title, weight="bold"),
            text(160, y + 38, told, size=12),
        ]
        if at:
            parts.append(line(160, y - 16, 160, y, arrow=True))
    parts += [
        line(285, 338, 345, 338),
        line(345, 338, 345, 146),
        line(345, 146, 287, 146, arrow=True),
        text(352, 250, "new", size=12, anchor="start"),
        text(352, 266, "weights", size=12, anchor="start"),
    ]
    for at, (name, model) in enumerate(
        (("teacher math", "Qwen3.5-4B"), ("teacher general", "Llama-3.2-3B"))
    ):
        y = 60 + at * 165
        parts += [
            box(590, y, 215, 130, _TEACHER),
            text(697, y + 22, name, fill=_TEACHER, weight="bold"),
            text(697, y + 42, model, size=12),
            text(697, y + 68, "its own chat template", size=12),
            text(697, y + 86, "its own tokenizer", size=12),
            text(697, y + 104, "top-k logprobs and the tail", size=12),
        ]
        parts += [
            line(287, 138 + 6 * at, 588, y + 48, arrow=True),
            line(588, y + 84, 287, 206 + 8 * at, arrow=True),
        ]
    parts += [
        text(487, 72, "POST /v1/logprobs", size=12),
        text(487, 88, "messages and text", size=12),
        text(520, 384, "int32 ids, float32 logprobs,", size=12),
        text(520, 400, "one safetensors body", size=12),
    ]
    return drawing(820, 415, "How data flows between the student and its teachers", parts)


def _table(tokenizer: PreTrainedTokenizerFast) -> TokenTable:
    description = tokenizer_json(tokenizer.backend_tokenizer)
    return TokenTable.from_json(description, roles_of(tokenizer, control_tokens(description)))


def _pieces(sequence: TokenSequence) -> list[tuple[int, int, str]]:
    ends = sequence.byte_ends.tolist()
    starts = [0, *ends[:-1]]
    return [
        (start, end, _shown(sequence.text[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _shown(piece: bytes) -> str:
    try:
        return piece.decode().replace(" ", "␣")
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)


def alignment() -> str:
    """One sentence in two tokenizations, its spans, and where some student tokens are projected."""
    student_tokenizer = tiny_models.whole_number_tokenizer()
    teacher_tokenizer = tiny_models.digit_tokenizer()
    student, teacher = _table(student_tokenizer), _table(teacher_tokenizer)
    ours = TextEncoder(student_tokenizer.backend_tokenizer, student)
    theirs = TextEncoder(teacher_tokenizer.backend_tokenizer, teacher)
    sides = [
        table.sequence(encoder.encode(SENTENCE))
        for table, encoder in ((student, ours), (teacher, theirs))
    ]
    spans = align(*sides)
    step = 770 / len(SENTENCE.encode())
    parts = [
        text(20, 28, f"“{SENTENCE}” in two tokenizations", size=16, anchor="start", weight="bold")
    ]
    for sequence, y, color, fill, name in (
        (sides[0], 62, _STUDENT, "#e8eaf6", "student"),
        (sides[1], 150, _TEACHER, "#e0f2f1", "teacher"),
    ):
        parts.append(text(20, y - 8, name, size=12, fill=color, anchor="start", weight="bold"))
        for start, end, piece in _pieces(sequence):
            x, width = 20 + start * step, (end - start) * step - 4
            parts += [
                box(x, y, width, 40, color, fill=fill),
                text(x + width / 2, y + 25, piece, size=13 if len(piece) < 6 else 10),
            ]
    for end in [0, *(int(sides[0].byte_ends[e - 1]) for e in spans.student_ends)]:
        x = 18 + end * step
        parts.append(line(x, 58, x, 200, _BOTH, dashed=True, width=2))
    parts.append(
        text(
            405,
            220,
            f"{len(spans)} spans end where both sides end a token; at the start "
            "of each, both models have read the same bytes",
            size=13,
            fill=_BOTH,
        )
    )
    parts += _projected(student, teacher, theirs)
    return drawing(820, 430, "Alignment and projection of one sentence", parts)


def _projected(student: TokenTable, teacher: TokenTable, encoder: TextEncoder) -> list[str]:
    matrix = build_projection(student, teacher, encoder, student_width=student.size)
    dense = matrix.dense()
    parts = [
        text(
            20,
            262,
            "Projection: a student token goes to the teacher's token of the same bytes, "
            "or to its first piece",
            size=13,
            anchor="start",
            weight="bold",
        )
    ]
    chosen = _examples(student, teacher, dense)
    for at, (own, target) in enumerate(chosen):
        y = 278 + at * 36
        parts += [
            box(150, y, 150, 28, _STUDENT, fill="#e8eaf6"),
            text(225, y + 19, _shown(student.bytes_of(own))),
            line(302, y + 14, 508, y + 14, arrow=True),
            box(510, y, 150, 28, _TEACHER, fill="#e0f2f1"),
            text(585, y + 19, _shown(teacher.bytes_of(target))),
            text(
                405,
                y + 9,
                "same bytes"
                if student.bytes_of(own) == teacher.bytes_of(target)
                else "first piece",
                size=11,
            ),
        ]
    return parts


def _examples(student: TokenTable, teacher: TokenTable, dense) -> list[tuple[int, int]]:
    """Two tokens that both sides have, and two that only the student has: the longest of each."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for own in range(student.size):
        piece = student.bytes_of(own)
        if piece and piece.isascii() and dense[own].any():
            target = int(dense[own].argmax())
            found[piece == teacher.bytes_of(target)].append((own, target))
    for pairs in found.values():
        pairs.sort(key=lambda pair: (-len(student.bytes_of(pair[0])), pair[0]))
    return [*found[True][:2], *found[False][:2]]


DRAWINGS = {"data-flow.svg": data_flow, "alignment.svg": alignment}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PAGES / name).write_text(draw())
        sys.stdout.write(f"{PAGES / name}\n")
