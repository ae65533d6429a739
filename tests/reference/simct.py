"""SimCT's corrected form for one span (losses.md section 3.2): a common partition, then KL."""

import math

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
    ours = [view.student[0][partner[j]] for j in common]
    theirs = [row.kept[j] for j in common]
    ours.append(product(p[x] for p, x in zip(view.student, view.labels, strict=True)))
    theirs.append(math.prod(r.token_probability for r in view.teacher))
    everything = math.fsum(row.kept.values()) + row.rest
    ours.append(at_least(1 - total(ours), MARGIN))
    theirs.append(everything - math.fsum(theirs))
    if theirs[-1] < 1e-12:  # rounding
        theirs[-1] = 0.0
    return ours, [t / math.fsum(theirs) for t in theirs]


def simct(view: SpanView, partner: dict[int, int], forward: bool) -> Dual:
    """KL between the two; the teacher's rest is held above 1e-4 in the reverse direction."""
    ours, theirs = atoms(view, partner)
    if forward:
        return total(t * log(t / p) for p, t in zip(ours, theirs, strict=True) if t > 0)
    theirs[-1] = max(theirs[-1], 1e-4)
    return total(p * log(p / t) for p, t in zip(ours, theirs, strict=True))
