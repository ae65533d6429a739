"""Losses on one sampled token, from the formulas of losses.md section 4.9.

``p`` is the student's probability of the token, ``t`` the teacher's, ``mu`` that of the
distribution that it was drawn from.
"""

from tests.reference.dual import Dual, exp, log


def policy_gradient(p: Dual, t: float, mu: float, max_ratio: float = 2.0) -> Dual:
    """``sg(min(p / mu, max_ratio) d) p / sg(p)`` with ``d = ln p - ln t``."""
    weight = min(p.value / mu, max_ratio) * (log(p) - log(t)).value
    return weight * (p / p.value)


def k2(p: Dual, t: float, _: float) -> Dual:
    """``d^2 / 2``."""
    d = log(p) - log(t)
    return d * d / 2.0


def k3(p: Dual, t: float, _: float) -> Dual:
    """``e^-d - 1 + d``."""
    d = log(p) - log(t)
    return exp(-d) - 1.0 + d
