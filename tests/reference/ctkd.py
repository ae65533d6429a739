"""CTKD at one place in plain Python floats: softmax, dense product, explicit buckets.

The value is form E of losses.md section 4.2 and the gradient the master formula of section 5.1 for
a span of one slot. Absent entries are simply not in ``teacher``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Least mass of the student's tail; below it the tail is a constant.
MARGIN = 1e-6
#: Least mass of the teacher's tail in the reverse direction.
FLOOR = 1e-4


@dataclass(frozen=True)
class Place:
    """The value at one place, its gradient with respect to the logits, and the four masses."""

    value: float
    gradient: list[float]
    teacher_mass: float
    student_mass: float
    unsupported_mass: float
    unprojected_mass: float


@dataclass(frozen=True)
class Buckets:
    """Both sides on (compared ids, rest)."""

    ids: list[int]
    student: list[float]
    student_rest: float
    teacher: list[float]
    teacher_rest: float
    clamped: bool  # whether the student's rest is a constant


def softmax(logits: Sequence[float], real: Sequence[bool], temperature: float) -> list[float]:
    """Probabilities over the real ids."""
    top = max(z for z, keep in zip(logits, real, strict=True) if keep)
    powers = [
        math.exp((z - top) / temperature) if keep else 0.0
        for z, keep in zip(logits, real, strict=True)
    ]
    return [power / math.fsum(powers) for power in powers]


def project(student: Sequence[float], weights: Sequence[Sequence[float]]) -> list[float]:
    """``q(j) = sum over v of W[v, j] p(v)``."""
    return [
        math.fsum(p * row[j] for p, row in zip(student, weights, strict=True))
        for j in range(len(weights[0]))
    ]


def place(
    logits: Sequence[float],
    real: Sequence[bool],
    weights: Sequence[Sequence[float]],
    teacher: dict[int, float],
    teacher_rest: float,
    *,
    forward: bool,
    temperature: float = 1.0,
) -> Place:
    """One place; ``teacher`` maps id -> probability."""
    student = softmax(logits, real, temperature)
    projected = project(student, weights)
    supported = [
        any(keep and row[j] > 0 for keep, row in zip(real, weights, strict=True))
        for j in range(len(weights[0]))
    ]
    buckets = _buckets(student, projected, weights, supported, teacher, teacher_rest)
    value, slopes = _forward(buckets) if forward else _reverse(buckets)
    total = math.fsum(slopes)
    gradient = []
    for v, p in enumerate(student):
        pulled = math.fsum(
            slope * weights[v][j] * p / projected[j]
            for slope, j in zip(slopes, buckets.ids, strict=True)
            if projected[j] > 0
        )
        gradient.append(temperature * (pulled - p * total))  # T squared times 1 / T
    return Place(
        value=temperature**2 * value,
        gradient=gradient,
        teacher_mass=math.fsum(teacher[j] for j in buckets.ids),
        student_mass=math.fsum(projected[j] for j in buckets.ids),
        unsupported_mass=math.fsum(t for j, t in teacher.items() if not supported[j]),
        unprojected_mass=math.fsum(
            p for p, row in zip(student, weights, strict=True) if not any(row)
        ),
    )


def _buckets(
    student: list[float],
    projected: list[float],
    weights: Sequence[Sequence[float]],
    supported: list[bool],
    teacher: dict[int, float],
    teacher_rest: float,
) -> Buckets:
    ids = [j for j in teacher if supported[j]]
    rest = math.fsum(
        [
            *(q for j, q in enumerate(projected) if j not in ids),
            *(p for p, row in zip(student, weights, strict=True) if not any(row)),
        ]
    )
    clamped = rest < MARGIN
    if clamped:
        rest = MARGIN
    total = math.fsum([*teacher.values(), teacher_rest])
    moved = math.fsum([teacher_rest, *(t for j, t in teacher.items() if not supported[j])])
    return Buckets(
        ids=ids,
        student=[projected[j] for j in ids],
        student_rest=rest,
        teacher=[teacher[j] / total for j in ids],
        teacher_rest=moved / total,
        clamped=clamped,
    )


def _forward(buckets: Buckets) -> tuple[float, list[float]]:
    value = _term(buckets.teacher_rest, buckets.student_rest) + math.fsum(
        _term(t, q) for t, q in zip(buckets.teacher, buckets.student, strict=True)
    )
    pull = 0.0 if buckets.clamped else buckets.teacher_rest / buckets.student_rest
    slopes = [q * pull - t for t, q in zip(buckets.teacher, buckets.student, strict=True)]
    return value, slopes


def _reverse(buckets: Buckets) -> tuple[float, list[float]]:
    floored = max(buckets.teacher_rest, FLOOR)
    value = _term(buckets.student_rest, floored) + math.fsum(
        _term(q, t) for t, q in zip(buckets.teacher, buckets.student, strict=True)
    )
    outside = math.log(buckets.student_rest / floored) + 1
    if buckets.clamped:
        outside = 0.0
    slopes = [
        q * (math.log(q / t) + 1 - outside) if q > 0 else 0.0
        for t, q in zip(buckets.teacher, buckets.student, strict=True)
    ]
    return value, slopes


def _term(a: float, b: float) -> float:
    return a * math.log(a / b) if a > 0 else 0.0
