"""Rollouts in this process: the student answers prompts, one generation batch at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.prompt_encoder import PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.rollouts.writing_student import WritingStudent
from mopd_trainer.student.student import Student


class Sampler:
    """Writes completions with transformers: a ``CompletionSource``.

    What is sampled depends on the seed, the step, the batch's number and the weights alone, so
    that a resumed run writes what the uninterrupted one would have written.

    Args:
        keep_topk: of the student's own ids at each token, for its teachers.
        version: steps behind the student's weights.
    """

    def __init__(
        self,
        student: Student,
        config: RolloutConfig,
        *,
        seed: int,
        keep_topk: int = 0,
        version: int = 0,
    ) -> None:
        self._writing = WritingStudent(student, apart=config.max_staleness > 0)
        self._answerable = PromptEncoder(student, config)
        self._keep_topk = keep_topk
        self._config = config
        self._seed = seed
        self._version = version
        self._turn = asyncio.Lock()  # a batch is written, or weights are pushed

    async def complete(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: every prompt as often as it is sampled."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        size = self._config.generation_batch_size
        for batch, place in enumerate(range(0, len(repeated), size)):
            part = repeated[place : place + size]
            async with self._turn:
                rollouts = await asyncio.to_thread(self.sample, part, step=step, batch=batch)
            yield CompletionBatch(place, rollouts)

    async def push(self, version: int) -> None:
        """See ``CompletionSource``."""
        async with self._turn:
            await asyncio.to_thread(self._writing.load_weights)
            self._version = version

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._answerable.pop_dropped()

    def sample(self, prompts: Sequence[Prompt], *, step: int, batch: int) -> list[Rollout]:
        """One rollout for each prompt that leaves room for an answer; the others are counted."""
        asked = self._answerable.encode(prompts)
        if not asked:
            return []
        sampled = self._writing.student.generate(
            [each.token_ids for each in asked],
            self._config,
            seed=derived_seed(self._seed, step, batch),
            keep_topk=self._keep_topk,
        )
        return [
            self._answerable.rollout(each, answer, version=self._version)
            for each, answer in zip(asked, sampled, strict=True)
        ]
