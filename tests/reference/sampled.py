"""Losses on one sampled token, from the formulas of losses.md section 4.9.

``p`` is the student's probability of the token, ``t`` the teacher's, ``mu`` that of the
distribution that it was drawn from.
"""

import math
from collections.abc import Sequence

from tests.reference.divergences import MARGIN, floored_rest
from tests.reference.dual import Dual, exp, log


def policy_gradient(
    p: Dual,
    t: float,
    mu: float,
    max_ratio: float = 2.0,
    baseline: float = 0.0,
    skew: float = 0.0,
) -> Dual:
    """``w d`` with the gradient of ``w (d - baseline) ln p``, where
    ``d = ln p - ln(skew p + (1 - skew) t)`` and ``w = min(p / mu, max_ratio)``."""
    weight = min(p.value / mu, max_ratio)
    d = math.log(p.value) - math.log(skew * p.value + (1 - skew) * t)
    return Dual(weight * d, weight * (d - baseline) * log(p).slopes)


def mean_log_ratio(
    p: Sequence[float], t: Sequence[float], t_rest: float, skew: float = 0.0
) -> float:
    """``sum w d / sum w`` over the teacher's entries and one more for all others, with
    ``w = p |grad ln p|^2 = p (1 - 2 p + sum p^2)``; the others are many, and each unlikely."""
    p_rest = max(1 - math.fsum(p), MARGIN)
    total = math.fsum([*t, t_rest])
    teacher = floored_rest([b / total for b in [*t, t_rest]], p_rest)
    squares = math.fsum(a * a for a in p)
    weights = [*(a * (1 - 2 * a + squares) for a in p), p_rest * (1 + squares)]
    log_ratios = [
        math.log(a / (skew * a + (1 - skew) * b))
        for a, b in zip([*p, p_rest], teacher, strict=True)
    ]
    weighted = math.fsum(w * d for w, d in zip(weights, log_ratios, strict=True))
    return weighted / math.fsum(weights)


def k2(p: Dual, t: float, _: float) -> Dual:
    """``d^2 / 2``."""
    d = log(p) - log(t)
    return d * d / 2.0


def k3(p: Dual, t: float, _: float) -> Dual:
    """``e^-d - 1 + d``."""
    d = log(p) - log(t)
    return exp(-d) - 1.0 + d
