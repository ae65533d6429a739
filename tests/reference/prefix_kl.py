"""Prefix KL from its definition: every boundary, every row, every token, one at a time.

Strings hold one character a byte; a control token is one character that spells nothing else, and
has one name on both sides. Nothing is looked up: whatever a side might say is enumerated, and where
a unit is counted is found by asking how each side would write it. Probabilities, not logs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

#: A token's spelling when a side ended a token at the boundary: what it says then is not known.
ENDED = None

MARGIN = 1e-6
TEACHER_REST_FLOOR = 1e-4


@dataclass(frozen=True, eq=False)
class Side:
    """One model on one completion."""

    spell: Callable[[str], Sequence[str]]  # canonical tokenization
    tokens: Mapping[int, str]
    written: Sequence[int]  # the tokens of the completion
    rows: Sequence[Mapping[int, float]]  # row r: id -> probability, of what is known
    written_probabilities: Sequence[float]
    tails: Sequence[float]  # mass of a row outside its ids

    @cached_property
    def text(self) -> str:
        return "".join(self.tokens[token] for token in self.written)

    @cached_property
    def starts(self) -> list[int]:
        lengths = [len(self.tokens[token]) for token in self.written]
        return [sum(lengths[:at]) for at in range(len(lengths))]

    def end(self, row: int) -> int:
        return self.starts[row] + len(self.tokens[self.written[row]])


@dataclass(frozen=True)
class Place:
    """Both sides on (named units, rest) at one boundary."""

    at: int
    position: int
    teacher: dict[str, float]  # sums to one with its rest
    teacher_rest: float
    student: dict[str, float]
    path_mass: float  # the teacher's, from its first open row


def ends_of(pieces: Sequence[str]) -> set[int]:
    """Where pieces end, counted from the start of the first."""
    return {sum(map(len, pieces[: n + 1])) for n in range(len(pieces))}


def covering_row(side: Side, at: int) -> int | None:
    """The row whose token reaches over ``at``."""
    found = [r for r, start in enumerate(side.starts) if start < at < side.end(r)]
    return found[0] if found else None


@cache
def crossing(side: Side, other: Side, row: int, at: int) -> dict[int, str]:
    """Token -> what it says after ``at``, of tokens that the other side cuts there."""
    start = side.starts[row]
    before = side.text[start:at]
    context = other.text[max(s for s in other.starts if s <= start) : start]
    found = {}
    for token, spelled in side.tokens.items():
        if spelled.startswith(before) and len(spelled) > len(before):
            pieces = other.spell(context + spelled)
            really_there = row == covering_row(side, at) and token == side.written[row]
            if len(context + before) in ends_of(pieces) or really_there:
                found[token] = spelled[len(before) :]
    return found


@cache
def shared(student: Side, teacher: Side) -> set[str]:
    """What both sides have a token for."""
    return {*student.tokens.values()} & {*teacher.tokens.values()}


@cache
def root(said: str, student: Side, teacher: Side) -> str | None:
    """The first piece in the other side's spelling, alternately, until a token of both."""
    both = shared(student, teacher)
    while said not in both:
        shorter = student.spell(teacher.spell(said)[0])[0]
        if shorter == said:
            return None
        said = shorter
    return said


def rows_open_at(side: Side, other: Side, at: int) -> list[int]:
    """The rows that say what comes next."""
    starts = side.starts
    open_rows = [r for r, s in enumerate(starts) if s < at and crossing(side, other, r, at)]
    covering = covering_row(side, at)
    if at in starts:
        open_rows.append(starts.index(at))
    elif covering not in open_rows:
        assert covering is not None
        open_rows.append(covering)
    return open_rows


def opinion(side: Side, other: Side, at: int) -> tuple[list[tuple[float, int, str | None]], float]:
    """(mass, row, what is said after the boundary or ``ENDED``) from the first open row; tail."""
    starts = side.starts
    open_rows, covering = rows_open_at(side, other, at), covering_row(side, at)
    found: list[tuple[float, int, str | None]] = []
    tail = 0.0
    for row in open_rows:
        path = math.prod(side.written_probabilities[min(open_rows) : row])
        known = dict(side.rows[row])
        if starts[row] == at:
            tail = path * side.tails[row]
            found += [(path * p, row, side.tokens[token]) for token, p in known.items()]
            continue
        if row == covering:
            known[side.written[row]] = side.written_probabilities[row]
        says = crossing(side, other, row, at)
        found += [(path * known[t], row, said) for t, said in says.items() if t in known]
        if row == covering:
            before = side.text[starts[row] : at]
            found += [(path * p, row, ENDED) for t, p in known.items() if side.tokens[t] == before]
    return found, tail


