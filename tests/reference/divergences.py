"""Divergences and their truncated forms in plain floats, from the formulas of losses.md section 4.

Every function takes probabilities and returns a value in nats and its slope by each of the
student's probabilities; ``by_logits`` carries slopes on to the logits of a softmax.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

#: Least mass of the student's rest, and of the teacher's where the divergence is unbounded.
MARGIN = 1e-6
FLOOR = 1e-4

Floats = Sequence[float]


@dataclass(frozen=True)
class Compared:
    """A value, and its partial derivative by each probability of the student."""

    value: float
    slopes: list[float]


Divergence = Callable[[Floats, Floats], Compared]


def forward_kl(p: Floats, t: Floats) -> Compared:
    """``sum t ln(t / p)``."""
    return Compared(
        math.fsum(_term(b, a) for a, b in zip(p, t, strict=True)),
        [-b / a if b > 0 else 0.0 for a, b in zip(p, t, strict=True)],
    )


def reverse_kl(p: Floats, t: Floats) -> Compared:
    """``sum p ln(p / t)``."""
    return Compared(
        math.fsum(_term(a, b) for a, b in zip(p, t, strict=True)),
        [math.log(a / b) + 1 if a > 0 else 0.0 for a, b in zip(p, t, strict=True)],
    )


def jensen_shannon(p: Floats, t: Floats, w: float) -> Compared:
    """``w sum t ln(t / m) + (1 - w) sum p ln(p / m)``, ``m = (1 - w) p + w t``; ends unscaled."""
    if w in (0, 1):
        return forward_kl(p, t) if w == 0 else reverse_kl(p, t)
    m = [(1 - w) * a + w * b for a, b in zip(p, t, strict=True)]
    parts = [
        w * _term(b, c) + (1 - w) * _term(a, c) for a, b, c in zip(p, t, m, strict=True) if c > 0
    ]
    slopes = [
        (1 - w) * math.log(a / c) if a > 0 else 0.0 for a, c in zip(p, m, strict=True)
    ]  # what comes from m cancels
    return Compared(math.fsum(parts), slopes)


def skewed_forward_kl(p: Floats, t: Floats, skew: float) -> Compared:
    """``KL(t || skew t + (1 - skew) p)``."""
    m = [skew * b + (1 - skew) * a for a, b in zip(p, t, strict=True)]
    return Compared(
        math.fsum(_term(b, c) for b, c in zip(t, m, strict=True)),
        [-(1 - skew) * b / c if b > 0 else 0.0 for b, c in zip(t, m, strict=True)],
    )


def skewed_reverse_kl(p: Floats, t: Floats, skew: float) -> Compared:
    """``KL(p || (1 - skew) t + skew p)``."""
    m = [(1 - skew) * b + skew * a for a, b in zip(p, t, strict=True)]
    return Compared(
        math.fsum(_term(a, c) for a, c in zip(p, m, strict=True)),
        [math.log(a / c) + 1 - skew * a / c if a > 0 else 0.0 for a, c in zip(p, m, strict=True)],
    )


def total_variation(p: Floats, t: Floats) -> Compared:
    """``1/2 sum |p - t|``."""
    gaps = [a - b for a, b in zip(p, t, strict=True)]
    return Compared(
        0.5 * math.fsum(map(abs, gaps)),
        [0.0 if gap == 0 else math.copysign(0.5, gap) for gap in gaps],
    )


def head_and_tail_gaps(p: Floats, t: Floats, tail_mass: float) -> tuple[float, float]:
    """``sum |t - p|`` over the head and over the tail, found id by id."""
    head: list[float] = []
    tail: list[float] = []
    for a, b in zip(p, t, strict=True):
        up_to_here = math.fsum(other for other in t if other <= b)
        (tail if up_to_here <= tail_mass else head).append(abs(b - a))
    return math.fsum(head), math.fsum(tail)


def adaptive_kl(p: Floats, t: Floats, tail_mass: float) -> Compared:
    """Forward and reverse KL, weighted by the gaps of head and tail; the weights are constants."""
    head, tail = head_and_tail_gaps(p, t, tail_mass)
    share = head / (head + tail) if head + tail > 0 else 0.5
    forward, reverse = forward_kl(p, t), reverse_kl(p, t)
    return Compared(
        share * forward.value + (1 - share) * reverse.value,
        [share * f + (1 - share) * r for f, r in zip(forward.slopes, reverse.slopes, strict=True)],
    )


def entropy_aware_kl(p: Floats, t: Floats, threshold: float) -> Compared:
    """``sum p ln(p / t)``, plus ``sum t ln(t / p)`` where ``-sum t ln t`` is above a threshold."""
    reverse = reverse_kl(p, t)
    if -math.fsum(_term(b, 1.0) for b in t) <= threshold:
        return reverse
    forward = forward_kl(p, t)
    return Compared(
        reverse.value + forward.value,
        [r + f for r, f in zip(reverse.slopes, forward.slopes, strict=True)],
    )


def divergence_named(
    name: str, *, teacher_weight: float, tail_mass: float, skew: float, entropy_threshold: float
) -> Divergence:
    """One of the eight, with its parameter."""
    return {
        "forward_kl": forward_kl,
        "reverse_kl": reverse_kl,
        "jsd": partial(jensen_shannon, w=teacher_weight),
        "adaptive_kl": partial(adaptive_kl, tail_mass=tail_mass),
        "entropy_aware_kl": partial(entropy_aware_kl, threshold=entropy_threshold),
        "skewed_forward_kl": partial(skewed_forward_kl, skew=skew),
        "skewed_reverse_kl": partial(skewed_reverse_kl, skew=skew),
        "tvd": total_variation,
    }[name]


def renormalised(divergence: Divergence, q: Floats, t: Floats) -> Compared:
    """Form A: both sides divided by their retained mass."""
    if not q:
        return Compared(0.0, [])
    mass, teacher_mass = math.fsum(q), math.fsum(t)
    scaled = [a / mass for a in q]
    result = divergence(scaled, [b / teacher_mass for b in t])
    mean = math.fsum(a * slope for a, slope in zip(scaled, result.slopes, strict=True))
    return Compared(result.value, [(slope - mean) / mass for slope in result.slopes])


def raw_forward(q: Floats, t: Floats) -> Compared:
    """Form B, which is not stationary at equality: ``sum t ln(t / q)`` over what is retained."""
    return forward_kl(q, t)


def raw_reverse(q: Floats, t: Floats) -> Compared:
    """Form C, which is not stationary at equality: ``sum q ln(q / t)`` over what is retained."""
    return reverse_kl(q, t)


def generalised_forward(q: Floats, t: Floats) -> Compared:
    """Form D: ``sum t ln(t / q) - t + q``."""
    return Compared(
        math.fsum(_term(b, a) - b + a for a, b in zip(q, t, strict=True)),
        [1 - b / a for a, b in zip(q, t, strict=True)],
    )


def generalised_reverse(q: Floats, t: Floats) -> Compared:
    """Form D: ``sum q ln(q / t) - q + t``."""
    return Compared(
        math.fsum(_term(a, b) - a + b for a, b in zip(q, t, strict=True)),
        [math.log(a / b) for a, b in zip(q, t, strict=True)],
    )


def tail_bucket(
    divergence: Divergence, q: Floats, q_rest: float, t: Floats, t_rest: float, *, floored: bool
) -> Compared:
    """Form E: the rest of either side as one more entry; the student's is ``1 - sum q``."""
    total = math.fsum([*t, t_rest])
    q_rest_kept = max(q_rest, MARGIN)
    teacher = [*(b / total for b in t), t_rest / total]
    if floored:
        teacher = floored_rest(teacher, q_rest_kept)
    result = divergence([*q, q_rest_kept], teacher)
    *slopes, of_rest = result.slopes
    if q_rest < MARGIN:
        of_rest = 0.0
    return Compared(result.value, [slope - of_rest for slope in slopes])


def floored_rest(side: Floats, other_rest: float) -> list[float]:
    """Raise the last share to 1e-4, or to the other one if less; scaled to sum to one."""
    shares = [*side[:-1], max(side[-1], min(FLOOR, other_rest))]
    return [share / math.fsum(shares) for share in shares]


def by_logits(slopes: Floats, p: Floats) -> list[float]:
    """The gradient by the logits of ``p = softmax(z)``: ``p (slope - sum of p slope)``."""
    mean = math.fsum(a * slope for a, slope in zip(p, slopes, strict=True))
    return [a * (slope - mean) for a, slope in zip(p, slopes, strict=True)]


def _term(a: float, b: float) -> float:
    if a == 0:
        return 0.0
    return math.inf if b == 0 else a * math.log(a / b)
