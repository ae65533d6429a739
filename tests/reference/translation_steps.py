"""Slow forms of two steps of translation: text by text, and mass by mass."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mopd_losses.translation.first_tokens import ANY, INCOMPATIBLE, NO_TOKEN

Encode = Callable[[str], Sequence[int]]


def first_tokens(
    trials: Sequence[tuple[str, str]],
    student: Encode,
    teacher: Encode,
    before: tuple[int, ...],
    teacher_ids: tuple[int, ...],
) -> set[int]:
    """Return the student's tokens behind the ones before, in texts that the teacher divides as it
    did; in all if it divides none so. Any token is possible if there is no text.

    Args:
        trials: texts of both sides with the same continuation.
    """
    same = [own for own, other in trials if begins(teacher(other), teacher_ids)]
    result: set[int] = set()
    for text in same or [own for own, _ in trials]:
        ids = student(text)
        behind = ids[len(before)] if len(ids) > len(before) else ANY
        result.add(behind if begins(ids, before) else INCOMPATIBLE)
    return result or {ANY}


def begins(ids: Sequence[int], first: tuple[int, ...]) -> bool:
    """Return whether tokens begin with others."""
    return tuple(ids[: len(first)]) == first


@dataclass(frozen=True)
class PositionMasses:
    """Masses of the texts that a teacher may generate at one position."""

    event: int
    reached: float
    certain: Sequence[tuple[int, float]]  # token and mass
    undecided: Sequence[tuple[frozenset[int] | None, float]]  # None for text before the position

    @property
    def masses(self) -> Mapping[int, float]:
        """Token -> mass."""
        masses: defaultdict[int, float] = defaultdict(float)
        for token, mass in self.certain:
            masses[token] += mass
        return masses

    @property
    def total(self) -> float:
        """Mass of all that may follow the student's tokens."""
        return self.reached - self.masses.get(INCOMPATIBLE, 0.0)

    def named(self, tolerance: float) -> dict[int, float]:
        """Token -> probability, of those whose error is within a tolerance."""
        if self.total <= 0:
            return {}
        unknown = sum(m for tokens, m in self.undecided if tokens is None or INCOMPATIBLE in tokens)
        named: dict[int, float] = {}
        for token, mass in self.masses.items():
            share = mass / self.total
            own = sum(m for tokens, m in self.undecided if tokens and {token, ANY} & tokens)
            both = sum(m for tokens, m in self.undecided if tokens and {token, ANY} <= tokens)
            if token >= 0 and (own + both + share * unknown) / self.total <= tolerance:
                named[token] = min(share, 1.0)
        return named

    @property
    def realised(self) -> float:
        """Probability of the realised token, with text that may begin with it or not."""
        undecided = sum(m for tokens, m in self.undecided if tokens and self.event in tokens)
        mass = self.masses.get(self.event, 0.0) + undecided
        return min(mass / self.total, 1.0) if self.total > 0 else 0.0

    def lost(self, named: Mapping[int, float]) -> bool:
        """Return whether text without a name is likelier than each token with one."""
        nameless = sum(m for tokens, m in self.undecided if tokens)
        nameless += self.masses.get(NO_TOKEN, 0.0)
        return nameless > max(named.values(), default=0.0) * self.total
