"""Prefix KL by its definition: strings, dictionaries and loops, float64.

A token is its string: a Latin-1 character a byte, one private character for a control token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from mopd_losses.divergences.truncation import TAIL_MARGIN, TEACHER_TAIL_FLOOR
from mopd_losses.prefix.cells import NAMING_SHARE
from mopd_losses.prefix.cuts import CONTINUATIONS


@dataclass(frozen=True, eq=False)
class Side:
    """One model on one text."""

    tokens: Mapping[int, str]  # every id that spells anything
    realised: Sequence[int]
    rows: Sequence[Mapping[int, float]]  # id -> probability, of the ids that are known
    realised_probabilities: Sequence[float]
    encode: Callable[[str], list[str]]  # a text without control tokens -> its token strings
    block: int = 0  # rows that start before it were conditioned on another text

    @cached_property
    def text(self) -> str:
        return "".join(self.tokens[token] for token in self.realised)

    @cached_property
    def starts(self) -> list[int]:
        lengths = [len(self.tokens[token]) for token in self.realised]
        return list(accumulate(lengths, initial=0))[:-1]

    def end(self, row: int) -> int:
        return self.starts[row] + len(self.tokens[self.realised[row]])

    def covering(self, at: int) -> int | None:
        """The row whose token begins at a byte or covers it."""
        rows = enumerate(self.starts)
        return next((r for r, s in rows if self.block <= s <= at < self.end(r)), None)

    def known(self, row: int) -> dict[int, float]:
        """The probabilities of a row, the realised token's among them."""
        return {self.realised[row]: self.realised_probabilities[row], **self.rows[row]}


@dataclass(frozen=True)
class Boundary:
    """A boundary with both distributions on (cells, rest)."""

    at: int
    position: int  # the student's last open row
    student: dict[str, float]
    teacher: dict[str, float]
    teacher_rest: float
    teacher_mass: float  # of the text since the teacher's first open row


def common_blocks(first: str, second: str) -> list[tuple[int, int, int]]:
    """(start in the first, start in the second, length) of the common beginning and the common end:
    all common blocks of short texts."""
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    beginning = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    end = 0
    while end < shorter - beginning and first[-1 - end] == second[-1 - end]:
        end += 1
    blocks = [(0, 0, beginning), (len(first) - end, len(second) - end, end)]
    return [block for block in blocks if block[2]]


def boundaries(student: Side, teacher: Side) -> list[Boundary]:
    """All boundaries of both texts."""
    results: list[Boundary] = []
    for first, second, length in common_blocks(student.text, teacher.text):
        starts = {start - first for start in student.starts}
        starts |= {start - second for start in teacher.starts}
        sides = replace(student, block=first), replace(teacher, block=second)
        for at in sorted(start for start in starts if 0 <= start < length):
            boundary = compare(*sides, first + at, second + at, first + length)
            results += [boundary] if boundary else []
    return results


def compare(student: Side, teacher: Side, at: int, teacher_at: int, stop: int) -> Boundary | None:
    """One boundary; None if a side's distribution there was conditioned on other text."""
    row, teacher_row = student.covering(at), teacher.covering(teacher_at)
    if row is None or teacher_row is None:
        return None
    ends = student.end(row), teacher.end(teacher_row) - teacher_at + at, stop
    cells = named_cells(student, teacher, at, teacher_at, student.text[at : min(ends)])
    shares = {c: continuation(teacher, teacher_at, c, top_k_only) for c in cells}
    return Boundary(
        at=at,
        position=row,
        student={c: continuation(student, at, c, None) for c in cells},
        teacher=shares,
        teacher_rest=1 - math.fsum(shares.values()),
        teacher_mass=min(1.0, open_mass(teacher, teacher_at, top_k_only)),
    )


Vocabulary = Callable[[Side, int], "set[int]"]


def top_k_only(side: Side, row: int) -> set[int]:
    """The ids in a truncated row."""
    return set(side.known(row))


def open_rows(side: Side, at: int, known: Vocabulary | None) -> list[int]:
    """Rows that determine what follows a byte; of a truncated side, by what its rows know."""
    results: list[int] = []
    for row, start in enumerate(side.starts):
        begun = side.text[start:at]
        ids = side.tokens.keys() if known is None else known(side, row) & side.tokens.keys()
        continues = any(
            side.tokens[i].startswith(begun) and len(side.tokens[i]) > len(begun) for i in ids
        )
        if side.block <= start <= at and (row == side.covering(at) or (start < at and continues)):
            results.append(row)
    return results


