"""What prefix KL compares, one boundary, one row, one token and one unit at a time.

Between ``tests.reference.prefix_kl``, which looks nothing up and is for vocabularies of a few
hundred tokens, and the fast preparation: this one has published vocabularies in reach. It shares
``SharedUnits`` (roots, and what crosses a text) and ``Spelling`` with the fast one, and none of
what is arranged around them.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from mopd_losses.core.loss import AlignedPair
from mopd_losses.prefix.shared_units import NO_UNIT, Crossings, SharedUnits, SideUnits
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

WHOLE = -1

#: Slot, id, and the student's own tokens on the way from the first open position to this one.
Reading = tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """One boundary."""

    position: int
    first_position: int
    events: list[tuple[frozenset[Reading], float]]  # what is read of the student, and nats
    rest: float
    path_mass: float
    known: frozenset[Reading]


@dataclass(frozen=True, eq=False)
class Side:
    """One side's tokens."""

    units: SideUnits
    ids: list[int]
    starts: list[int]
    ends: list[int]
    symbols: str

    def own(self, at: int) -> int | None:
        """The last row that starts at a boundary."""
        found = [row for row, start in enumerate(self.starts) if start == at]
        return found[-1] if found else None

    def cut(self, at: int) -> int | None:
        """The row whose token is cut by a boundary; a control token that was sent as text is not,
        for no other token says a part of it."""
        found = [r for r, start in enumerate(self.starts) if start < at < self.ends[r]]
        return found[0] if found and self.spells(found[0]) else None

    def spells(self, row: int) -> bool:
        """Whether a row's token is no control token."""
        return self.units.spelling.tokens[self.ids[row]] != ""


Row = tuple[int, Crossings]


def places(comparison: AlignedPair, units: SharedUnits) -> list[Place]:
    """All places of one completion."""
    names: dict[str, str] = {}
    student = _side(units.student, comparison.student, names)
    teacher = _side(units.teacher, comparison.score.completion, names)
    found: list[Place] = []
    readable = [
        at
        for at in sorted({*student.starts, *teacher.starts})
        if student.symbols[:at] == teacher.symbols[:at]
        and all(side.own(at) is not None or side.cut(at) is not None for side in (student, teacher))
    ]
    common = [at for at in readable if all(s.own(at) is not None for s in (student, teacher))]
    for at in readable:
        if at in common[1:]:
            first = common[common.index(at) - 1]
            following = readable[readable.index(first) + 1]
            span = _span(student, teacher, (first, following, at), comparison.score.topk, units)
            found += [span] if span else []
        place = _place(student, teacher, at, comparison.score.topk, units)
        found += [place] if place else []
    return found


def _span(
    student: Side,
    teacher: Side,
    at: tuple[int, int, int],
    topk: TopKLogprobs,
    units: SharedUnits,
) -> Place | None:
    """The way from the first position to the last, if a unit does not tell as much as is written
    before the second one, the next boundary."""
    first, following, last = at
    sides = (student, teacher)
    if not all(s.spells(r) for s in sides for r in range(_own(s, first), _own(s, last))):
        return None
    here = [_crossed(s, o, first, units) for s, o in (sides, sides[::-1])]
    unit = int(student.units.units[student.ids[_own(student, first)]])
    cell = _cell(unit, [crossings for rows in here for _, crossings in rows], [], units)
    if cell != NO_UNIT and first + len(units.texts[cell]) >= following:
        return None
    behind = [_crossed(s, o, last, units) for s, o in (sides, sides[::-1])]

    # The teacher, in nats.
    entries = [nats for _, nats in _teacher_entries(teacher, here[1], first, topk)]
    everything = _logsumexp(entries) if here[1] else 0.0
    begin = min([*(row for row, _ in here[1]), _own(teacher, first)])
    terms = [math.fsum(topk.token_logprobs[begin : _own(teacher, last)].tolist())]
    for row, token_id in _through(teacher, here[1], behind[1], first, last):
        path = math.fsum(topk.token_logprobs[begin:row].tolist())
        told = zip(topk.ids[row].tolist(), topk.logprobs[row].tolist(), strict=True)
        terms += [path + nats for other, nats in told if other == token_id]
    nats = _logsumexp(terms)

    # What is read of the student.
    begin = min([*(row for row, _ in here[0]), _own(student, first)])
    end = _own(student, last) - 1

    def reading(row: int, token_id: int) -> Reading:
        return row, token_id, tuple(student.ids[begin:row])

    read = {reading(*way) for way in _through(student, here[0], behind[0], first, last)}
    known = {reading(row, i) for row, i in _student_known(student, here[0], first)}
    return Place(
        position=end,
        first_position=begin,
        events=[(frozenset({*read, reading(end, student.ids[end])}), nats)],
        rest=everything + math.log(1 - math.exp(nats - everything)),
        path_mass=min(1.0, math.exp(everything)),
        known=frozenset(known),
    )


