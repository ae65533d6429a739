"""One aligned span as a reference sees it: rows of probabilities, token by token."""

from dataclasses import dataclass

from tests.reference.dual import Dual


@dataclass(frozen=True)
class TeacherRow:
    """A truncated distribution: id -> probability, and the mass of all other ids."""

    kept: dict[int, float]
    rest: float
    token: int
    token_probability: float


@dataclass(frozen=True)
class SpanView:
    """The rows of a span on either side, and the row after it where the completion has one."""

    student: list[list[Dual]]  # [tokens][width], probabilities
    labels: list[int]
    teacher: list[TeacherRow]
    next_student: list[Dual] | None
    next_teacher: TeacherRow | None
