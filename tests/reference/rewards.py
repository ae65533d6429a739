"""Advantages and the clipped ratio, one completion and one token at a time, from the formulas."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def advantages(
    groups: Sequence[Sequence[Sequence[float]]], weights: Sequence[float], *, normalize: bool
) -> list[list[float]]:
    """Return the advantage of each completion of each group.

    Args:
        groups: [groups][completions][rewards].
        weights: [rewards].
    """
    return [
        [
            sum(
                weights[number]
                * _advantage(completion[number], [each[number] for each in group], normalize)
                for number in range(len(weights))
            )
            for completion in group
        ]
        for group in groups
    ]


def _advantage(reward: float, group: Sequence[float], normalize: bool) -> float:
    """GRPO (arXiv 2402.03300, 4.1.2): the reward's distance from the mean in deviations."""
    mean = math.fsum(group) / len(group)
    if not normalize:
        return reward - mean
    variance = math.fsum((each - mean) ** 2 for each in group) / len(group)
    return (reward - mean) / (math.sqrt(variance) + 1e-6)


def clipped_loss(
    logits: NDArray[np.float64],
    token: int,
    sampled: float,
    advantage: float,
    *,
    epsilon: float,
    temperature: float,
) -> tuple[float, NDArray[np.float64]]:
    """Return the loss of a sampled token and its gradient by the logits (arXiv 1707.06347, 7).

    Args:
        logits: [ids], of the current weights.
        sampled: log-probability when sampled, nats.
    """
    scaled = logits / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    ratio = probabilities[token] / math.exp(sampled)
    clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, np.zeros_like(logits)
    chosen = np.zeros_like(logits)
    chosen[token] = 1.0
    return -ratio * advantage, -advantage * ratio * (chosen - probabilities) / temperature
