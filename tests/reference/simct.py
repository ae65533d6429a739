"""SimCT's corrected form for one span (losses.md section 3.2): a common partition, then KL."""

import math

from tests.reference.divergences import floored_rest
from tests.reference.dual import Dual, at_least, log, product, total
from tests.reference.span_view import SpanView

#: Least mass of the student's rest.
MARGIN = 1e-6


def atoms(view: SpanView, partner: dict[int, int]) -> tuple[list[Dual], list[float]]:
    """Masses of both sides: ids in common, the span, the rest."""
    row = view.teacher[0]
    common = [
        j for j in row.kept if j in partner and j != row.token and partner[j] != view.labels[0]
    ]
    student = [view.student[0][partner[j]] for j in common]
    teacher = [row.kept[j] for j in common]
    student.append(product(p[x] for p, x in zip(view.student, view.labels, strict=True)))
    teacher.append(math.prod(r.token_probability for r in view.teacher))
    everything = math.fsum(row.kept.values()) + row.rest
    student.append(at_least(1 - total(student), MARGIN))
    teacher.append(everything - math.fsum(teacher))
    if teacher[-1] < 1e-12:  # rounding
        teacher[-1] = 0.0
    return student, [t / math.fsum(teacher) for t in teacher]


def simct(view: SpanView, partner: dict[int, int], forward: bool) -> Dual:
    """KL between the two; the teacher's rest is floored in the reverse direction."""
    student, teacher = atoms(view, partner)
    if forward:
        return total(t * log(t / p) for p, t in zip(student, teacher, strict=True) if t > 0)
    teacher = floored_rest(teacher, student[-1].value)
    return total(p * log(p / t) for p, t in zip(student, teacher, strict=True))
