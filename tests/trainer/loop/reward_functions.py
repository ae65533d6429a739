"""Rewards of some samples of an untrained student."""

from mopd_protocol import Prompt


def even(prompt: Prompt, completion: str) -> float:
    """Return 1 for an even number of characters."""
    return float(len(completion) % 2 == 0)


def share(prompt: Prompt, completion: str) -> float:
    """Return the share of digits."""
    return sum(each.isdigit() for each in completion) / max(len(completion), 1)
