"""CTKD's events by their definition: dictionaries of probabilities."""

import math
from collections.abc import Mapping, Sequence

Weights = Sequence[Sequence[float]]


def representative(weights: Weights, teacher_id: int, first_token: int) -> int:
    """The id itself if a student id projects to it; else the heaviest one of the first token."""
    if any(row[teacher_id] > 0 for row in weights):
        return teacher_id
    row = weights[first_token] if first_token >= 0 else ()
    return max(range(len(row)), key=row.__getitem__) if any(row) else teacher_id


def on_events(
    weights: Weights,
    first_tokens: Sequence[int],
    student_id: int,
    teacher_id: int,
    kept: Mapping[int, float],
    rest: float,
    probability: float,
) -> tuple[list[list[float]], dict[int, float], float]:
    """A projection whose first column is the realised event, the teacher on its columns, and rest.

    Args:
        first_tokens: the first student id of each teacher id's text, or -1.
        student_id: the student's token; ``teacher_id`` the teacher's, of this ``probability``.
        kept: the teacher's top-k; ``rest`` is the mass of all others.
    """
    representatives = [representative(weights, j, v) for j, v in enumerate(first_tokens)]
    reached = {j for j, weight in enumerate(weights[student_id]) if weight > 0}
    realised = {representatives[teacher_id], *reached}
    if teacher_id not in kept:
        kept, rest = {**kept, teacher_id: probability}, max(rest - probability, 0.0)
    teacher: dict[int, float] = {}
    for j, p in kept.items():
        column = 0 if representatives[j] in realised else 1 + representatives[j]
        teacher[column] = teacher.get(column, 0.0) + p
    merged = [
        [
            math.fsum(row[j] for j in realised),
            *(0.0 if j in realised else weight for j, weight in enumerate(row)),
        ]
        for row in weights
    ]
    if not reached:  # no teacher id names the student's token
        merged[student_id][0] = 1.0
    return merged, teacher, rest