def path(side: Side, at: int, row: int, known: Vocabulary | None) -> float:
    """The probability of the realised tokens from the first open row up to this one."""
    return math.prod(side.realised_probabilities[open_rows(side, at, known)[0] : row])


def token_mass(side: Side, row: int, accepts: Callable[[str], bool]) -> float:
    known = side.known(row).items()
    return math.fsum(p for i, p in known if i in side.tokens and accepts(side.tokens[i]))


def open_mass(side: Side, at: int, known: Vocabulary | None) -> float:
    """The mass of the text since the first open row, and of anything that may follow."""
    total = 0.0
    for row in open_rows(side, at, known):
        begun = side.text[side.starts[row] : at]
        covers = row == side.covering(at)

        def counts(token: str, begun: str = begun, covers: bool = covers) -> bool:
            return token.startswith(begun) and (covers or token != begun)

        mass = 1.0 if not begun else token_mass(side, row, counts)
        total += path(side, at, row, known) * mass
    return total


def continuation(side: Side, at: int, cell: str, known: Vocabulary | None) -> float:
    """The probability that the text continues with a string, given the text so far."""
    total = 0.0
    for row in open_rows(side, at, known):
        prefix = side.text[side.starts[row] : at] + cell
        mass = token_mass(side, row, lambda token, prefix=prefix: token.startswith(prefix))
        total += path(side, at, row, known) * mass
    return total / open_mass(side, at, known)


def named_cells(student: Side, teacher: Side, at: int, teacher_at: int, realised: str) -> list[str]:
    """Prefix-free strings: the realised text, and the teacher's candidates as far as one token of
    the student decides them."""
    covering = student.covering(at)
    assert covering is not None
    begun = student.text[student.starts[covering] : at]
    whole = open_mass(teacher, teacher_at, top_k_only)
    named = {realised}
    for row in open_rows(teacher, teacher_at, top_k_only):
        crossed = teacher.text[teacher.starts[row] : teacher_at]
        for token, probability in teacher.known(row).items():
            text = teacher.tokens.get(token, "")
            if not text.startswith(crossed) or len(text) == len(crossed):
                continue
            if path(teacher, teacher_at, row, top_k_only) * probability >= NAMING_SHARE * whole:
                candidate = text[len(crossed) :]
                covered = any(t.startswith(begun + candidate) for t in student.tokens.values())
                if covered and not candidate.startswith(student.text[at : student.end(covering)]):
                    named.add(candidate)
                else:
                    named.add(candidate[: cut(student, begun, candidate)])
    named.discard("")
    return [c for c in sorted(named) if not any(c.startswith(o) and c != o for o in named)]


def cut(student: Side, begun: str, candidate: str) -> int:
    """Characters of a candidate up to the end of the student's first token beyond ``begun``."""
    whole = begun + candidate
    lengths = [len(candidate) for token in student.tokens.values() if token.startswith(whole)][:1]
    for after in CONTINUATIONS if ord(candidate[-1]) < 256 else ():
        try:
            whole.encode("latin-1").decode()
        except UnicodeDecodeError:
            continue
        first = student.encode(whole + after)[0]
        if len(first) > len(begun) and (first.startswith(whole) or whole.startswith(first)):
            lengths.append(min(len(first) - len(begun), len(candidate)))
    return min(lengths, default=0)


def value(boundary: Boundary, divergence: str, teacher_weight: float = 0.5) -> float:
    """Nats on (cells, rest)."""
    student = [*boundary.student.values()]
    student.append(max(1 - math.fsum(student), TAIL_MARGIN))
    reachable = [c for c, p in boundary.student.items() if p > 0]
    teacher = [boundary.teacher[c] if c in reachable else 0.0 for c in boundary.teacher]
    teacher.append(1 - math.fsum(teacher))
    if not reachable:
        return 0.0
    if divergence == "forward_kl":
        return _kl(teacher, student)
    if divergence == "reverse_kl":
        return _kl(student, [*teacher[:-1], max(teacher[-1], TEACHER_TAIL_FLOOR)])
    share = teacher_weight
    mixture = [share * t + (1 - share) * s for t, s in zip(teacher, student, strict=True)]
    return share * _kl(teacher, mixture) + (1 - share) * _kl(student, mixture)


def per_token(student: Side, teacher: Side, divergence: str, mass_floor: float) -> list[float]:
    """Nats at each of the student's tokens."""
    results = [0.0] * len(student.realised)
    for boundary in boundaries(student, teacher):
        weight = min(1.0, boundary.teacher_mass / mass_floor) if mass_floor else 1.0
        results[boundary.position] += weight * value(boundary, divergence)
    return results


def _kl(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(first, second, strict=True) if a > 0)
