"""Rollouts: the student answers prompts, one generation batch at a time."""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.completion_source import CompletionBatch
from mopd_trainer.config import RolloutConfig
from mopd_trainer.seeds import derived_seed
from mopd_trainer.student import Student

logger = logging.getLogger(__name__)


class Sampler:
    """Writes completions with the student's current weights: a ``CompletionSource``.

    What is sampled depends on the seed, the step and the batch's number alone, so that a resumed
    run writes what the uninterrupted one would have written.
    """

    def __init__(
        self, student: Student, config: RolloutConfig, *, seed: int, keep_topk: int = 0
    ) -> None:
        self._student = student
        self._keep_topk = keep_topk  # of the student's own ids at each token, for its teachers
        self._config = config
        self._seed = seed
        self.dropped: Counter[str] = Counter()  # reason -> samples, since it was last taken

    def batches(self, prompts: Sequence[Prompt], *, step: int) -> list[CompletionBatch]:
        """A step's prompts, each as often as it is sampled, cut into generation batches."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        size = self._config.generation_batch_size
        parts = [repeated[at : at + size] for at in range(0, len(repeated), size)]
        return [
            partial(self.sample, part, step=step, batch=number) for number, part in enumerate(parts)
        ]

    def take_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        taken, self.dropped = self.dropped, Counter()
        return taken

    def sample(self, prompts: Sequence[Prompt], *, step: int, batch: int) -> list[Rollout]:
        """One rollout for each prompt that leaves room for an answer; the others are counted."""
        encoded = [(p, self._student.prompt_token_ids(p.messages)) for p in prompts]
        fitting = [(p, ids) for p, ids in encoded if self._fits(p, ids)]
        if not fitting:
            return []
        seed = derived_seed(self._seed, step, batch)
        sampled = self._student.generate(
            [ids for _, ids in fitting], self._config, seed=seed, keep_topk=self._keep_topk
        )
        rollouts: list[Rollout] = []
        for (prompt, ids), answer in zip(fitting, sampled, strict=True):
            completion = self._student.table.sequence(answer.token_ids)
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    prompt_token_ids=np.array(ids, dtype=np.int32),
                    completion=completion,
                    sampled_logprobs=np.array(answer.logprobs, dtype=np.float32),
                    finish_reason="stop" if completion.ends_turn else "length",
                    policy_version=step,
                    student_topk_ids=answer.topk_ids,
                )
            )
        return rollouts

    def _fits(self, prompt: Prompt, token_ids: Sequence[int]) -> bool:
        limit = self._student.max_length
        needed = len(token_ids) + self._config.max_new_tokens
        if limit is None or needed <= limit:
            return True
        self.dropped["prompt_too_long"] += 1
        logger.warning(
            "prompt %d dropped: %d tokens and %d for the answer, the student takes %d",
            prompt.index,
            len(token_ids),
            self._config.max_new_tokens,
            limit,
        )
        return False
