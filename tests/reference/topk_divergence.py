"""A truncated divergence at one place, with a dense product and explicit buckets, in plain floats.

The student's distribution is projected on the teacher's ids, what both can name is compared in one
of the forms of ``divergences``, and slopes go back to the student's logits through the same sums.
"""

import math
from collections.abc import Sequence

from tests.reference.divergences import (
    Compared,
    Divergence,
    by_logits,
    generalised_forward,
    generalised_reverse,
    renormalised,
    tail_bucket,
)


def softmax(logits: Sequence[float], real: Sequence[bool], temperature: float) -> list[float]:
    """Return probabilities over the real ids, zero elsewhere."""
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
    form: str,
    divergence: Divergence,
    forward: bool,
    floored: bool,
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
) -> tuple[float, list[float]]:
    """Value and gradient by the logits; ``teacher`` maps id -> probability, as it was scored."""
    p = softmax(logits, real, temperature)
    q = project(p, weights)
    ids = [j for j in teacher if q[j] > 0]
    t = [teacher[j] for j in ids]
    projected = [q[j] for j in ids]
    if not ids:
        return 0.0, [0.0] * len(p)
    if form == "renormalised":
        exponent = teacher_temperature / temperature
        result = renormalised(divergence, projected, [b**exponent for b in t])
    elif form == "generalised":
        result = (generalised_forward if forward else generalised_reverse)(projected, t)
    else:
        result = _with_rest(p, q, ids, weights, t, teacher_rest, divergence, floored)
        unnamed = math.fsum(b for j, b in teacher.items() if j not in ids)
        result = Compared(
            result.value * (1 - unnamed), [slope * (1 - unnamed) for slope in result.slopes]
        )
    slopes = [
        math.fsum(slope * row[j] for slope, j in zip(result.slopes, ids, strict=True))
        for row in weights
    ]
    gradient = by_logits(slopes, p)
    return temperature**2 * result.value, [temperature * slope for slope in gradient]


def _with_rest(
    p: list[float],
    q: list[float],
    ids: list[int],
    weights: Sequence[Sequence[float]],
    t: list[float],
    teacher_rest: float,
    divergence: Divergence,
    floored: bool,
) -> Compared:
    unprojected = [a for a, row in zip(p, weights, strict=True) if not any(row)]
    return tail_bucket(
        divergence,
        [q[j] for j in ids],
        math.fsum([*unprojected, *(a for j, a in enumerate(q) if j not in ids)]),
        t,
        teacher_rest,
        floored=floored,
    )