def _own(side: Side, at: int) -> int:
    found = side.own(at)
    assert found is not None
    return found


def _through(
    side: Side, here: Sequence[Row], behind: Sequence[Row], first: int, last: int
) -> Iterator[tuple[int, int]]:
    """(row, id) of tokens that say the text from one position to another, and go on behind it or,
    begun before it, end there."""
    later = dict(behind)
    for row, crossings in behind:
        if side.starts[row] >= first:
            yield from ((row, token_id) for token_id in crossings.unit_of)
    for row, crossings in here:
        for token_id in crossings.unit_of:
            said = side.units.spelling.tokens[token_id][first - side.starts[row] :]
            goes_on = row in later and token_id in later[row].unit_of
            if goes_on or said == side.symbols[first:last]:
                yield row, token_id


def _side(units: SideUnits, sequence: TokenSequence, names: dict[str, str]) -> Side:
    pieces: list[str] = []
    for position, token_id in enumerate(sequence.token_ids.tolist()):
        mark = sequence.marks.get(position)
        spelled = units.spelling.tokens[token_id]
        start = int(sequence.byte_ends[position - 1]) if position else 0
        text = sequence.text[start : int(sequence.byte_ends[position])].decode("latin-1")
        assert text == spelled or not spelled  # control tokens may be sent as text
        pieces.append(text if mark is None else names.setdefault(mark, chr(256 + len(names))))
    ends = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces))]
    starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    return Side(units, sequence.token_ids.tolist(), starts, ends, "".join(pieces))


def _crossed(side: Side, other: Side, at: int, units: SharedUnits) -> list[Row]:
    """Rows that start before a boundary and say what follows it, nearest first."""
    longest = max(map(len, side.units.ordered), default=0)
    found: list[Row] = []
    for row, start in reversed([*enumerate(side.starts)]):
        if not start < at <= start + longest or side.ends[row] == start:
            continue
        begun = other.starts[bisect_left(other.starts, start + 1) - 1]
        before, context = side.symbols[start:at], other.symbols[begun:start]
        if not side.spells(row):
            continue
        written = side.ids[row] if at < side.ends[row] else None
        crossings = units.crossings(side.units, before, context, written)
        found += [(row, crossings)] if crossings else []
    return found


def _place(
    student: Side, teacher: Side, at: int, topk: TopKLogprobs, units: SharedUnits
) -> Place | None:
    ours, theirs = _crossed(student, teacher, at, units), _crossed(teacher, student, at, units)
    crossed = [crossings for _, crossings in (*ours, *theirs)]
    cuts = [
        (s, r[0][1].before)
        for s, r in ((student, ours), (teacher, theirs))
        if s.cut(at) is not None
    ]

    @cache
    def cell(unit: int) -> int:
        return _cell(unit, crossed, cuts, units)

    entries = list(_teacher_entries(teacher, theirs, at, topk))
    cells: dict[int, list[float]] = {}
    for unit, nats in entries:
        cells.setdefault(cell(unit), []).append(nats)
    rest = _logsumexp(cells.pop(NO_UNIT, []))
    if not cells:
        return None
    alone = teacher.own(at) is not None and not theirs
    everything = _logsumexp([nats for _, nats in entries])
    rows = sorted({*(row for row, _ in ours), *_here(student, at)})

    def reading(row: int, token_id: int) -> Reading:
        return row, token_id, tuple(student.ids[rows[0] : row])

    said = {unit for crossings in crossed for unit in crossings.unit_of.values()}
    events: list[tuple[frozenset[Reading], float]] = []
    for named, nats in cells.items():
        longer = units.extensions(named) if named in said else None
        members = {
            named,
            *(u for u in ([] if longer is None else longer.tolist()) if cell(u) == named),
        }
        read = {
            reading(row, token_id)
            for row, crossings in ours
            for token_id, unit in crossings.unit_of.items()
            if unit in members
        }
        own = student.own(at)
        if own is not None:
            for unit in members:
                ids = units.student_ids[units.starts[unit] : units.starts[unit + 1]]
                read |= {reading(own, token_id) for token_id in ids.tolist()}
        events.append((frozenset(read), _logsumexp(nats)))
    return Place(
        position=rows[-1],
        first_position=rows[0],
        events=events,
        rest=rest,
        path_mass=1.0 if alone else min(1.0, math.exp(everything)),
        known=frozenset(reading(row, i) for row, i in _student_known(student, ours, at)),
    )


