"""How many exercises a model answers exactly, by greedy generation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd.demo.examples import Encoder
from mopd.demo.tasks import Exercise

#: Longest answer, in tokens; whatever has not ended by then is wrong.
MAX_ANSWER_TOKENS = 24


def exact_match(model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]) -> float:
    """Share of ``exercises`` whose greedy answer is right to the letter and ends by itself."""
    answers = greedy_answers(model, encoder, exercises)
    right = [answer == e.answer for answer, e in zip(answers, exercises, strict=True)]
    return sum(right) / len(right)


def greedy_answers(
    model: PreTrainedModel, encoder: Encoder, exercises: Sequence[Exercise]
) -> list[str | None]:
    """What the model writes for each prompt; None where it does not end its turn.

    Bytes that are not UTF-8 appear as U+FFFD, which is in no right answer.
    """
    token_ids, attention = left_padded(encoder, exercises)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        # The attribute of transformers' generation mixin is typed as a module's tensor.
        written: Tensor = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=token_ids,
            attention_mask=attention,
            max_new_tokens=MAX_ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=encoder.end_of_turn,
            pad_token_id=encoder.table.roles.pad,
        )
    model.train(was_training)
    completions: list[list[int]] = written[:, token_ids.shape[1] :].tolist()
    return [_text(encoder, completion) for completion in completions]


def left_padded(encoder: Encoder, exercises: Sequence[Exercise]) -> tuple[Tensor, Tensor]:
    """Prompts that end at one column, and their attention: two of [exercises, tokens]."""
    prompts = encoder.prompts(exercises)
    longest = max(len(prompt) for prompt in prompts)
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
    known = [token_id for token_id in ids if token_id < encoder.table.size]
    if len(known) < len(ids):  # an id of the head's padding spells nothing
        return None
    return encoder.table.sequence(ids).text.decode("utf-8", "replace")