@cache
def cell_of(unit: str | None, student: Side, teacher: Side, at: int) -> str | None:
    """Where a unit is counted, or None for the rest."""
    for side, other in ((student, teacher), (teacher, student)):
        for row, start in enumerate(side.starts):
            if unit is None or start >= at:
                continue
            before = side.text[start:at]
            first = side.spell(before + unit)[0]
            says = crossing(side, other, row, at).values()
            if first[len(before) :] in says and len(before) < len(first) < len(before + unit):
                return cell_of(root(first[len(before) :], student, teacher), student, teacher, at)
    for side in (student, teacher):
        covering = covering_row(side, at)
        if covering is not None and unit is not None:
            before = side.text[side.starts[covering] : at]
            if len(side.spell(before + unit)[0]) <= len(before):
                return None
    return unit


def places(student: Side, teacher: Side) -> list[Place]:
    """Both opinions at every boundary of either side."""
    common = 0
    while student.text[:common] == teacher.text[:common] and common <= len(student.text):
        common += 1
    found: list[Place] = []
    for at in sorted({*student.starts, *teacher.starts}):
        sides = (student, teacher)
        if at >= common or any(
            at not in side.starts and covering_row(side, at) is None for side in sides
        ):
            continue
        told, tail = opinion(teacher, student, at)
        named: dict[str, float] = {}
        rest = tail
        for mass, _, said in told:
            unit = None if said is ENDED else root(said, student, teacher)
            cell = cell_of(unit, student, teacher, at)
            if cell is None:
                rest += mass
            else:
                named[cell] = named.get(cell, 0.0) + mass
        if not named:
            continue
        everything = math.fsum([*named.values(), rest])
        ours = student_masses(student, teacher, at, [*named])
        # What the student has no way to say here is not compared.
        rest += math.fsum(named.pop(cell) for cell, mass in ours.items() if mass == 0)
        if not named:
            continue
        only_own = at in teacher.starts and not any(
            crossing(teacher, student, r, at) for r, s in enumerate(teacher.starts) if s < at
        )
        starts = student.starts
        covering = covering_row(student, at)
        found.append(
            Place(
                at=at,
                position=starts.index(at) if covering is None else covering,
                teacher={cell: mass / everything for cell, mass in named.items()},
                teacher_rest=rest / everything,
                student={cell: ours[cell] for cell in named},
                path_mass=1.0 if only_own else min(1.0, everything),
            )
        )
    return found


def spans(student: Side, teacher: Side) -> list[Place]:
    """The span from one boundary of both sides to the next, where no unit tells how it begins.

    Places at the end of a span; what is named is the span's text.
    """
    common = [at for at in student.starts if at in teacher.starts]
    either = sorted({*student.starts, *teacher.starts})
    found: list[Place] = []
    for first, last in pairwise(common):
        text = student.text[first:last]
        if teacher.text[:last] != student.text[:last]:
            break
        if any(is_control(character) for character in text):
            continue
        written = student.tokens[student.written[student.starts.index(first)]]
        cell = cell_of(root(written, student, teacher), student, teacher, first)
        following = either[either.index(first) + 1]
        if cell is not None and first + len(cell) >= following:
            continue
        ours, theirs = (
            span_mass(side, other, first, last)
            for side, other in ((student, teacher), (teacher, student))
        )
        if ours == 0 or theirs == 0:
            continue
        told, tail = opinion(teacher, student, first)
        only_own = not any(
            crossing(teacher, student, r, first) for r, s in enumerate(teacher.starts) if s < first
        )
        everything = math.fsum([tail, *(mass for mass, _, _ in told)])
        found.append(
            Place(
                at=last,
                position=student.starts.index(last) - 1,
                teacher={text: theirs},
                teacher_rest=1 - theirs,
                student={text: ours},
                path_mass=1.0 if only_own else min(1.0, everything),
            )
        )
    return found


