"""Expected scores of a teacher, the slow way: one context at a time, from the formula.

The model is called for every token with exactly the tokens before it, so there is no position to
shift. The softmax is Python's, in float64.
"""

import math
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel


def next_token_logprobs(
    model: PreTrainedModel, context: Sequence[int], ids: Collection[int], temperature: float = 1.0
) -> dict[int, float]:
    """id -> log p(id | context) over ``ids``, the ids that have a token."""
    with torch.no_grad():
        logits = model(torch.tensor([list(context)])).logits[0, -1].double().tolist()
    scaled = {token_id: logits[token_id] / temperature for token_id in ids}
    highest = max(scaled.values())
    total = math.fsum(math.exp(value - highest) for value in scaled.values())
    return {token_id: value - highest - math.log(total) for token_id, value in scaled.items()}


def completion_logprobs(
    model: PreTrainedModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    ids: Collection[int],
    temperature: float = 1.0,
) -> list[dict[int, float]]:
    """One distribution per completion token, each given the prompt and the tokens before it."""
    return [
        next_token_logprobs(model, [*prompt, *completion[:row]], ids, temperature)
        for row in range(len(completion))
    ]


def tail_logprob(distribution: dict[int, float], kept: Collection[int]) -> float:
    """log of the mass outside ``kept``."""
    rest = math.fsum(math.exp(v) for token_id, v in distribution.items() if token_id not in kept)
    return math.log(rest) if rest > 0 else -math.inf
