"""ALM of one span (losses.md section 3.5), straight from the definition of the two likelihoods."""

from tests.reference.dual import Dual, at_least, exp, log, magnitude, product
from tests.reference.span_view import SpanView


def alm(view: SpanView, divergence: str, tau: float | None) -> Dual:
    """The binary divergence of "the span follows", or its limit times tau."""
    likelihood = product(row[x] for row, x in zip(view.student, view.labels, strict=True))
    teacher = product(row.token_probability for row in view.teacher)
    beta, alpha = at_least(-log(likelihood), 1e-4), at_least(-log(teacher), 1e-4)
    if tau is None:
        if divergence == "tvd":
            return 2 * magnitude(alpha - beta)
        return beta - alpha + alpha * log(alpha / beta)
    a, b = exp(-alpha / tau), exp(-beta / tau)
    if divergence == "tvd":
        return 2 * magnitude(a - b)
    return a * log(a / b) + (1 - a) * log((1 - a) / (1 - b))
