"""Rollouts from a generation engine: each completion goes on as soon as it is finished."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.engine import GenerationEngine
from mopd_trainer.rollouts.prompt_encoder import EncodedPrompt, PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.student.student import Student


class StreamedSampler:
    """Has an engine write all of a step's completions at once: a ``CompletionSource``.

    Each has a seed of its own, of the run's seed, the step and its place in it, so that a resumed
    run writes what the uninterrupted one would have written, to the rounding of a batch that is
    another one. Weights change between steps' completions, never under one that is being written.

    Args:
        version: steps behind the student's weights.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        student: Student,
        config: RolloutConfig,
        *,
        seed: int,
        version: int = 0,
    ) -> None:
        self._engine = engine
        self._answerable = PromptEncoder(student, config)
        self._samples = config.samples_per_prompt
        self._seed = seed
        self._version = version
        self._turn = asyncio.Lock()  # a step is written, or weights are pushed

    async def complete(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: one at a time, in the order in which they are finished."""
        asked = self._answerable.encode([p for p in prompts for _ in range(self._samples)])
        async with self._turn:
            writing = [
                asyncio.create_task(self._write(each, step=step, place=place))
                for place, each in enumerate(asked)
            ]
            try:
                for finished in asyncio.as_completed(writing):
                    yield await finished
            finally:
                for task in writing:
                    task.cancel()
                await asyncio.gather(*writing, return_exceptions=True)

    async def push(self, version: int) -> None:
        """See ``CompletionSource``."""
        async with self._turn:
            await self._engine.push()
            self._version = version

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._answerable.pop_dropped()

    async def _write(self, asked: EncodedPrompt, *, step: int, place: int) -> CompletionBatch:
        seed = derived_seed(self._seed, step, place)
        sampled = await self._engine.generate(asked.token_ids, seed=seed)
        return CompletionBatch(
            place, [self._answerable.rollout(asked, sampled, version=self._version)]
        )
