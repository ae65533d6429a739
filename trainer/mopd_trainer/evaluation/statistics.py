"""Intervals and estimators of evaluation results."""

import math

#: Quantile of the normal distribution for a two-sided 95 % interval.
_Z = 1.959963984540054


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of ``count`` independent trials.

    Unlike the normal interval it has a positive width at shares of 0 and 1. Source: Wilson 1927,
    "Probable inference, the law of succession, and statistical inference"; Brown, Cai, DasGupta
    2001, equation 4.

    Args:
        count: at least 1.
    """
    spread = _Z**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of ``k`` samples passes.

    ``1 - C(samples - passed, k) / C(samples, k)``. Source: Chen et al. 2021, arXiv 2107.03374,
    equation 1.

    Args:
        k: at most ``samples``.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)
