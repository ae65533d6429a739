"""The preparation of prefix KL: which rows are open at which boundary, and what each says there.

All that depends on text happens here, once per completion, without the student's model: strings
are compared, the teacher's masses summed, and the student's listed. ``prefix_kl`` says what is
compared and why; ``shared_units`` has what can be named.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mopd_losses.loss import Comparison
from mopd_losses.prefix_targets import PrefixTargets, Readings
from mopd_losses.shared_units import NO_UNIT, Crossings, SharedUnits, SideUnits
from mopd_protocol.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

_NO_PATH = -1
_WHOLE_ROW = -1


def prefix_targets(
    comparisons: Sequence[Comparison],
    slot_offsets: Sequence[int],
    units: SharedUnits,
    *,
    mass_floor: float,
) -> PrefixTargets:
    """The targets of several completions.

    Args:
        mass_floor: a boundary that the teacher found the way to with less than this weighs less.
    """
    lists = _Lists(max((comparison.score.topk.k for comparison in comparisons), default=0))
    for comparison, offset in zip(comparisons, slot_offsets, strict=True):
        names: dict[str, str] = {}  # of control tokens, the same on both sides
        student = _Written.by(units.student, comparison.student, names)
        teacher = _Written.by(units.teacher, comparison.score.completion, names)
        opinions = _TeacherRows.of(comparison.score.topk)
        for boundary in _boundaries(student, teacher, units):
            _add_place(lists, boundary, opinions, units, offset, mass_floor)
    return lists.targets(units)


@dataclass(frozen=True, eq=False)
class _Written:
    """One side's tokens of a completion; positions count bytes and control tokens."""

    side: SideUnits
    ids: list[int]
    starts: list[int]
    ends: list[int]
    symbols: str  # a Latin-1 character a byte, and a private one for each control token
    reaches: list[int]  # [tokens]: how far some other token could have gone, and then on
    furthest: list[int]  # [tokens]: the furthest of these so far

    @classmethod
    def by(cls, side: SideUnits, sequence: TokenSequence, names: dict[str, str]) -> "_Written":
        text = sequence.text.decode("latin-1")
        pieces: list[str] = []
        start = 0
        for position, end in enumerate(sequence.byte_ends.tolist()):
            mark = sequence.marks.get(position)
            piece = text[start:end] if mark is None else names.setdefault(mark, _name(len(names)))
            pieces.append(piece)
            start = end
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        starts = (ends - [len(piece) for piece in pieces]).tolist() if pieces else []
        symbols = "".join(pieces)
        reaches = [
            side.reach(symbols, start) if piece else start
            for start, piece in zip(starts, pieces, strict=True)
        ]
        return cls(
            side=side,
            ids=sequence.token_ids.tolist(),
            starts=starts,
            ends=ends.tolist(),
            symbols=symbols,
            reaches=reaches,
            furthest=list(accumulate(reaches, max)),
        )


def _name(number: int) -> str:
    """The character that stands for a control token, above every byte."""
    return chr(0x100 + number)


@dataclass(frozen=True, eq=False)
class _CrossedRow:
    """A row that starts before a boundary and says what follows it."""

    row: int
    side: SideUnits
    text: str  # from its start to the boundary
    crossings: Crossings
    written: tuple[int, str, int] | None  # id, what it says, unit: a crossing not among the others

    @property
    def says_something(self) -> bool:
        return bool(self.crossings.unit_of) or self.written is not None

    def unit_of(self, token_id: int) -> int | None:
        """What a token says after the boundary; None where it does not cross it."""
        if self.written is not None and self.written[0] == token_id:
            return self.written[2]
        return self.crossings.unit_of.get(token_id)

    def ids_of(self, unit: int) -> list[int]:
        """Tokens that say a unit."""
        ids = self.crossings.ids_by_unit.get(unit)
        found = [] if ids is None else ids.tolist()
        return [*found, self.written[0]] if self.written and self.written[2] == unit else found

    def all_ids(self) -> list[int]:
        """Tokens that cross the boundary."""
        return [*self.crossings.unit_of, *([self.written[0]] if self.written else [])]

    def leaves_open(self, text: str) -> str | None:
        """What a token says of which ``text`` is the longer, if this side writes it so."""
        own = self.written[1] if self.written else None
        beginnings = (text[:end] for end in range(1, len(text)))
        if not any(said in self.crossings.said or said == own for said in beginnings):
            return None
        said = self.side.spelling.goes_beyond(self.text, text)[len(self.text) :]
        is_said = said in self.crossings.said or (said and said == own)
        return said if is_said and len(said) < len(text) else None


