"""``Boundaries``: the bytes at which completions are compared, and the open rows.

A boundary is a byte at which a token of either side begins, in a common block of both texts.
A row is open at a boundary if its distribution still determines what follows the boundary: its
token begins at the boundary or covers it, or some token of the vocabulary spells the text between
the row's start and the boundary and continues.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import Block, common_blocks
from mopd_losses.alignment.byte_strings import control_character
from mopd_losses.prefix.vocabulary.hashed_strings import (
    SEPARATOR,
    Codes,
    Hashes,
    Integers,
    codes_of,
    joined,
    prefix_hashes,
    slice_hashes,
)
from mopd_losses.prefix.vocabulary.sorted_vocabulary import (
    SortedVocabulary,
    are_continuations,
)
from mopd_protocol.tokenizers.token_sequence import TokenSequence

_ASCII = "".join(map(chr, range(128)))


def _table_of(characters: str) -> NDArray[np.bool_]:
    """[codes], True for some characters."""
    table = np.zeros(1 << 16, dtype=np.bool_)
    table[codes_of(characters)] = True
    return table


_IS_ASCII = _table_of(_ASCII)
_IS_SPACE = _table_of("".join(filter(str.isspace, _ASCII)))
_IS_LETTER = _table_of("".join(filter(str.isalpha, _ASCII)))
_IS_DIGIT = _table_of("".join(filter(str.isdigit, _ASCII)))


def is_space(codes: Codes) -> NDArray[np.bool_]:
    """Return whether each character is white space of one byte."""
    return _IS_SPACE.take(codes)


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """One side's tokens of several completions, one after another, with a separator after each;
    offsets count bytes, control tokens and separators."""

    vocabulary: SortedVocabulary
    ids: Integers  # [rows]
    starts: Integers  # [rows]
    ends: Integers  # [rows]
    symbols: str  # a Latin-1 character a byte, and a private one for each control token
    spells: NDArray[np.bool_]  # [rows], False for control tokens, also for those sent as text
    first_rows: Integers  # [completions + 1]
    origins: Integers  # [completions], where each begins
    codes: Codes  # [symbols]
    hashes: Hashes  # [symbols + 1], of the beginnings of the text

    @classmethod
    def of(
        cls,
        vocabulary: SortedVocabulary,
        sequences: Sequence[TokenSequence],
        controls: dict[str, str],
    ) -> "TokenizedText":
        """Build the symbols of token sequences.

        Args:
            controls: as for ``SortedVocabulary``; names that no vocabulary has are added.
        """
        parts: list[str] = []
        starts, ends = [_NONE], [_NONE]
        origins: list[int] = []
        origin = 0
        for sequence in sequences:
            symbols, lengths = _symbols_of(sequence, controls)
            parts += [symbols, SEPARATOR]
            ends.append(np.cumsum(lengths) + origin)
            starts.append(ends[-1] - lengths)
            origins.append(origin)
            origin += len(symbols) + 1
        text = "".join(parts)
        codes = codes_of(text)
        ids = np.concatenate([_NONE, *(each.token_ids.astype(np.int64) for each in sequences)])
        counts = [len(each.token_ids) for each in sequences]
        return cls(
            vocabulary=vocabulary,
            ids=ids,
            starts=np.concatenate(starts),
            ends=np.concatenate(ends),
            symbols=text,
            spells=vocabulary.table.byte_lengths[ids] > 0,
            first_rows=np.cumsum([0, *counts]),
            origins=np.array(origins, dtype=np.int64),
            codes=codes,
            hashes=prefix_hashes(codes),
        )

    def codes_of(self, number: int) -> Codes:
        """Return the symbols of one completion."""
        stops = np.append(self.origins[1:], len(self.codes))
        return self.codes[self.origins[number] : stops[number] - 1]

    def slices(self, starts: Integers, stops: Integers) -> Hashes:
        """Hash slices of the text."""
        return slice_hashes(self.hashes, starts, stops)

    def begins_with(self, starts: Integers, hashes: Hashes, lengths: Integers) -> NDArray[np.bool_]:
        """Return whether strings follow these offsets."""
        stops = starts + lengths
        inside = stops < len(self.hashes)
        return inside & (self.slices(starts, np.where(inside, stops, starts)) == hashes)

    def follow_word(self, offsets: Integers) -> NDArray[np.bool_]:
        """Return whether a word ends at each offset, and no token contains the characters on both
        sides: what is before does not matter to what follows."""
        return self._words_end.take(offsets)

    @cached_property
    def divided_ends(self) -> Integers:
        """[rows], the offset after a token, and after those that follow as long as one ends with
        white space or inside a character: how a run or a character is divided depends on all of it,
        and on what follows the run."""
        if not len(self.ids):
            return self.ends
        is_last = ~is_space(self.codes.take(np.maximum(self.ends - 1, 0)))
        is_last &= ~are_continuations(self.codes.take(self.ends))
        is_last[:-1] |= ~self.spells[1:] | (self.starts[1:] != self.ends[:-1])
        is_last[-1] = True
        rows = np.where(is_last, np.arange(len(is_last)), len(is_last))
        return self.ends[np.minimum.accumulate(rows[::-1])[::-1]]

    @cached_property
    def _words_end(self) -> NDArray[np.bool_]:
        """[symbols + 1], ``follow_word`` of each offset.

        Tokenizers divide text before a space, and after letters or digits if another character
        follows, but for an apostrophe. After others it depends on more of the text: ``)@x`` is
        ``)@`` and ``x``, but a text ``@x`` may be one token.
        """
        before, after = self.codes[:-1], self.codes[1:]
        words_end = ~is_space(before) & (after == ord(" "))
        for kind in (_IS_LETTER, _IS_DIGIT):
            words_end |= kind.take(before) & ~kind.take(after) & (after != ord("'"))
        words_end &= _IS_ASCII.take(before) & _IS_ASCII.take(after)
        words_end &= ~self.vocabulary.contain(before, after)
        return np.concatenate([[False], words_end, [False]])


@dataclass(frozen=True, eq=False)
class OpenRows:
    """Open rows of one side, in the order of boundaries and rows.

    The last open row of a boundary is the one whose token covers it or begins at it.
    """

    boundaries: Integers  # [open rows]
    rows: Integers  # [open rows]
    begun: Integers  # [open rows], characters between the row's start and the boundary
    hashes: Hashes  # [open rows], of these characters
    starts: Integers  # [open rows], the first rank that counts as mass of what is open
    longer: Integers  # [open rows], the first rank that reaches beyond the boundary
    stops: Integers  # [open rows]
    first: Integers  # [boundaries], index of the first open row
    last: Integers  # [boundaries], index of the last open row

    def are_last(self) -> NDArray[np.bool_]:
        """[open rows], whether each is the last one of its boundary."""
        result = np.zeros(len(self.rows), dtype=np.bool_)
        result[self.last] = True
        return result


@dataclass(frozen=True, eq=False)
class Places:
    """Boundaries in the offsets of one side."""

    text: TokenizedText
    offsets: Integers  # [boundaries]
    rows: Integers  # [boundaries], whose token covers the boundary, or begins at it
    blocks: Integers  # [boundaries], rows that start before it have a different text after them
    open_rows: OpenRows

    @cached_property
    def boundaries_of_rows(self) -> Integers:
        """[rows + 2], the boundary at which each begins; -1 if it is not compared, and after all
        rows."""
        begins = np.flatnonzero(self.open_rows.begun[self.open_rows.last] == 0)
        boundaries = np.full(len(self.text.ids) + 2, -1, dtype=np.int64)
        boundaries[self.rows[begins]] = begins
        return boundaries

    def context_of(self, boundary: int, row: int) -> str:
        """Return the text between a row's start and a boundary."""
        return self.text.symbols[self.text.starts[row] : self.offsets[boundary]]

    def nodes_after(self, open_rows: Integers, hashes: Hashes) -> Integers:
        """Find the nodes of strings after what open rows have begun."""
        return self.text.vocabulary.nodes_of(self.joined_hashes(open_rows, hashes))

    def joined_hashes(self, open_rows: Integers, hashes: Hashes) -> Hashes:
        """Hash what open rows have begun, together with strings after it."""
        rows = self.open_rows
        return joined(rows.hashes[open_rows], rows.begun[open_rows], hashes)


