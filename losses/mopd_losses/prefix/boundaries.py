"""``Places``: every boundary of one completion, and the rows of either side that are open there."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mopd_losses.prefix.junctions import Junction, Junctions
from mopd_losses.prefix.shared_units import Crossings, SharedUnits, SideUnits
from mopd_protocol.tokenizers.token_sequence import TokenSequence

#: No row of a side starts, or is cut, at a boundary.
NO_ROW = -1


@dataclass(frozen=True, eq=False)
class Written:
    """One side's tokens of a completion; offsets count bytes and control tokens."""

    side: SideUnits
    ids: list[int]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    symbols: str  # a Latin-1 character a byte, and a private one for each control token
    spells: NDArray[np.bool_]  # [rows], False for control tokens, those sent as text too

    @classmethod
    def by(cls, side: SideUnits, sequence: TokenSequence, names: dict[str, str]) -> "Written":
        """Reads a sequence.

        Args:
            names: the private characters of control tokens, the same for both sides; grows.
        """
        text = sequence.text.decode("latin-1")
        lengths = np.diff(sequence.byte_ends, prepend=0).astype(np.int64)
        if not sequence.marks:
            symbols = text
        else:
            parts: list[str] = []
            start = 0
            for offset, mark in sequence.marks.items():
                at = int(sequence.byte_ends[offset])
                parts += [text[start:at], names.setdefault(mark, _name(len(names)))]
                start = at
                lengths[offset] = 1
            symbols = "".join([*parts, text[start:]])
        ends = np.cumsum(lengths)
        spells = side.table.byte_lengths[sequence.token_ids] > 0
        return cls(side, sequence.token_ids.tolist(), ends - lengths, ends, symbols, spells)


def _name(number: int) -> str:
    """The character that stands for a control token, above every byte."""
    return chr(0x100 + number)


@dataclass(frozen=True, eq=False)
class Standing:
    """Where one side stands at each place: the rows from which it says what comes next."""

    written: Written
    own: NDArray[np.int64]  # [places], the row that starts there, or NO_ROW
    cut: NDArray[np.int64]  # [places], the row whose token starts before and ends after, or NO_ROW
    crossed: list[list[tuple[int, Crossings]]]  # [places], rows that start before; nearest first

    @property
    def here(self) -> NDArray[np.int64]:
        """[places], the last row that is open."""
        return np.where(self.own == NO_ROW, self.cut, self.own)

    @property
    def first(self) -> NDArray[np.int64]:
        """[places], the first row that is open."""
        found = self.here
        for place, crossed in enumerate(self.crossed):
            if crossed:
                found[place] = crossed[-1][0]
        return found


@dataclass(frozen=True, eq=False)
class Places:
    """The boundaries of either side at which both sides can be read, in order."""

    at: NDArray[np.int64]  # [places], offsets in the text
    student: Standing
    teacher: Standing
    junctions: list[Junction | None]  # [places]; None where no token crosses

    def __len__(self) -> int:
        return len(self.junctions)


def places_of(student: TokenSequence, teacher: TokenSequence, junctions: Junctions) -> Places:
    """The places of one completion."""
    units = junctions.units
    names: dict[str, str] = {}
    ours = Written.by(units.student, student, names)
    theirs = Written.by(units.teacher, teacher, names)
    common = _common_beginning(ours.symbols, theirs.symbols)
    at = np.unique(np.concatenate([ours.starts, theirs.starts]))
    at = at[at <= common]
    sides = [_rows_at(written, at) for written in (ours, theirs)]
    readable = np.logical_and.reduce([(own != NO_ROW) | (cut != NO_ROW) for own, cut in sides])
    at = at[readable]
    student_standing, teacher_standing = (
        Standing(written, own[readable], cut[readable], _crossed(written, other, at, units))
        for (own, cut), written, other in zip(sides, (ours, theirs), (theirs, ours), strict=True)
    )
    found = _junctions(student_standing, teacher_standing, junctions)
    return Places(at, student_standing, teacher_standing, found)


def _common_beginning(left: str, right: str) -> int:
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    pairs = enumerate(zip(left, right, strict=False))
    return next(at for at, (a, b) in pairs if a != b)


def _rows_at(
    written: Written, at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row that starts at each offset, and the one that is cut there.

    A control token that was sent as text says all of it or nothing: none of its row is read inside.
    """
    if not len(written.starts):
        return np.full(len(at), NO_ROW), np.full(len(at), NO_ROW)
    last = np.searchsorted(written.starts, at, side="right") - 1
    own = np.where((last >= 0) & (written.starts[last] == at), last, NO_ROW)
    inside = (last >= 0) & (written.ends[last] > at) & written.spells[last]
    cut = np.where((own == NO_ROW) & inside, last, NO_ROW)
    return own, cut


def _crossed(
    written: Written, other: Written, at: NDArray[np.int64], units: SharedUnits
) -> list[list[tuple[int, Crossings]]]:
    side, symbols, places = written.side, written.symbols, at.tolist()
    beginnings = side.beginnings
    found: list[list[tuple[int, Crossings]]] = [[] for _ in places]
    starts, ends = written.starts.tolist(), written.ends.tolist()
    contexts = _contexts(written, other)
    nexts = np.searchsorted(at, written.starts, side="right").tolist()
    for row, (start, end, place) in enumerate(zip(starts, ends, nexts, strict=True)):
        if not written.spells[row]:
            continue
        for later in range(place, len(places)):
            offset = places[later]
            before = symbols[start:offset]
            if before not in beginnings:
                break
            cut = written.ids[row] if offset < end else None
            crossings = units.crossings(side, before, contexts[row], cut)
            if crossings:
                found[later].insert(0, (row, crossings))
    return found


def _contexts(written: Written, other: Written) -> list[str]:
    """What the other side's token has spelt where each row starts; nothing at its boundaries."""
    last = np.searchsorted(other.starts, written.starts, side="right") - 1
    begun = other.starts[last].tolist() if len(other.starts) else [0] * len(last)
    starts = written.starts.tolist()
    return [other.symbols[first:start] for first, start in zip(begun, starts, strict=True)]


def _junctions(student: Standing, teacher: Standing, junctions: Junctions) -> list[Junction | None]:
    cuts = zip((student.cut != NO_ROW).tolist(), (teacher.cut != NO_ROW).tolist(), strict=True)
    found: list[Junction | None] = []
    for ours, theirs, (ours_cut, theirs_cut) in zip(
        student.crossed, teacher.crossed, cuts, strict=True
    ):
        if not ours and not theirs:
            found.append(None)
            continue
        crossed = tuple(c for _, c in ours), tuple(c for _, c in theirs)
        found.append(junctions.at((*crossed, ours_cut, theirs_cut)))
    return found
