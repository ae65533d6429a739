"""``Boundaries``: the bytes at which a completion is compared, and the open rows.

A boundary is a byte at which a token of either side begins, in a common block of both texts.
A row is open at a boundary if its distribution still determines what follows the boundary: its
token begins at the boundary or covers it, or some token of the vocabulary spells the text between
the row's start and the boundary and continues.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Block, common_blocks
from mopd_losses.prefix.sorted_vocabulary import SortedVocabulary, control_character
from mopd_protocol.tokenizers.token_sequence import TokenSequence

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """One side's tokens of a completion; offsets count bytes and control tokens."""

    vocabulary: SortedVocabulary
    ids: list[int]
    starts: Integers  # [rows]
    ends: Integers  # [rows]
    symbols: str  # a Latin-1 character a byte, and a private one for each control token
    spells: NDArray[np.bool_]  # [rows], False for control tokens, also for those sent as text

    @classmethod
    def of(
        cls, vocabulary: SortedVocabulary, sequence: TokenSequence, controls: dict[str, str]
    ) -> "TokenizedText":
        """Build the symbols of a token sequence.

        Args:
            controls: as for ``SortedVocabulary``; names that no vocabulary has are added.
        """
        text = sequence.text.decode("latin-1")
        lengths = np.diff(sequence.byte_ends, prepend=0).astype(np.int64)
        parts: list[str] = []
        start = 0
        for position, name in sequence.marks.items():
            stop = int(sequence.byte_ends[position])
            parts += [text[start:stop], controls.setdefault(name, control_character(len(controls)))]
            start = stop
            lengths[position] = 1
        ends = np.cumsum(lengths)
        return cls(
            vocabulary=vocabulary,
            ids=sequence.token_ids.tolist(),
            starts=ends - lengths,
            ends=ends,
            symbols="".join([*parts, text[start:]]),
            spells=vocabulary.table.byte_lengths[sequence.token_ids] > 0,
        )

    def codes(self) -> NDArray[np.uint16]:
        """Return the symbols as numbers."""
        return np.frombuffer(self.symbols.encode("utf-16-le"), dtype=np.uint16)


@dataclass(frozen=True, eq=False)
class OpenRows:
    """Open rows of one side, in the order of boundaries and rows.

    The last open row of a boundary is the one whose token covers it or begins at it.
    """

    boundaries: Integers  # [open rows]
    rows: Integers  # [open rows]
    begun: list[str]  # [open rows], the text between the row's start and the boundary
    starts: Integers  # [open rows], the first rank that counts as mass of what is open
    longer: Integers  # [open rows], the first rank that reaches beyond the boundary
    stops: Integers  # [open rows]
    first: Integers  # [boundaries], index of the first open row
    last: Integers  # [boundaries], index of the last open row
    blocks: Integers  # [boundaries], where the common block begins, an offset of this side


@dataclass(frozen=True, eq=False)
class Boundaries:
    """The boundaries of one completion, in order."""

    student: TokenizedText
    teacher: TokenizedText
    student_rows: OpenRows
    teacher_rows: OpenRows
    realised: list[str]  # [boundaries], the text up to the next token end of either side
    student_realised: list[str]  # [boundaries], the text up to the student's next token end

    def __len__(self) -> int:
        return len(self.realised)


@dataclass(frozen=True)
class _Place:
    """A boundary in the offsets of one side."""

    offset: int
    row: int  # whose token covers the boundary, or begins at it
    block_start: int  # rows that start before it have a different text behind them


def boundaries_of(
    student: TokenizedText, teacher: TokenizedText, blocks: Iterable[Block] | None = None
) -> Boundaries:
    """Find the boundaries of a completion in the tokens of both sides.

    Args:
        blocks: common blocks of both texts; default: those that a comparison of the texts finds.
    """
    student_places: list[_Place] = []
    teacher_places: list[_Place] = []
    realised: list[str] = []
    student_realised: list[str] = []
    if blocks is None:
        blocks = common_blocks(student.codes(), teacher.codes())
    for block in blocks:
        shift, stop = block.teacher - block.student, block.student + block.length
        offsets = np.union1d(
            _inside(student.starts, block.student, stop),
            _inside(teacher.starts - shift, block.student, stop),
        )
        student_covering = np.searchsorted(student.starts, offsets, side="right") - 1
        teacher_covering = np.searchsorted(teacher.starts, offsets + shift, side="right") - 1
        columns = (offsets.tolist(), student_covering.tolist(), teacher_covering.tolist())
        for offset, student_row, teacher_row in zip(*columns, strict=True):
            own = _Place(offset, student_row, block.student)
            other = _Place(offset + shift, teacher_row, block.teacher)
            if not (_is_readable(student, own) and _is_readable(teacher, other)):
                continue
            ends = int(student.ends[student_row]), int(teacher.ends[teacher_row]) - shift
            end = min(*ends, stop)
            if end <= offset:  # a token that spells nothing
                continue
            student_places.append(own)
            teacher_places.append(other)
            realised.append(student.symbols[offset:end])
            student_realised.append(student.symbols[offset : ends[0]])
    return Boundaries(
        student=student,
        teacher=teacher,
        student_rows=_open_rows(student, student_places),
        teacher_rows=_open_rows(teacher, teacher_places),
        realised=realised,
        student_realised=student_realised,
    )


def _inside(offsets: Integers, start: int, stop: int) -> Integers:
    return offsets[(offsets >= start) & (offsets < stop)]


def _is_readable(text: TokenizedText, place: _Place) -> bool:
    """Return whether the covering row determines what follows: a control token that was sent as
    text is one event, and a row that starts before the block was conditioned on other text."""
    if place.row < 0:
        return False
    start = int(text.starts[place.row])
    return start == place.offset or (start >= place.block_start and bool(text.spells[place.row]))


def _open_rows(text: TokenizedText, places: list[_Place]) -> OpenRows:
    vocabulary, symbols = text.vocabulary, text.symbols
    opened: list[list[tuple[int, str, int, int, int]]] = [[] for _ in places]
    first_place = 0
    for row, start in enumerate(text.starts.tolist()):
        while first_place < len(places) and places[first_place].offset < start:
            first_place += 1
        number = first_place
        if number < len(places) and places[number].offset == start and places[number].row == row:
            opened[number].append((row, "", 0, 0, len(vocabulary)))
            number += 1
        if not text.spells[row]:
            continue
        # The tokens that a row leaves open only become fewer from one boundary to the next.
        while number < len(places) and places[number].block_start <= start:
            begun = symbols[start : places[number].offset]
            tokens = vocabulary.range_of(begun)
            covers = places[number].row == row
            if tokens.longer == tokens.stop and not covers:
                break
            # A token that covers the boundary in the text could also have ended at it.
            counted = tokens.start if covers else tokens.longer
            opened[number].append((row, begun, counted, tokens.longer, tokens.stop))
            number += 1
    counts = np.array([len(rows) for rows in opened], dtype=np.int64)
    flat = [entry for rows in opened for entry in rows]
    numbers = np.array(
        [(row, counted, longer, stop) for row, _, counted, longer, stop in flat], dtype=np.int64
    ).reshape(-1, 4)
    last = np.cumsum(counts) - 1
    return OpenRows(
        boundaries=np.repeat(np.arange(len(places)), counts),
        rows=numbers[:, 0],
        begun=[begun for _, begun, *_ in flat],
        starts=numbers[:, 1],
        longer=numbers[:, 2],
        stops=numbers[:, 3],
        first=last - counts + 1,
        last=last,
        blocks=np.array([place.block_start for place in places], dtype=np.int64),
    )