@dataclass(frozen=True, eq=False)
class Boundaries:
    """The boundaries of several completions, in order."""

    student: Places
    teacher: Places
    sampled: Integers  # [boundaries], characters up to the next token end of either side
    student_sampled: Integers  # [boundaries], characters up to the student's next token end

    def __len__(self) -> int:
        return len(self.sampled)


def boundaries_of(
    student: TokenizedText, teacher: TokenizedText, blocks: Sequence[Iterable[Block] | None]
) -> Boundaries:
    """Find the boundaries of completions in the tokens of both sides.

    Args:
        blocks: [completions], common blocks of both texts; None: those that a comparison finds.
    """
    columns = [np.zeros((4, 0), dtype=np.int64)]
    for number, common in enumerate(blocks):
        origin, teacher_origin = int(student.origins[number]), int(teacher.origins[number])
        if common is None:
            common = common_blocks(student.codes_of(number), teacher.codes_of(number))
        for block in common:
            first, other = block.student + origin, block.teacher + teacher_origin
            stop = first + block.length
            offsets = np.union1d(
                _inside(student.starts, first, stop),
                _inside(teacher.starts, other, other + block.length) + first - other,
            )
            filled = np.broadcast_to([[other - first], [first], [stop]], (3, len(offsets)))
            columns.append(np.concatenate([offsets[None], filled]))
    offsets, shifts, firsts, stops = np.concatenate(columns, axis=1)
    rows = np.searchsorted(student.starts, offsets, side="right") - 1
    teacher_rows = np.searchsorted(teacher.starts, offsets + shifts, side="right") - 1
    ends = student.ends[rows]
    sampled = np.minimum(np.minimum(ends, teacher.ends[teacher_rows] - shifts), stops) - offsets
    kept = _are_readable(student, offsets, rows, firsts)
    kept &= _are_readable(teacher, offsets + shifts, teacher_rows, firsts + shifts)
    kept &= sampled > 0  # a token may spell nothing
    own = offsets[kept], rows[kept], firsts[kept]
    other = (offsets + shifts)[kept], teacher_rows[kept], (firsts + shifts)[kept]
    return Boundaries(
        student=Places(student, *own, _open_rows(student, *own)),
        teacher=Places(teacher, *other, _open_rows(teacher, *other)),
        sampled=sampled[kept],
        student_sampled=(ends - offsets)[kept],
    )


