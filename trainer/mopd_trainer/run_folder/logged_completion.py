"""``logged_completion``: a line of ``completions.jsonl``, from which the report shows a sample."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mopd_losses.alignment.chunks import Chunk, chunks, run_lengths
from mopd_protocol.messages import calls_as_text
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.token_listing import spellings, token_listing
from mopd_trainer.metrics.token_losses import TokenLosses, rounded

#: Maximum number of tokens listed for a completion, per tokenizer; its text is complete.
LISTED_TOKENS = 512
#: Maximum number of tokens with the most likely tokens of the models.
DETAILED_TOKENS = 128

Tables = Mapping[str, TokenTable]


def logged_completion(
    step: int,
    example: TrainingExample,
    losses: Mapping[str, TokenLosses | None] = MappingProxyType({}),
    *,
    student: tuple[TokenTable, TopKLogprobs] | None = None,
    teachers: Tables = MappingProxyType({}),
    top_k: int = 0,
) -> dict[str, Any]:
    """Return a completion as JSON values; invalid UTF-8 is replaced by U+FFFD.

    The first 512 tokens are listed one by one, in the student's tokens and in each teacher's: id,
    bytes in hexadecimal (a token may end inside a character), and for each teacher the loss in
    nats before weighting (``null`` where it was not compared) and the aligned chunks: ``n`` for
    ``n`` one-to-one spans, ``[s, t]`` for a span of s and t tokens, ``[s, t, 0]`` for unaligned
    tokens. The first 128 tokens also have the most likely tokens of both models.

    Args:
        losses: by teacher.
        student: token table, and distributions of the first tokens.
        teachers: token tables by teacher.
        top_k: most likely tokens of each teacher.
    """
    rollout = example.rollout
    tokens = token_listing(rollout.completion, LISTED_TOKENS)
    own_prompts = {
        name: [message.model_dump() for message in messages]
        for name, messages in rollout.prompt.teacher_messages.items()
    }
    if student is not None:
        table, topk = student
        tokens |= _distributions(topk, table, topk.k)
    return {
        "step": step,
        "prompt": [calls_as_text(message).model_dump() for message in rollout.prompt.messages],
        "completion": rollout.completion.text.decode("utf-8", "replace"),
        "source": rollout.source,
        "policy_version": rollout.policy_version,
        "sample": rollout.sample,
        "turn": rollout.turn,
        "finish_reason": rollout.finish_reason,
        "corrected_tokens": rollout.corrected_tokens,
        **(
            {"rewards": dict(rollout.rewards), "advantage": example.advantage}
            if rollout.rewards
            else {}
        ),
        "teachers": dict(rollout.prompt.teachers),
        "metadata": dict(rollout.prompt.metadata),
        **({"teacher_prompts": own_prompts} if own_prompts else {}),
        "tokens": tokens,
        "nats": {
            name: rounded(nats[:LISTED_TOKENS]) for name, nats in losses.items() if nats is not None
        },
        "scores": {score.teacher: _score(score, teachers, top_k) for score in example.scores},
    }


def _score(aligned: AlignedScore, teachers: Tables, top_k: int) -> dict[str, Any]:
    student, teacher = aligned.teacher_input.completion, aligned.score.completion
    parts = _listed(chunks(aligned.alignment, len(student), len(teacher)))
    score = token_listing(teacher, LISTED_TOKENS) | {"chunks": [*run_lengths(parts)]}
    if top_k and aligned.teacher in teachers:
        score |= _distributions(aligned.score.topk, teachers[aligned.teacher], top_k)
    return score


def _distributions(topk: TopKLogprobs, table: TokenTable, k: int) -> dict[str, Any]:
    """Return the logprobs of the tokens, and the ``k`` most likely ids with their spellings."""
    ids = topk.ids[:DETAILED_TOKENS, :k]
    listed = (token_id for row in ids.tolist() for token_id in row if token_id >= 0)
    return {
        "logprobs": rounded(topk.token_logprobs[:DETAILED_TOKENS]),
        "top_ids": ids.tolist(),
        "top_logprobs": [rounded(row) for row in topk.logprobs[:DETAILED_TOKENS, :k]],
        "spellings": spellings(table, listed),
    }


def _listed(parts: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of tokens that are listed on both sides."""
    for part in parts:
        if part.student[1] > LISTED_TOKENS or part.teacher[1] > LISTED_TOKENS:
            return
        yield part
