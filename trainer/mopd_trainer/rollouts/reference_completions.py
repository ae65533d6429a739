"""Reference answers of the data as completions, in the student's tokens."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.reference_turns import reply_token_ids
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.student.identity import StudentIdentity

logger = logging.getLogger(__name__)


class ReferenceCompletions:
    """Build a rollout of each prompt's reference answer: a ``CompletionSource``.

    The completion is the text as a continuation of the prompt, followed by the token that ends the
    turn. A message with tool calls or thinking, or one of several turns, is rendered by the
    student's template, and dropped with a warning if that is impossible. Completions longer than
    ``max_new_tokens``, or than the student has room for, are dropped: a truncated one would train
    the student to stop anywhere.

    Args:
        scored: whether teachers score the completions.
    """

    def __init__(
        self,
        student: StudentIdentity,
        config: RolloutConfig,
        *,
        max_length: int | None,
        scored: bool,
    ) -> None:
        self._student = student
        self._config = config
        self._max_length = max_length
        self._scored = scored
        self._dropped: Counter[str] = Counter()

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: in order, in batches of ``generation_batch_size``."""
        size = self._config.generation_batch_size
        for place in range(0, len(prompts), size):
            part = prompts[place : place + size]
            yield CompletionBatch(place, await asyncio.to_thread(self.rollouts, part, step=step))

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``; reference answers do not depend on weights."""

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    def rollouts(self, prompts: Sequence[Prompt], *, step: int) -> list[Rollout]:
        """Return one rollout per completion that fits; count the others.

        Raises:
            DataError: when a prompt has no reference answer.
        """
        texts = [_reference_text(prompt) for prompt in prompts if prompt.reply is None]
        encoded = iter(self._student.encoder.encode_batch(texts))
        ending = self._student.table.roles.ending[0]
        rollouts: list[Rollout] = []
        for prompt in prompts:
            try:
                ids = (
                    [*next(encoded), ending]
                    if prompt.reply is None
                    else reply_token_ids(prompt, self._student)
                )
            except DataError as error:
                self._dropped["turn_rejected"] += 1
                logger.warning("%s; dropped", error)
                continue
            rollout = self._rollout(prompt, ids, step)
            rollouts += [] if rollout is None else [rollout]
        return rollouts

    def _rollout(self, prompt: Prompt, ids: list[int], step: int) -> Rollout | None:
        prompt_ids = self._student.prompt_token_ids(prompt.messages, prompt.tools)
        if not self._fits(prompt, len(prompt_ids), len(ids)):
            return None
        return Rollout(
            prompt=prompt if self._scored else replace(prompt, teachers={}),
            prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
            completion=self._student.table.sequence(ids),
            sampled_logprobs=None,
            finish_reason="stop",
            policy_version=step,
        )

    def _fits(self, prompt: Prompt, prompt_tokens: int, completion_tokens: int) -> bool:
        longest, limit = self._config.max_new_tokens, self._max_length
        if completion_tokens <= longest and (
            limit is None or prompt_tokens + completion_tokens <= limit
        ):
            return True
        self._dropped["answer_too_long"] += 1
        logger.warning(
            "prompt %d dropped: reference answer too long (found %d tokens after %d of the prompt, "
            "expected at most %d, and %s in all)",
            prompt.index,
            completion_tokens,
            prompt_tokens,
            longest,
            limit or "any number",
        )
        return False


def _reference_text(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise DataError(f"prompt {prompt.index}: no reference answer", key="data.answer_key")
    return prompt.answer