def _here(side: Side, at: int) -> list[int]:
    own, cut = side.own(at), side.cut(at)
    return [row for row in (own, cut) if row is not None][:1]


def _teacher_entries(
    teacher: Side, crossed: Sequence[Row], at: int, topk: TopKLogprobs
) -> Iterator[tuple[int, float]]:
    """(unit, nats) of all that the teacher says, and its tail."""
    own, cut = teacher.own(at), teacher.cut(at)
    first = min([*(row for row, _ in crossed), *_here(teacher, at)])
    for row, crossings in (*crossed, *([(own, None)] if own is not None else [])):
        path = math.fsum(topk.token_logprobs[first:row].tolist())
        entries = zip(topk.ids[row].tolist(), topk.logprobs[row].tolist(), strict=True)
        masses = {token_id: nats for token_id, nats in entries if nats > -math.inf}
        if crossings is None:
            yield NO_UNIT, path + float(topk.tail_logprobs[row])
        if row == cut:
            masses[teacher.ids[row]] = float(topk.token_logprobs[row])
        for token_id, nats in masses.items():
            if crossings is None:
                yield int(teacher.units.units[token_id]), path + nats
            elif token_id in crossings.unit_of:
                yield crossings.unit_of[token_id], path + nats
            elif row == cut and teacher.units.spelling.tokens[token_id] == crossings.before:
                yield NO_UNIT, path + nats


def _student_known(student: Side, crossed: Sequence[Row], at: int) -> Iterator[tuple[int, int]]:
    """(row, id) of all that is known of the student at a boundary."""
    own, cut = student.own(at), student.cut(at)
    if own is not None:
        yield own, WHOLE
    for row, crossings in crossed:
        yield from ((row, token_id) for token_id in crossings.unit_of)
        if row == cut:
            ending = student.units.spelling.ids.get(crossings.before, ())
            yield from ((row, token_id) for token_id in ending)


def _cell(
    unit: int, crossed: Sequence[Crossings], cuts: Sequence[tuple[Side, str]], units: SharedUnits
) -> int:
    """Where a unit is counted."""
    if not crossed or unit == NO_UNIT:
        return unit
    text = units.texts[unit]
    for crossings in crossed:
        before, said = crossings.before, crossings.root_of
        if any(text[:end] in said for end in range(1, len(text))):
            pieces = crossings.side.spelling.pieces(before + text)
            first = pieces[0][len(before) :] if pieces and len(pieces[0]) > len(before) else ""
            if first in said and len(first) < len(text):
                return _cell(said[first], crossed, cuts, units)
    is_said = any(unit in crossings.ids_by_unit for crossings in crossed)
    if is_said and units.extensions(unit) is None:
        return NO_UNIT
    for side, before in cuts:
        pieces = side.units.spelling.pieces(before + text)
        if not text or not pieces or len(pieces[0]) <= len(before):
            return NO_UNIT
    return unit


def _logsumexp(terms: Sequence[float]) -> float:
    highest = max(terms, default=-math.inf)
    if highest == -math.inf:
        return highest
    return highest + math.log(math.fsum(math.exp(term - highest) for term in terms))
