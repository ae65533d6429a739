"""Alignment of a text with a tokenizer that changes it (Unicode normalisation, lower case).

The tokenizer reports the part of the text that each token is from. A comparison of both texts has
to infer it, and fails where differences are dense: decomposed Vietnamese, half-width Japanese.
"""

from mopd_losses.alignment.byte_alignment import (
    Alignment,
    Block,
    align,
    align_blocks,
    common_prefix,
    symbols_of,
)
from mopd_protocol.tokenizers.token_sequence import TokenSequence, valid_utf8
from mopd_protocol.tokenizers.token_table import TextEncoder


def align_text(student: TokenSequence, teacher: TokenSequence, encoder: TextEncoder) -> Alignment:
    """Align the student's tokens with those that a teacher's tokenizer made of the student's text.

    Args:
        encoder: of the teacher's tokenizer. If it does not confirm the teacher's tokens, or control
            tokens divide the text, both texts are compared instead.
    """
    if student.text == teacher.text or _is_divided(student) or _is_divided(teacher):
        return align(student, teacher)
    # A teacher without tokens for bytes outside characters has the beginning only.
    for sent in dict.fromkeys([student.text, valid_utf8(student.text)]):
        encoded = encoder.encode_with_spans(sent)
        if encoded is not None and teacher.token_ids[: len(encoded[0])].tolist() == encoded[0]:
            blocks = _blocks(student, teacher, len(sent), encoded[1])
            return align_blocks(student, teacher, blocks)
    return align(student, teacher)


def _is_divided(sequence: TokenSequence) -> bool:
    """Return whether text follows a control token."""
    return any(int(sequence.byte_ends[at]) < len(sequence.text) for at in sequence.marks)


def _blocks(
    student: TokenSequence, teacher: TokenSequence, sent: int, spans: list[tuple[int, int]]
) -> list[Block]:
    """Find what each token left unchanged, and join what follows without a gap.

    Args:
        sent: bytes of the student's text that were tokenized.
        spans: bytes of that text, for each of the teacher's tokens.
    """
    names: dict[str, int] = {}
    own, other = symbols_of(student, names), symbols_of(teacher, names)
    teacher_ends = teacher.byte_ends[: len(spans)].tolist()
    blocks: list[Block] = []

    def add(block: Block) -> None:
        last = blocks[-1] if blocks else None
        is_next = last is not None and (
            (last.student + last.length, last.teacher + last.length)
            == (block.student, block.teacher)
        )
        if last is not None and is_next:
            blocks[-1] = last._replace(length=last.length + block.length)
        elif block.length:
            blocks.append(block)

    start = teacher_start = 0  # of tokens that share a character
    for index, (_, stop) in enumerate(spans):
        following = spans[index + 1][0] if index + 1 < len(spans) else sent
        if following < stop:
            continue
        stop = max(stop, following)  # what no token is from is a part of the last one
        left, right = own[start:stop], other[teacher_start : teacher_ends[index]]
        beginning = common_prefix(left, right)
        end = common_prefix(left[beginning:][::-1], right[beginning:][::-1])
        add(Block(start, teacher_start, beginning))
        add(Block(stop - end, teacher_ends[index] - end, end))
        start, teacher_start = stop, teacher_ends[index]
    if sent == len(student.text):  # control tokens behind the text
        marks = common_prefix(own[sent:], other[len(teacher.text) :])
        add(Block(sent, len(teacher.text), marks))
    return blocks