@dataclass(frozen=True, eq=False)
class _Standing:
    """Where one side stands at a boundary: the rows from which it says what comes next."""

    written: _Written
    own: int | None  # the row that starts here
    covering: int | None  # the row whose token starts before and ends after
    crossed: list[_CrossedRow]  # nearest first

    @property
    def rows(self) -> list[int]:
        """All rows that are open here."""
        here = self.own if self.own is not None else self.covering
        assert here is not None
        return sorted({here, *(crossed.row for crossed in self.crossed)})

    @property
    def text_of_covering(self) -> str | None:
        """What the token that covers the boundary has spelt before it."""
        return next((open_.text for open_ in self.crossed if open_.row == self.covering), None)


@dataclass(frozen=True, eq=False)
class _Boundary:
    at: int
    student: _Standing
    teacher: _Standing


@dataclass(frozen=True, eq=False)
class _TeacherRows:
    ids: list[list[int]]
    logprobs: list[list[float]]
    token_logprobs: list[float]
    tails: list[float]

    @classmethod
    def of(cls, topk: TopKLogprobs) -> "_TeacherRows":
        return cls(
            topk.ids.tolist(),
            topk.logprobs.tolist(),
            topk.token_logprobs.tolist(),
            topk.tail_logprobs.tolist(),
        )

    def row(self, row: int) -> Iterator[tuple[int, float]]:
        """(id, logprob), most likely first; absent entries left out."""
        entries = zip(self.ids[row], self.logprobs[row], strict=True)
        return (entry for entry in entries if entry[1] > -math.inf)

    def path(self, first: int, row: int) -> float:
        """Log-probability of the teacher's own tokens from one row up to another."""
        return math.fsum(self.token_logprobs[first:row]) if row > first else 0.0


def _boundaries(student: _Written, teacher: _Written, units: SharedUnits) -> Iterator[_Boundary]:
    """Every boundary of either side at which both sides can be read."""
    common = _common_beginning(student.symbols, teacher.symbols)
    places = {start for written in (student, teacher) for start in written.starts}
    for at in sorted(place for place in places if place <= common):
        ours = _standing(student, teacher, at, units)
        theirs = _standing(teacher, student, at, units)
        if ours is not None and theirs is not None:
            yield _Boundary(at, ours, theirs)


def _common_beginning(left: str, right: str) -> int:
    if left == right:
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def _standing(written: _Written, other: _Written, at: int, units: SharedUnits) -> _Standing | None:
    after = bisect_left(written.starts, at + 1)  # of rows that start here, the last
    own = after - 1 if after and written.starts[after - 1] == at else None
    before = bisect_left(written.starts, at) - 1
    covering = before if own is None and before >= 0 and written.ends[before] > at else None
    if own is None and covering is None:
        return None
    crossed: list[_CrossedRow] = []
    for row in range(before, -1, -1):
        if written.furthest[row] < at and row != covering:
            break
        if written.reaches[row] >= at or row == covering:
            found = _crossed_row(written, other, row, at, units, is_covering=row == covering)
            if found.says_something:
                crossed.append(found)
    return _Standing(written, own, covering, crossed)


def _crossed_row(
    written: _Written,
    other: _Written,
    row: int,
    at: int,
    units: SharedUnits,
    *,
    is_covering: bool,
) -> _CrossedRow:
    side, start = written.side, written.starts[row]
    text = written.symbols[start:at]
    context = other.symbols[other.starts[bisect_left(other.starts, start + 1) - 1] : start]
    crossings = units.crossings(side, text, context)
    token_id = written.ids[row]
    really_there = None
    if is_covering and token_id not in crossings.unit_of:
        # However it is spelt by itself, here it is cut.
        said = side.spelling.tokens[token_id][len(text) :]
        really_there = (token_id, said, units.roots([said])[said])
    return _CrossedRow(row, side, text, crossings, really_there)


