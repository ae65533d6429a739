"""Byte-exact alignment: the finest spans of tokens that spell the same bytes on both sides.

Where both sides end a token at the same byte, the text can be cut; what lies between two
neighbouring cuts is a span. A control token counts as one separate symbol, so that an end of
turn aligns only with an end of turn. Where the two texts differ (a normalizer, a truncation,
invalid UTF-8) spans exist only inside the common blocks and everything else belongs to none.

O(bytes) time and memory for texts that agree, and O(n log n) for the blocks of texts that do not.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import IntArray, frozen_array
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_sequence import TokenSequence

Symbols = NDArray[Any]
#: Where tokens end, in symbols. As wide as the integers that are looked up in it: numpy would
#: convert all of a narrower array at every look-up.
Ends = NDArray[np.int64]

#: Symbols that must agree, and occur once on each side, to anchor a common block after a
#: difference. Shorter anchors find more in short texts and more coincidences in long ones.
ANCHOR_SYMBOLS = 8


@dataclass(frozen=True, eq=False)
class Alignment:
    """Spans in order: tokens ``[start, end)`` of either side that spell the same bytes.

    Raises:
        DataError: when the four vectors differ in length, a span is empty, or spans overlap.
    """

    student_starts: IntArray  # [spans]
    student_ends: IntArray  # [spans], exclusive
    teacher_starts: IntArray  # [spans]
    teacher_ends: IntArray  # [spans], exclusive
    blocks: tuple["Block", ...] | None = None
    """The common blocks of both texts; None if each token of one side is a token of the other."""

    def __post_init__(self) -> None:
        for name in ("student_starts", "student_ends", "teacher_starts", "teacher_ends"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), "int32"))
        for side in ("student", "teacher"):
            starts, ends = getattr(self, f"{side}_starts"), getattr(self, f"{side}_ends")
            if starts.shape != ends.shape or len(starts) != len(self.student_starts):
                raise DataError(f"{side} spans have {len(starts)} starts and {len(ends)} ends")
            if (starts >= ends).any() or (starts[1:] < ends[:-1]).any():
                raise DataError(f"{side} spans are empty, overlap or run backwards")

    def __len__(self) -> int:
        return len(self.student_starts)

    @property
    def one_to_one(self) -> NDArray[np.bool_]:
        """[spans], True where one student token aligns with one teacher token."""
        student = self.student_ends - self.student_starts
        return (student == 1) & (self.teacher_ends - self.teacher_starts == 1)

    def aligned_bytes(self, student: TokenSequence) -> int:
        """Bytes of the student's text that lie in spans."""
        ends = np.concatenate([[0], student.byte_ends])
        return int((ends[self.student_ends] - ends[self.student_starts]).sum())


class Block(NamedTuple):
    """Equal runs of symbols: ``student[s:s + n]`` and ``teacher[t:t + n]``."""

    student: int
    teacher: int
    length: int


def align(student: TokenSequence, teacher: TokenSequence) -> Alignment:
    """The finest alignment of two tokenizations of (ideally) one text."""
    names: dict[str, int] = {}
    symbols = symbols_of(student, names), symbols_of(teacher, names)
    return align_blocks(student, teacher, common_blocks(*symbols))


def align_blocks(
    student: TokenSequence, teacher: TokenSequence, blocks: Iterable[Block]
) -> Alignment:
    """The finest alignment within common blocks, which are in order and disjoint."""
    blocks = tuple(blocks)
    ends = _symbol_ends(student), _symbol_ends(teacher)
    spans = [_spans_in_block(block, *ends) for block in blocks]
    columns = np.concatenate(spans, axis=1) if spans else np.zeros((4, 0), dtype=np.int32)
    return Alignment(*columns, blocks=blocks)


def identity_alignment(tokens: int) -> Alignment:
    """Align one span per token, for a teacher that scored the student's ids."""
    starts = np.arange(tokens, dtype=np.int32)
    return Alignment(starts, starts + 1, starts, starts + 1)


def symbols_of(sequence: TokenSequence, names: dict[str, int]) -> Symbols:
    """The bytes of a text, with each control token as a symbol above 255.

    Args:
        names: name of a control token -> its number; new ones are added.
    """
    text = np.frombuffer(sequence.text, dtype=np.uint8)
    if not sequence.marks:
        return text
    codes = [256 + names.setdefault(name, len(names)) for name in sequence.marks.values()]
    return np.insert(text.astype(np.int32), sequence.byte_ends[[*sequence.marks]], codes)


def _symbol_ends(sequence: TokenSequence) -> Ends:
    """Ends of the tokens, in symbols."""
    is_mark = np.zeros(len(sequence), dtype=np.int64)
    is_mark[[*sequence.marks]] = 1
    return sequence.byte_ends.astype(np.int64) + np.cumsum(is_mark)


def _spans_in_block(block: Block, student_ends: Ends, teacher_ends: Ends) -> IntArray:
    """[4, spans]: the columns of ``Alignment`` for one block."""
    cuts = np.flatnonzero(
        _boundaries(student_ends, block.student, block.length)
        & _boundaries(teacher_ends, block.teacher, block.length)
    )
    starts, ends = cuts[:-1], cuts[1:]
    return np.stack(
        [
            np.searchsorted(student_ends, starts + block.student, side="right"),
            np.searchsorted(student_ends, ends + block.student, side="left") + 1,
            np.searchsorted(teacher_ends, starts + block.teacher, side="right"),
            np.searchsorted(teacher_ends, ends + block.teacher, side="left") + 1,
        ]
    ).astype(np.int32)


