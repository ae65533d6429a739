"""GOLD and ULD of one span (losses.md sections 2.3 to 2.7), on lists of merged probabilities."""

from tests.reference.dual import Dual, at_least, descending, log, magnitude, product, total
from tests.reference.span_view import SpanView, TeacherRow


def merge(view: SpanView, how: str) -> tuple[list[Dual], dict[int, float], float] | None:
    """The student's merged vector, the teacher's and its rest; None where there is no row."""
    if how == "bayesian":
        kept, row = view.student[-1], view.teacher[-1]
        student_factors = [p[x] for p, x in zip(view.student[:-1], view.labels[:-1], strict=True)]
        teacher_factors = [r.token_probability for r in view.teacher[:-1]]
    else:
        if view.next_student is None or view.next_teacher is None:
            return None
        rows = [*view.student[1:], view.next_student]
        teacher_rows = [*view.teacher[1:], view.next_teacher]
        kept, row = rows[0], teacher_rows[0]
        student_factors = [p[x] for p, x in zip(rows[1:], view.labels[1:], strict=True)]
        teacher_factors = [
            r.kept.get(y.token, 0.0)
            for r, y in zip(teacher_rows[1:], view.teacher[1:], strict=True)
        ]
    factor = product(at_least(p, 1e-8) for p in student_factors)
    teacher_factor = product(at_least(t, 1e-8) for t in teacher_factors).value
    scaled = {j: t * teacher_factor for j, t in row.kept.items()}
    return [p * factor for p in kept], scaled, row.rest * teacher_factor


def sorted_distance(
    student: list[Dual], teacher: list[float], student_total: Dual, rest: float
) -> Dual:
    """Rank by rank for the teacher's ranks; then the remaining ``student_total`` and ``rest``."""
    ranks = len(teacher)
    ranked = (descending(student) + [Dual(0.0)] * ranks)[:ranks]
    pairs = zip(ranked, sorted(teacher, reverse=True), strict=True)
    left = student_total - total(ranked)
    return total(magnitude(p - t) for p, t in pairs) + magnitude(left - rest)


def uld(view: SpanView, real: list[bool], how: str) -> Dual | None:
    """Plain ULD."""
    merged = merge(view, how)
    if merged is None:
        return None
    student, teacher, rest = merged
    entries = [p for p, keep in zip(student, real, strict=True) if keep]
    return sorted_distance(entries, list(teacher.values()), total(entries), rest)


def jsd(student: list[Dual], teacher: list[float], beta: float) -> Dual:
    """Jensen-Shannon divergence of vectors that need not sum to one."""
    pairs = list(zip(student, teacher, strict=True))
    if beta == 0:
        return total(t * log(t / p) for p, t in pairs)
    if beta == 1:
        return total(p * log(p / t) for p, t in pairs)
    value = Dual(0.0)
    for p, t in pairs:
        mixture = (1 - beta) * p + beta * t
        value = value + beta * t * log(t / mixture) + (1 - beta) * p * log(p / mixture)
    return value


def gold(
    view: SpanView,
    real: list[bool],
    partner: dict[int, int],
    weights: tuple[float, float],
    beta: float,
    how: str,
) -> Dual | None:
    """``partner``: teacher id -> student id, for ids in common."""
    merged = merge(view, how)
    if merged is None:
        return None
    student, teacher, rest = merged
    common = [j for j in teacher if j in partner]
    matched = jsd([student[partner[j]] for j in common], [teacher[j] for j in common], beta)
    matched_ids = set(partner.values())
    others = [p for v, p in enumerate(student) if real[v] and v not in matched_ids]
    everything = total(p for p, keep in zip(student, real, strict=True) if keep)
    unmatched = sorted_distance(
        others,
        [t for j, t in teacher.items() if j not in partner],
        everything - total(student[partner[j]] for j in common),
        rest,
    )
    return weights[0] * matched + weights[1] * unmatched


def teacher_row(kept: dict[int, float], rest: float = 0.0, token: int = 0) -> TeacherRow:
    """A row whose own token is among those kept."""
    return TeacherRow(kept, rest, token, kept.get(token, 0.0))