def _symbols_of(sequence: TokenSequence, controls: dict[str, str]) -> tuple[str, Integers]:
    """Return the symbols of a sequence, and how many each token has."""
    text = sequence.text.decode("latin-1")
    lengths = np.diff(sequence.byte_ends, prepend=0).astype(np.int64)
    parts: list[str] = []
    start = 0
    for position, name in sequence.marks.items():
        stop = int(sequence.byte_ends[position])
        parts += [text[start:stop], controls.setdefault(name, control_character(len(controls)))]
        start = stop
        lengths[position] = 1
    return "".join([*parts, text[start:]]), lengths


def _inside(offsets: Integers, start: int, stop: int) -> Integers:
    first, last = np.searchsorted(offsets, [start, stop])
    return offsets[first:last]


def _are_readable(
    text: TokenizedText, offsets: Integers, rows: Integers, blocks: Integers
) -> NDArray[np.bool_]:
    """Return whether the covering rows determine what follows: a control token that was sent as
    text is one event, and a row that starts before the block was conditioned on other text."""
    starts = text.starts[rows]
    return (rows >= 0) & ((starts == offsets) | ((starts >= blocks) & text.spells[rows]))


def _open_rows(
    text: TokenizedText, offsets: Integers, covering: Integers, blocks: Integers
) -> OpenRows:
    vocabulary = text.vocabulary
    rows = np.arange(len(text.starts))
    places = np.searchsorted(offsets, text.starts)
    inside = places < len(offsets)
    begins = np.zeros(len(rows), dtype=np.bool_)
    at = places[inside]
    begins[inside] = (offsets[at] == text.starts[inside]) & (covering[at] == rows[inside])
    opened_rows: list[tuple[Integers, ...]] = []

    def add(rows: Integers, places: Integers, *columns: Integers) -> None:
        opened_rows.append((places * (len(text.starts) + 1) + rows, rows, places, *columns))

    zeros = np.zeros(int(begins.sum()), dtype=np.int64)
    add(rows[begins], places[begins], zeros, zeros, zeros, zeros + len(vocabulary))
    places = places + begins
    rows = rows[text.spells]
    places = places[text.spells]
    # The tokens that a row leaves open only become fewer from one boundary to the next.
    while True:
        inside = places < len(offsets)
        rows, places = rows[inside], places[inside]
        starts = text.starts[rows]
        same = blocks[places] <= starts
        rows, places, starts = rows[same], places[same], starts[same]
        if not len(rows):
            break
        nodes = vocabulary.nodes_of(text.slices(starts, offsets[places]))
        covers = covering[places] == rows
        longer, stops = vocabulary.node_longer[nodes], vocabulary.node_stops[nodes]
        opened = covers | (longer < stops)
        # A token that covers the boundary in the text could also have ended at it.
        counted = np.where(covers, vocabulary.node_starts[nodes], longer)
        columns = (rows, places, offsets[places] - starts, counted, longer, stops)
        add(*(column[opened] for column in columns))
        rows, places = rows[opened], places[opened] + 1
    keys, *ordered = (np.concatenate(column) for column in zip(*opened_rows, strict=True))
    order = np.argsort(keys)
    row, numbers, begun, counted, longer, stops = (column[order] for column in ordered)
    counts = np.bincount(numbers, minlength=len(offsets))
    last = np.cumsum(counts) - 1
    return OpenRows(
        boundaries=numbers,
        rows=row,
        begun=begun,
        hashes=text.slices(offsets[numbers] - begun, offsets[numbers]),
        starts=counted,
        longer=longer,
        stops=stops,
        first=last - counts + 1,
        last=last,
    )


_NONE = np.zeros(0, dtype=np.int64)
