"""``PromptEncoder``: a step's prompts as the student reads them, without those that fill it up."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.student import Generation, Student

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt in the student's tokens, with room for the longest answer."""

    prompt: Prompt
    token_ids: list[int]


class PromptEncoder:
    """Encodes prompts, counts those that leave no room, and makes rollouts of what was sampled."""

    def __init__(self, student: Student, config: RolloutConfig) -> None:
        self._student = student
        self._config = config
        self._dropped: Counter[str] = Counter()

    def encode(self, prompts: Sequence[Prompt]) -> list[EncodedPrompt]:
        """Those that leave room for an answer; the others are counted."""
        encoded = [EncodedPrompt(p, self._student.prompt_token_ids(p.messages)) for p in prompts]
        return [each for each in encoded if self._fits(each)]

    def rollout(self, asked: EncodedPrompt, sampled: Generation, *, version: int) -> Rollout:
        """What was written, under the weights after ``version`` steps."""
        completion = self._student.table.sequence(sampled.token_ids)
        return Rollout(
            prompt=asked.prompt,
            prompt_token_ids=np.array(asked.token_ids, dtype=np.int32),
            completion=completion,
            sampled_logprobs=np.array(sampled.logprobs, dtype=np.float32),
            finish_reason="stop" if completion.ends_turn else "length",
            policy_version=version,
            student_topk_ids=sampled.topk_ids,
        )

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        taken, self._dropped = self._dropped, Counter()
        return taken

    def _fits(self, asked: EncodedPrompt) -> bool:
        limit = self._student.max_length
        tokens = len(asked.token_ids)
        if limit is None or tokens + self._config.max_new_tokens <= limit:
            return True
        self._dropped["prompt_too_long"] += 1
        logger.warning(
            "prompt %d dropped: %d tokens and %d for the answer, the student takes %d",
            asked.prompt.index,
            tokens,
            self._config.max_new_tokens,
            limit,
        )
        return False
