"""Sampling, the slow way: one sequence, one token, one forward pass at a time."""

import math
from collections.abc import Collection, Sequence

from transformers import PreTrainedModel

from tests.reference.teacher_scores import next_token_logprobs


def greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    ids: Collection[int],
    endings: Collection[int],
    max_new_tokens: int,
) -> list[int]:
    """The most likely of ``ids``, again and again, up to and with an ending token."""
    written: list[int] = []
    while len(written) < max_new_tokens and (not written or written[-1] not in endings):
        distribution = next_token_logprobs(model, [*prompt, *written], ids)
        written.append(max(distribution, key=distribution.__getitem__))
    return written


def nucleus(logprobs: dict[int, float], top_p: float) -> dict[int, float]:
    """The fewest most likely ids with at least ``top_p`` of the mass, normalised."""
    kept: dict[int, float] = {}
    for token_id in sorted(logprobs, key=logprobs.__getitem__, reverse=True):
        if math.fsum(map(math.exp, kept.values())) >= top_p:
            break
        kept[token_id] = logprobs[token_id]
    total = math.log(math.fsum(map(math.exp, kept.values())))
    return {token_id: value - total for token_id, value in kept.items()}