def is_control(character: str) -> bool:
    """Bytes are Latin-1."""
    return ord(character) > 255


def span_mass(side: Side, other: Side, first: int, last: int) -> float:
    """A side's probability that the text goes on from one boundary to another of its own, and that
    either side has one there, given that either has one at the first."""
    text, starts = side.text, side.starts
    told, tail = opinion(side, other, first)
    everything = math.fsum([tail, *(mass for mass, _, _ in told)])
    first_open = min(rows_open_at(side, other, first))

    def path(row: int) -> float:
        return math.prod(side.written_probabilities[first_open:row])

    mass = path(starts.index(last))
    for row in range(first_open, starts.index(last)):
        ending = text[starts[row] : last]
        behind = crossing(side, other, row, last)
        for token, probability in side.rows[row].items():
            reaches = token in behind
            if starts[row] < first:  # or it ends there, having crossed where the span begins
                reaches = reaches or side.tokens[token] == ending
                reaches = reaches and token in crossing(side, other, row, first)
            mass += path(row) * probability if reaches else 0.0
    return mass / everything


def student_masses(student: Side, teacher: Side, at: int, cells: list[str]) -> dict[str, float]:
    """The student's probability of each cell, given the text so far."""
    told, _ = opinion(student, teacher, at)
    everything = math.fsum(mass for mass, _, _ in told)
    found = dict.fromkeys(cells, 0.0)
    for mass, _, said in told:
        unit = None if said is ENDED else root(said, student, teacher)
        cell = cell_of(unit, student, teacher, at)
        if cell is not None and cell in found:
            found[cell] += mass / everything
    return found


def value(place: Place, divergence: str, teacher_weight: float = 0.5) -> float:
    """Nats on (named units, rest)."""
    rest = max(1 - math.fsum(place.student.values()), MARGIN)
    ours = [*place.student.values(), rest]
    theirs = [*place.teacher.values(), place.teacher_rest]
    if divergence == "forward_kl":
        return _kl(theirs, ours)
    if divergence == "reverse_kl":
        return _kl(ours, [*theirs[:-1], max(theirs[-1], TEACHER_REST_FLOOR)])
    mixture = [
        teacher_weight * t + (1 - teacher_weight) * p for t, p in zip(theirs, ours, strict=True)
    ]
    return teacher_weight * _kl(theirs, mixture) + (1 - teacher_weight) * _kl(ours, mixture)


def per_token(
    student: Side, teacher: Side, divergence: str, mass_floor: float, teacher_weight: float = 0.5
) -> list[float]:
    """Nats on each of the student's tokens."""
    found = [0.0] * len(student.written)
    for place in (*places(student, teacher), *spans(student, teacher)):
        weight = min(1.0, place.path_mass / mass_floor) if mass_floor else 1.0
        found[place.position] += weight * value(place, divergence, teacher_weight)
    return found


def _kl(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)


def neglected_mass(
    side: Side,
    other: Side,
    student: Side,
    teacher: Side,
    at: int,
    writings: Sequence[tuple[float, Sequence[str]]],
    truth: Callable[[str], str | None],
) -> float:
    """Share of the texts that go on from ``at`` whose event one side does not tell rightly.

    Args:
        writings: (mass, the side's tokens) of each text that shares the beginning and has a
            boundary at ``at`` on either side.
        truth: the event of a text.
    """
    wrong = 0.0
    for mass, tokens in writings:
        row, start = 0, 0
        while start < at and tokens[row] == side.tokens[side.written[row]]:
            start += len(tokens[row])
            row += 1
        event = truth("".join(tokens))
        says: str | None
        if start >= at:  # the side wrote what is written; what comes next it says in its own row
            says = tokens[row] if start == at else tokens[row - 1][at - start :]
        else:
            before = side.text[start:at]
            crosses = {side.tokens[token] for token in crossing(side, other, row, at)}
            if tokens[row] in crosses:
                says = tokens[row][len(before) :]
            elif tokens[row] == before and row == covering_row(side, at):
                says = ENDED
            else:
                wrong += mass
                continue
        unit = None if says is ENDED else root(says, student, teacher)
        if cell_of(unit, student, teacher, at) != event:
            wrong += mass
    return wrong / math.fsum(mass for mass, _ in writings)
