"""The weights of a self-teacher, the slow way: one number after another, in Python's float64."""

from collections.abc import Sequence


def moving_average(start: float, weights: Sequence[float], rate: float) -> float:
    """``a <- (1 - rate) * a + rate * w`` for the weight after each step."""
    average = start
    for weight in weights:
        average = (1 - rate) * average + rate * weight
    return average


def copied(start: float, weights: Sequence[float], every: int) -> float:
    """Return the weight after the last step whose number is a multiple of ``every``."""
    copies = [weight for step, weight in enumerate(weights, start=1) if step % every == 0]
    return copies[-1] if copies else start