class _Cells:
    """Where a unit is counted at one boundary."""

    def __init__(self, units: SharedUnits, boundary: _Boundary) -> None:
        self._units = units
        self._crossed = [*boundary.student.crossed, *boundary.teacher.crossed]
        standings = (boundary.student, boundary.teacher)
        self._ended = [
            (standing.written.side, text)
            for standing in standings
            if (text := standing.text_of_covering) is not None
        ]
        self._known: dict[int, int] = {}

    @property
    def all_apart(self) -> bool:
        """Whether every unit is counted where it is."""
        return not self._crossed

    def cell(self, unit: int) -> int:
        """The unit that stands for all that cannot be told from ``unit`` here, or ``NO_UNIT``.

        A token that crosses the boundary and says ``w`` leaves open what comes after ``w``. A
        longer unit that begins with ``w``, and that this side would write as that token and more,
        is therefore counted where ``w`` is. What a side could only say by ending a token at the
        boundary first is not counted anywhere.
        """
        if self.all_apart:
            return unit
        found = self._known.get(unit)
        if found is None:
            found = self._known[unit] = self._find(unit)
        return found

    def members(self, cell: int) -> list[int]:
        """All units that are counted in a cell."""
        longer = self._units.extensions(cell) if self._is_said(cell) else None
        return [cell, *(unit for unit in longer or () if self.cell(unit) == cell)]

    def _find(self, unit: int) -> int:
        while unit != NO_UNIT:
            shorter = self._shorter(self._units.texts[unit])
            if shorter is None:
                break
            unit = shorter
        if unit == NO_UNIT or (self._is_said(unit) and self._units.extensions(unit) is None):
            return NO_UNIT
        text = self._units.texts[unit]
        sayable = all(side.spelling.goes_beyond(before, text) for side, before in self._ended)
        return unit if sayable else NO_UNIT

    def _shorter(self, text: str) -> int | None:
        for crossed in self._crossed:
            said = crossed.leaves_open(text)
            if said is not None:
                return self._units.roots([said])[said]
        return None

    def _is_said(self, unit: int) -> bool:
        return any(
            unit in crossed.crossings.ids_by_unit
            or (crossed.written is not None and crossed.written[2] == unit)
            for crossed in self._crossed
        )


@dataclass(frozen=True, eq=False)
class _TeacherOpinion:
    events: dict[int, float]  # cell -> nats
    rest: float  # nats
    path_mass: float


def _teacher_opinion(standing: _Standing, rows: _TeacherRows, cells: _Cells) -> _TeacherOpinion:
    alone = standing.own is not None and not standing.crossed
    if alone and cells.all_apart and (plain := _plain_opinion(standing, rows)) is not None:
        return plain
    first = standing.rows[0]
    said: dict[int, list[float]] = {}
    if standing.own is not None:
        path = rows.path(first, standing.own)
        of_token = standing.written.side.units
        for token_id, logprob in rows.row(standing.own):
            said.setdefault(cells.cell(int(of_token[token_id])), []).append(path + logprob)
        said.setdefault(NO_UNIT, []).append(path + rows.tails[standing.own])
    for crossed in standing.crossed:
        row, path = crossed.row, rows.path(first, crossed.row)
        masses = dict(rows.row(row))
        ending: Sequence[int] = ()
        if row == standing.covering:
            ending = standing.written.side.spelling.ids.get(crossed.text, ())
            # The token really there is known also outside the top-k.
            masses[standing.written.ids[row]] = rows.token_logprobs[row]
        for token_id, logprob in masses.items():
            unit = crossed.unit_of(token_id)
            if unit is not None:
                said.setdefault(cells.cell(unit), []).append(path + logprob)
            elif token_id in ending:
                said.setdefault(NO_UNIT, []).append(path + logprob)
    rest = _logsumexp(said.pop(NO_UNIT, []))
    events = {cell: _logsumexp(terms) for cell, terms in said.items()}
    everything = _logsumexp([rest, *events.values()])
    return _TeacherOpinion(events, rest, 1.0 if alone else min(1.0, math.exp(everything)))


def _plain_opinion(standing: _Standing, rows: _TeacherRows) -> _TeacherOpinion | None:
    """The usual case, in a hurry: one open row, whose ids are units each of its own."""
    assert standing.own is not None
    entries = list(rows.row(standing.own))
    units = standing.written.side.units[[token_id for token_id, _ in entries]].tolist()
    events = dict(zip(units, (logprob for _, logprob in entries), strict=True))
    if len(events) < len(units) or NO_UNIT in events:
        return None
    return _TeacherOpinion(events, rows.tails[standing.own], 1.0)


def _logsumexp(terms: Sequence[float]) -> float:
    if len(terms) == 1:
        return terms[0]
    highest = max(terms, default=-math.inf)
    if highest == -math.inf:
        return highest
    return highest + math.log(math.fsum(math.exp(term - highest) for term in terms))


