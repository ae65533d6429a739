"""Distributions that are filled towards others, by bisection."""

import math
from collections.abc import Sequence

#: The least share of the other side's that a rest is filled towards, if other entries are limited.
LEAST_SHARE = math.exp(-27)


def filled(
    known: Sequence[float],
    towards: Sequence[float],
    missing: Sequence[bool],
    bound: float,
    most: Sequence[float] = (),
    least: float = 0.0,
) -> list[float]:
    """Raise entries to a level of the other side's shares, the highest that adds at most
    the bound and leaves no share above the other side's; scaled to sum to one.

    Entries lack at most a share of the other side's. If one lacks its most, the level adds what is
    certain, for any shares.

    Args:
        most: 1 for any.
    """

    if bound == 0:
        return list(known)
    shares = [k / math.fsum(known) for k in known]
    limits = [
        k + m * t * (1 + bound) if m < 1 else math.inf
        for k, t, m in zip(shares, towards, most or [1.0] * len(shares), strict=True)
    ]

    def raised(level: float, *, is_limited: bool) -> list[float]:
        entries = zip(shares, towards, missing, limits, strict=True)
        return [
            max(k, min(level * t, limit if is_limited else math.inf)) if is_missing else k
            for k, t, is_missing, limit in entries
        ]

    def highest(*, is_limited: bool, is_certain: bool) -> float:
        def is_allowed(level: float) -> bool:
            total = math.fsum(raised(level, is_limited=is_limited))
            if is_certain:
                return total - 1 <= min(least, bound)
            return total - 1 <= bound and level <= total

        low, high = 0.0, 1.0 + bound
        while high < 1e14 and is_allowed(high):
            low, high = high, high * 2
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if is_allowed(middle) else (low, middle)
        return low

    def level(*, is_limited: bool) -> float:
        levels = (highest(is_limited=is_limited, is_certain=each) for each in (False, True))
        return max(levels)

    complete = level(is_limited=False)
    entries = zip(shares, towards, missing, limits, strict=True)
    if any(is_missing and max(k, complete * t) > limit for k, t, is_missing, limit in entries):
        towards = [*towards[:-1], max(towards[-1], LEAST_SHARE)]
        values = raised(level(is_limited=True), is_limited=True)
    else:
        values = raised(highest(is_limited=False, is_certain=False), is_limited=False)
    return [value / math.fsum(values) for value in values]
