"""Answers: the data's own completions, in the student's tokens, in place of rollouts."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.student.identity import StudentIdentity

logger = logging.getLogger(__name__)


class AnswerReader:
    """Makes a rollout of each prompt's reference answer: a ``CompletionSource``.

    An answer is what the student would have to write: the text as a continuation of the prompt,
    and the token that ends its turn. Answers longer than a rollout may be, and those that the
    student has no room for, are dropped: half an answer would teach it to stop anywhere.

    Args:
        judged: whether teachers read the answers.
    """

    def __init__(
        self,
        student: StudentIdentity,
        config: RolloutConfig,
        *,
        max_length: int | None,
        judged: bool,
    ) -> None:
        self._student = student
        self._config = config
        self._max_length = max_length
        self._judged = judged
        self.dropped: Counter[str] = Counter()  # reason -> samples, since it was last taken

    async def complete(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: in order, in batches of a generation batch's size."""
        size = self._config.generation_batch_size
        for place in range(0, len(prompts), size):
            part = prompts[place : place + size]
            yield CompletionBatch(place, await asyncio.to_thread(self.read, part, step=step))

    async def push(self, version: int) -> None:
        """See ``CompletionSource``; answers are the same under any weights."""

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        taken, self.dropped = self.dropped, Counter()
        return taken

    def read(self, prompts: Sequence[Prompt], *, step: int) -> list[Rollout]:
        """One rollout for each answer that is not too long; the others are counted.

        Raises:
            DataError: when a prompt has no answer.
        """
        encoded = self._student.encoder.encode_batch([_answer(prompt) for prompt in prompts])
        read = [self._rollout(p, ids, step) for p, ids in zip(prompts, encoded, strict=True)]
        return [rollout for rollout in read if rollout is not None]

    def _rollout(self, prompt: Prompt, answer_ids: list[int], step: int) -> Rollout | None:
        prompt_ids = self._student.prompt_token_ids(prompt.messages)
        ids = [*answer_ids, self._student.table.roles.ending[0]]
        if not self._fits(prompt, len(prompt_ids), len(ids)):
            return None
        return Rollout(
            prompt=prompt if self._judged else replace(prompt, teachers={}),
            prompt_token_ids=np.array(prompt_ids, dtype=np.int32),
            completion=self._student.table.sequence(ids),
            sampled_logprobs=None,
            finish_reason="stop",
            policy_version=step,
        )

    def _fits(self, prompt: Prompt, prompt_tokens: int, answer_tokens: int) -> bool:
        longest, limit = self._config.max_new_tokens, self._max_length
        if answer_tokens <= longest and (limit is None or prompt_tokens + answer_tokens <= limit):
            return True
        self.dropped["answer_too_long"] += 1
        logger.warning(
            "prompt %d dropped: %d tokens and %d of its answer, which may have %d; the student "
            "takes %s",
            prompt.index,
            prompt_tokens,
            answer_tokens,
            longest,
            limit or "any number",
        )
        return False


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise DataError(f"prompt {prompt.index} has no reference answer to learn from")
    return prompt.answer
