"""Exact-match accuracy by greedy generation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise

#: A completion without an end of turn after this many tokens is wrong.
MAX_COMPLETION_TOKENS = 24


def exact_match(model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]) -> float:
    """Return the share of exercises whose greedy completion is correct and ends its turn."""
    completions = greedy_completions(model, encoder, exercises)
    matches = [text == e.completion for text, e in zip(completions, exercises, strict=True)]
    return sum(matches) / len(matches)


def greedy_completions(
    model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]
) -> list[str | None]:
    """Generate one completion per prompt; None if the turn does not end.

    Invalid UTF-8 is decoded as U+FFFD, which no correct completion contains.
    """
    token_ids, attention = left_padded(encoder, exercises)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        # The attribute of transformers' generation mixin is typed as a module's tensor.
        generated: Tensor = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=token_ids,
            attention_mask=attention,
            max_new_tokens=MAX_COMPLETION_TOKENS,
            do_sample=False,
            eos_token_id=encoder.end_of_turn,
            pad_token_id=encoder.table.roles.pad,
        )
    model.train(was_training)
    completions: list[list[int]] = generated[:, token_ids.shape[1] :].tolist()
    return [_text(encoder, completion) for completion in completions]


def left_padded(encoder: Encoder, exercises: Sequence[Exercise]) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts and their attention mask, each [exercises, tokens]."""
    prompts = encoder.prompts(exercises)
    longest = max(map(len, prompts))
    padding = encoder.table.roles.pad or 0
    missing = [longest - len(prompt) for prompt in prompts]
    return (
        torch.tensor([[padding] * m + p for m, p in zip(missing, prompts, strict=True)]),
        torch.tensor([[0] * m + [1] * len(p) for m, p in zip(missing, prompts, strict=True)]),
    )


def _text(encoder: Encoder, completion: list[int]) -> str | None:
    if encoder.end_of_turn not in completion:
        return None
    ids = completion[: completion.index(encoder.end_of_turn)]
    if any(token_id >= encoder.table.size for token_id in ids):  # a padding row of the head
        return None
    return encoder.table.sequence(ids).text.decode("utf-8", "replace")
