"""Draw the data flow, and the alignment and projection of one sentence.

The second drawing is computed with two tokenizers, ``align`` and ``build_projection``.
"""

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from docs.import_graph import import_graph
from docs.svg import box, drawing, line, text
from mopd_losses import align, build_projection
from mopd_protocol import (
    TextEncoder,
    TokenSequence,
    TokenTable,
    control_tokens,
    roles_of,
    tokenizer_json,
)
from tests import tiny_models

PAGES = Path(__file__).parent / "pages"
SENTENCE = "2045 items, Привет"
_STUDENT, _TEACHER, _BOTH = "#3949ab", "#00897b", "#8e24aa"


def data_flow() -> str:
    """Draw prompts, student, teachers and the exchanged data."""
    parts = [
        box(15, 20, 410, 360, _STUDENT),
        text(30, 42, "the student's machine", anchor="start", fill=_STUDENT, weight="bold"),
    ]
    steps = [
        ("prompts.jsonl", "each line names its teachers"),
        ("student samples", "temperature 0.6"),
        ("align by bytes", "spans end at common token boundaries"),
        ("project and compare", "nats per student token, block by block"),
        ("one optimizer step", "divided once, by the step's tokens"),
    ]
    for at, (title, detail) in enumerate(steps):
        y = 58 + at * 64
        parts += [
            box(35, y, 250, 48, _STUDENT, fill="#e8eaf6"),
            text(160, y + 20, title, weight="bold"),
            text(160, y + 38, detail, size=12),
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
            text(697, y + 68, "the teacher's chat template", size=12),
            text(697, y + 86, "the teacher's tokenizer", size=12),
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
    """Draw one sentence in two tokenizations, its spans, and the projection of some tokens."""
    student_tokenizer = tiny_models.whole_number_tokenizer()
    teacher_tokenizer = tiny_models.digit_tokenizer()
    student, teacher = _table(student_tokenizer), _table(teacher_tokenizer)
    student_encoder = TextEncoder(student_tokenizer.backend_tokenizer, student)
    teacher_encoder = TextEncoder(teacher_tokenizer.backend_tokenizer, teacher)
    sides = [
        table.sequence(encoder.encode(SENTENCE))
        for table, encoder in ((student, student_encoder), (teacher, teacher_encoder))
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
            f"{len(spans)} spans end at common token boundaries; at the start "
            "of each, both models have consumed the same bytes",
            size=13,
            fill=_BOTH,
        )
    )
    parts += _projected(student, teacher, teacher_encoder)
    return drawing(820, 430, "Alignment and projection of one sentence", parts)


def _projected(student: TokenTable, teacher: TokenTable, encoder: TextEncoder) -> list[str]:
    matrix = build_projection(student, teacher, encoder, student_width=student.size)
    dense = matrix.dense()
    parts = [
        text(
            20,
            262,
            "Projection: a student token is mapped to the teacher token with the same bytes, "
            "or with its first bytes",
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
                else "first bytes",
                size=11,
            ),
        ]
    return parts


def _examples(student: TokenTable, teacher: TokenTable, dense) -> list[tuple[int, int]]:
    """Return the two longest tokens of both sides, and the two longest of the student only."""
    examples: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for own in range(student.size):
        piece = student.bytes_of(own)
        if piece and piece.isascii() and dense[own].any():
            target = int(dense[own].argmax())
            examples[piece == teacher.bytes_of(target)].append((own, target))
    for pairs in examples.values():
        pairs.sort(key=lambda pair: (-len(student.bytes_of(pair[0])), pair[0]))
    return [*examples[True][:2], *examples[False][:2]]


DRAWINGS = {
    "data-flow.svg": data_flow,
    "alignment.svg": alignment,
    "architecture.svg": import_graph,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PAGES / name).write_text(draw())
        sys.stdout.write(f"{PAGES / name}\n")
