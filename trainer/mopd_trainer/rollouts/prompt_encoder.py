"""``PromptEncoder``: tokenize a step's prompts, drop those without room for a completion."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mopd_protocol.samples import Prompt, Rollout
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """A prompt in the student's tokens, with room for the longest completion."""

    prompt: Prompt
    token_ids: list[int]
    sample: int = 0  # number of the completion in its step


class PromptEncoder:
    """Encode prompts, count the dropped ones, and build rollouts from generations."""

    def __init__(self, student: Student, config: RolloutConfig) -> None:
        self._student = student
        self._config = config
        self._dropped: Counter[str] = Counter()

    def encode(self, prompts: Sequence[Prompt], *, first: int = 0) -> list[EncodedPrompt]:
        """Return the prompts that leave room for a completion; count the others.

        Args:
            first: number of the first prompt's completion in its step.
        """
        encoded = [
            EncodedPrompt(p, self._student.prompt_token_ids(p.messages, p.tools), sample)
            for sample, p in enumerate(prompts, first)
        ]
        return [prompt for prompt in encoded if self._fits(prompt)]

    def rollout(self, prompt: EncodedPrompt, generation: Generation, *, version: int) -> Rollout:
        """Build the rollout of a generation under the weights after ``version`` steps."""
        return sampled_rollout(prompt, generation, self._student.table, version=version)

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    def _fits(self, prompt: EncodedPrompt) -> bool:
        limit = self._student.max_length
        tokens = len(prompt.token_ids)
        if limit is None or tokens + self._config.max_new_tokens <= limit:
            return True
        self._dropped["prompt_too_long"] += 1
        logger.warning(
            "prompt %d dropped: too long (found %d tokens and max_new_tokens %d, expected at most "
            "%d in all)",
            prompt.prompt.index,
            tokens,
            self._config.max_new_tokens,
            limit,
        )
        return False


def sampled_rollout(
    prompt: EncodedPrompt, generation: Generation, table: TokenTable, *, version: int
) -> Rollout:
    """Return the rollout of a generation under the weights after ``version`` steps.

    Args:
        table: the student's.
    """
    completion = table.sequence(generation.token_ids)
    return Rollout(
        prompt=prompt.prompt,
        prompt_token_ids=np.array(prompt.token_ids, dtype=np.int32),
        completion=completion,
        sampled_logprobs=np.array(generation.logprobs, dtype=np.float32),
        finish_reason="stop" if completion.ends_turn else "length",
        policy_version=version,
        student_topk_ids=generation.topk_ids,
        sample=prompt.sample,
        entropies=generation.entropies,
    )
