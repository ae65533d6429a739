"""``chunks``: all tokens of two aligned sequences, in order: spans, and what lies between."""

from collections.abc import Iterator
from dataclasses import dataclass

from mopd_losses.alignment.byte_alignment import Alignment


@dataclass(frozen=True)
class Chunk:
    """Tokens ``[start, end)`` of both sides: an aligned span, or unaligned tokens between spans."""

    student: tuple[int, int]
    teacher: tuple[int, int]
    in_span: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of tokens of the student and of the teacher."""
        return (self.student[1] - self.student[0], self.teacher[1] - self.teacher[0])

    @property
    def one_to_one(self) -> bool:
        """True for a span of one token on both sides."""
        return self.in_span and self.sizes == (1, 1)


def chunks(alignment: Alignment, student_tokens: int, teacher_tokens: int) -> Iterator[Chunk]:
    """Yield chunks that cover all tokens of both sequences.

    Args:
        student_tokens: length of the student's sequence.
        teacher_tokens: length of the teacher's sequence.
    """
    student = teacher = 0
    spans = alignment
    columns = (spans.student_starts, spans.student_ends, spans.teacher_starts, spans.teacher_ends)
    for s, s_end, t, t_end in zip(*(column.tolist() for column in columns), strict=True):
        if s > student or t > teacher:
            yield Chunk((student, s), (teacher, t), in_span=False)
        yield Chunk((s, s_end), (t, t_end), in_span=True)
        student, teacher = s_end, t_end
    if student < student_tokens or teacher < teacher_tokens:
        yield Chunk((student, student_tokens), (teacher, teacher_tokens), in_span=False)


def run_lengths(parts: Iterator[Chunk]) -> Iterator[int | list[int]]:
    """Yield chunks as short JSON: ``n`` for ``n`` one-to-one spans, ``[s, t]`` for a span of that
    many tokens of student and teacher, ``[s, t, 0]`` for unaligned tokens."""
    one_to_one = 0
    for part in parts:
        if part.one_to_one:
            one_to_one += 1
            continue
        if one_to_one:
            yield one_to_one
            one_to_one = 0
        yield [*part.sizes] if part.in_span else [*part.sizes, 0]
    if one_to_one:
        yield one_to_one