class _Lists:
    """The columns of ``PrefixTargets``, growing place by place."""

    def __init__(self, k: int) -> None:
        self.width = k
        self.slots: list[int] = []
        self.first_slots: list[int] = []
        self.events: list[list[float]] = []
        self.rests: list[float] = []
        self.path_masses: list[float] = []
        self.weights: list[float] = []
        self.named = _ReadingLists()
        self.known = _ReadingLists()
        self.rooted = _ReadingLists()  # ids hold units, for all ids with that root
        self.path_places: list[int] = []
        self.steps: list[tuple[int, int, int]] = []  # path, slot, id

    @property
    def place(self) -> int:
        """The number of the place that is being added."""
        return len(self.slots)

    def path(self, written: _Written, first: int, row: int, offset: int) -> int:
        """A new path over the student's tokens from one row up to another."""
        if row == first:
            return _NO_PATH
        path = len(self.path_places)
        self.path_places.append(self.place)
        self.steps += [(path, offset + at, written.ids[at]) for at in range(first, row)]
        return path

    def targets(self, units: SharedUnits) -> PrefixTargets:
        width = max([self.width, *map(len, self.events)])
        filled = [row + [-math.inf] * (width - len(row)) for row in self.events]
        events = torch.tensor(filled, dtype=torch.float64).reshape(len(self.events), width)
        steps = np.array(self.steps, dtype=np.int64).reshape(-1, 3)
        return PrefixTargets(
            slots=_integers(self.slots),
            first_slots=_integers(self.first_slots),
            events=events,
            rests=torch.tensor(self.rests, dtype=torch.float64),
            path_masses=torch.tensor(self.path_masses, dtype=torch.float64),
            weights=torch.tensor(self.weights, dtype=torch.float64),
            named=_joined(_expanded(self.rooted, units), self.named.array()),
            known=_joined(self.known.array()),
            path_places=_integers(self.path_places),
            step_paths=torch.tensor(steps[:, 0]),
            step_slots=torch.tensor(steps[:, 1]),
            step_ids=torch.tensor(steps[:, 2]),
        )


@dataclass(frozen=True, eq=False)
class _ReadingLists:
    rows: list[tuple[int, int, int, int, int]] = field(
        default_factory=list[tuple[int, int, int, int, int]]
    )

    def add(self, place: int, column: int, slot: int, ids: Sequence[int], path: int) -> None:
        self.rows.extend((place, column, slot, token_id, path) for token_id in ids)

    def array(self) -> np.typing.NDArray[np.int64]:
        """[n, 5]."""
        return np.array(self.rows, dtype=np.int64).reshape(-1, 5)


def _expanded(rooted: _ReadingLists, units: SharedUnits) -> np.typing.NDArray[np.int64]:
    """A reading of every student id with the unit for its root, in place of each unit."""
    rows = rooted.array()
    starts = units.starts[rows[:, 3]]
    counts = units.starts[rows[:, 3] + 1] - starts
    expanded = np.repeat(rows, counts, axis=0)
    within = np.arange(len(expanded)) - np.repeat(np.cumsum(counts) - counts, counts)
    expanded[:, 3] = units.student_ids[np.repeat(starts, counts) + within]
    return expanded


def _joined(*parts: np.typing.NDArray[np.int64]) -> Readings:
    rows = np.concatenate(parts)
    columns = torch.tensor(rows[np.argsort(rows[:, 0], kind="stable")]).T.contiguous()
    return Readings(*columns)


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _add_place(
    lists: _Lists,
    boundary: _Boundary,
    teacher_rows: _TeacherRows,
    units: SharedUnits,
    offset: int,
    mass_floor: float,
) -> None:
    cells = _Cells(units, boundary)
    opinion = _teacher_opinion(boundary.teacher, teacher_rows, cells)
    if not opinion.events:
        return
    columns = {cell: column for column, cell in enumerate(opinion.events)}
    _list_student(lists, boundary.student, cells, columns, offset)
    own, covering = boundary.student.own, boundary.student.covering
    slot = own if own is not None else covering
    assert slot is not None
    lists.first_slots.append(offset + boundary.student.rows[0])
    lists.events.append(list(opinion.events.values()))
    lists.rests.append(opinion.rest)
    lists.path_masses.append(opinion.path_mass)
    lists.weights.append(min(1.0, opinion.path_mass / mass_floor) if mass_floor else 1.0)
    lists.slots.append(offset + slot)


def _list_student(
    lists: _Lists,
    standing: _Standing,
    cells: _Cells,
    columns: dict[int, int],
    offset: int,
) -> None:
    written, place, first = standing.written, lists.place, standing.rows[0]
    paths = {row: lists.path(written, first, row, offset) for row in standing.rows}
    members = {cell: cells.members(cell) for cell in columns}
    if standing.own is not None:
        slot, path = offset + standing.own, paths[standing.own]
        lists.known.add(place, 0, slot, [_WHOLE_ROW], path)
        for cell, column in columns.items():
            lists.rooted.add(place, column, slot, members[cell], path)
    for crossed in standing.crossed:
        slot, path = offset + crossed.row, paths[crossed.row]
        lists.known.add(place, 0, slot, crossed.all_ids(), path)
        for cell, column in columns.items():
            for unit in members[cell]:
                lists.named.add(place, column, slot, crossed.ids_of(unit), path)
        if crossed.row == standing.covering:
            ending = written.side.spelling.ids.get(crossed.text, [])
            lists.known.add(place, 0, slot, ending, path)
