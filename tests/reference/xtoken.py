"""X-Token's P-KL of one span (losses.md section 1.6), and pooled CTKD.

Teacher rows are lists over the support, not renormalised.
"""

import math

from tests.reference.divergences import floored_rest
from tests.reference.dual import Dual, exp, log, total
from tests.reference.span_view import TeacherRow

EPSILON = 1e-10

Rows = list[list[Dual]]


def filled(row: TeacherRow, support: list[int], size: int) -> list[float]:
    """A top-k row on the support: ids that were not sent share the rest."""
    share = row.rest / max(size - len(row.kept), 1)
    share = max(share, 1e-10)
    return [row.kept.get(j, share) for j in support]


def project(row: list[Dual], weights: list[list[float]], j: int) -> Dual:
    return total(p * weights[v][j] for v, p in enumerate(row) if weights[v][j] > 0)


def mean(values: list[Dual]) -> Dual:
    return total(values) / len(values)


def pkl(
    student: Rows, weights: list[list[float]], teacher: list[list[float]], support: list[int],
    forward: bool, temperature: float,
) -> Dual:  # fmt: skip
    """P-KL to the letter."""
    if not support:
        return Dual(0.0)
    pooled = [mean([project(row, weights, j) for row in student]) for j in support]
    mass = total(pooled)
    student_logs = [log(q / (mass + EPSILON) + EPSILON) for q in pooled]
    teacher_logs = [
        math.fsum(math.log(row[i] / math.fsum(row)) for row in teacher) / len(teacher)
        for i in range(len(support))
    ]
    pairs = zip(student_logs, teacher_logs, strict=True)
    if forward:
        value = total(math.exp(t) * (t - q) for q, t in pairs)
    else:
        value = total(exp(q) * (q - t) for q, t in pairs)
    return value * temperature**2


def pooled(
    student: Rows, weights: list[list[float]], real: list[bool], teacher: list[TeacherRow],
    forward: bool, temperature: float,
) -> Dual:  # fmt: skip
    """Arithmetic means on both sides, on (union of ids, rest)."""
    reachable = {
        j
        for j in range(len(weights[0]))
        if any(keep and row[j] > 0 for keep, row in zip(real, weights, strict=True))
    }
    union = sorted({j for row in teacher for j in row.kept} & reachable)
    if not union:
        return Dual(0.0)
    student_masses = [mean([project(row, weights, j) for row in student]) for j in union]
    teacher_masses = [
        math.fsum(row.kept.get(j, 0.0) for row in teacher) / len(teacher) for j in union
    ]
    everything = math.fsum(math.fsum(row.kept.values()) + row.rest for row in teacher) / len(
        teacher
    )
    named = math.fsum(teacher_masses)
    rest = math.fsum(row.rest for row in teacher) / len(teacher)
    unnamed, everything = everything - named - rest, named + rest
    left = 1 - total(student_masses)
    student_masses.append(left if left.value > 1e-6 else Dual(1e-6))
    teacher_masses = [t / everything for t in [*teacher_masses, rest]]
    if forward:
        value = total(
            t * log(t / q) for q, t in zip(student_masses, teacher_masses, strict=True) if t > 0
        )
    else:
        teacher_masses = floored_rest(teacher_masses, student_masses[-1].value)
        value = total(q * log(q / t) for q, t in zip(student_masses, teacher_masses, strict=True))
    return value * (1 - unnamed) * temperature**2