def _boundaries(ends: Ends, start: int, length: int) -> NDArray[np.bool_]:
    """[length + 1], True where a token ends (or the sequence begins) inside a block."""
    marks = np.zeros(length + 1, dtype=np.bool_)
    first, last = np.searchsorted(ends, [start, start + length], side="left")
    inside = ends[first : last + 1]
    marks[inside[inside <= start + length] - start] = True
    if start == 0:
        marks[0] = True
    return marks


def common_blocks(student: Symbols, teacher: Symbols) -> Iterator[Block]:
    """Maximal equal runs, in order on both sides, disjoint; the whole text when all is equal."""
    prefix = common_prefix(student, teacher)
    if prefix:
        yield Block(0, 0, prefix)
    student_rest, teacher_rest = student[prefix:], teacher[prefix:]
    suffix = common_prefix(student_rest[::-1], teacher_rest[::-1])
    student_end, teacher_end = len(student_rest) - suffix, len(teacher_rest) - suffix
    middle = _anchored_blocks(student_rest[:student_end], teacher_rest[:teacher_end])
    for block in middle:
        yield Block(block.student + prefix, block.teacher + prefix, block.length)
    if suffix:
        yield Block(student_end + prefix, teacher_end + prefix, suffix)


def common_prefix(left: Symbols, right: Symbols) -> int:
    """Length of the common prefix. Looks at ever larger pieces, so that early ends are cheap."""
    limit, done, piece = min(len(left), len(right)), 0, 256
    while done < limit:
        stop = min(done + piece, limit)
        differs = left[done:stop] != right[done:stop]
        if differs.any():
            return done + int(differs.argmax())
        done, piece = stop, piece * 4
    return limit


def _anchored_blocks(student: Symbols, teacher: Symbols) -> Iterator[Block]:
    """Blocks grown from runs of symbols that occur exactly once on each side (patience diff)."""
    student_done = teacher_done = 0
    for anchor in _anchors(student, teacher):
        consumed = max(student_done - anchor.student, teacher_done - anchor.teacher, 0)
        if consumed >= anchor.length:
            continue
        at_student, at_teacher = anchor.student + consumed, anchor.teacher + consumed
        back = common_prefix(
            student[student_done:at_student][::-1], teacher[teacher_done:at_teacher][::-1]
        )
        forward = common_prefix(student[at_student:], teacher[at_teacher:])
        if back + forward < ANCHOR_SYMBOLS:
            continue  # two different runs with one hash
        yield Block(at_student - back, at_teacher - back, back + forward)
        student_done, teacher_done = at_student + forward, at_teacher + forward


def _anchors(student: Symbols, teacher: Symbols) -> list[Block]:
    """List the starts of runs unique on both sides: the longest chain that increases on both.

    Neighbouring beginnings are one block, and belong to the chain together or not at all.
    """
    if min(len(student), len(teacher)) < ANCHOR_SYMBOLS:
        return []
    student_hashes, student_at = _unique_runs(student)
    teacher_hashes, teacher_at = _unique_runs(teacher)
    _, in_student, in_teacher = np.intersect1d(
        student_hashes, teacher_hashes, assume_unique=True, return_indices=True
    )
    if not len(in_student):
        return []
    order = np.argsort(student_at[in_student])
    students, teachers = student_at[in_student][order], teacher_at[in_teacher][order]
    breaks = (np.diff(students) != 1) | (np.diff(teachers) != 1)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lengths = np.diff(first, append=len(students))
    columns = (students[first].tolist(), teachers[first].tolist(), lengths.tolist())
    return _longest_chain([Block(*row) for row in zip(*columns, strict=True)])


def _unique_runs(symbols: Symbols) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the runs of ``ANCHOR_SYMBOLS`` that occur once, and where they start."""
    count = len(symbols) - ANCHOR_SYMBOLS + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for shift in range(ANCHOR_SYMBOLS):  # a polynomial hash modulo 2^64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + symbols[shift : shift + count].astype(
            np.uint64
        )
    values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    return values[counts == 1], first[counts == 1]


def _longest_chain(blocks: list[Block]) -> list[Block]:
    """The blocks (disjoint, in the student's order) that the teacher has in order, most symbols."""
    ends: list[int] = []  # where on the teacher's side the best chains end: the more, the later
    totals: list[int] = []  # symbols in each
    last: list[int] = []  # index of each one's last block
    previous: list[int] = []
    for index, block in enumerate(blocks):
        at = bisect_left(ends, block.teacher)
        total = block.length + (totals[at - 1] if at else 0)
        previous.append(last[at - 1] if at else -1)
        stop = bisect_right(totals, total, lo=at)  # chains that end later and have no more symbols
        ends[at:stop], totals[at:stop], last[at:stop] = [block.teacher], [total], [index]
    chain: list[Block] = []
    at = last[-1] if last else -1
    while at >= 0:
        chain.append(blocks[at])
        at = previous[at]
    return chain[::-1]
