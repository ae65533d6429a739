"""``Branch``: text that a teacher may write at a position of the student, and its probability."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mopd_losses.translation.first_tokens import ANY, INCOMPATIBLE, NO_TOKEN
from mopd_losses.translation.scored_text import ScoredText
from mopd_losses.translation.translation import ExtraRow


@dataclass(eq=False)
class Branch:
    """A beginning of the teacher's tokens, and the text that it spells at a student's position."""

    position: "Position"
    row: int  # the tokens before it are the realised ones
    ids: tuple[int, ...]  # behind these
    text: str  # from the position on; empty if the tokens end at or before it
    missing: str  # text between the end of the tokens and the position
    mass: float
    tokens: frozenset[int] = frozenset()  # that the student may write first

    @property
    def token(self) -> int | None:
        """The student's first token, or ``NO_TOKEN``, if it is certain."""
        if len(self.tokens) != 1 or ANY in self.tokens:
            return None
        return next(iter(self.tokens))

    @property
    def extra_row(self) -> ExtraRow:
        """The row behind its tokens."""
        return ExtraRow(self.position.text.index, self.row, self.ids)


@dataclass(eq=False)
class Position:
    """The teacher's mass of everything that may follow the student's tokens before a position."""

    text: ScoredText
    number: int  # of the student's token
    masses: defaultdict[int, float] = field(default_factory=lambda: defaultdict[int, float](float))
    """Student token, ``INCOMPATIBLE`` or ``NO_TOKEN`` -> mass that is certain to begin with it."""
    undecided: list[Branch] = field(default_factory=list[Branch])
    reached: float = 0.0  # of all text that continues the realised one

    @cached_property
    def offset(self) -> int:
        """The position's first character in the text."""
        return self.text.start_of(self.number)

    @property
    def total(self) -> float:
        """Mass of all that may follow the student's tokens."""
        return self.reached - self.masses.get(INCOMPATIBLE, 0.0)

    def certain(self, tolerance: float) -> dict[int, float]:
        """Return token -> probability, of those whose error is within a tolerance."""
        total = self.total
        if total <= 0:
            return {}
        # Text before the position may have been written with other tokens, by either side.
        unknown = sum(
            each.mass for each in self.undecided if INCOMPATIBLE in each.tokens or not each.text
        )
        undecided: defaultdict[int, float] = defaultdict(float)
        for each in self.undecided:
            for token in each.tokens & self.masses.keys() | each.tokens & {ANY}:
                undecided[token] += each.mass
        result: dict[int, float] = {}
        for token, mass in self.masses.items():
            probability = mass / total
            error = undecided[token] + undecided[ANY] + probability * unknown
            if token >= 0 and error / total <= tolerance:
                result[self.text.student_id(token, self.number)] = min(probability, 1.0)
        return result

    @property
    def realised(self) -> float:
        """Probability of the realised token; of text that may begin with it or not, all."""
        token = self.text.event_of(self.number)
        undecided = sum(each.mass for each in self.undecided if token in each.tokens)
        mass = self.masses.get(token, 0.0) + undecided
        return min(mass / self.total, 1.0) if self.total > 0 else 0.0

    def is_lost(self, named: Mapping[int, float]) -> bool:
        """Return whether text without a name is likelier than each token with one."""
        nameless = sum(each.mass for each in self.undecided if each.text)
        nameless += self.masses.get(NO_TOKEN, 0.0)
        return nameless > max(named.values(), default=0.0) * self.total
