"""Rollouts from a generation engine: each completion is scored as soon as it is complete."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.engine import GenerationEngine
from mopd_trainer.rollouts.prompt_encoder import EncodedPrompt, PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch, in_order_of_completion
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student


class EngineSampler:
    """Sample all completions of a step at once with an engine: a ``CompletionSource``.

    Each completion has a seed derived from the run's seed, the step and its index, so that a
    resumed run samples what the uninterrupted run would have sampled, up to the rounding of
    different batches. Weights change between steps, never during a completion.

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
        self._encoder = PromptEncoder(student, config)
        self._samples = config.samples_per_prompt
        self._seed = seed
        self._version = version
        self._lock = asyncio.Lock()  # locked while a step is sampled or weights are pushed

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: one completion at a time, in order of completion."""
        encoded = self._encoder.encode([p for p in prompts for _ in range(self._samples)])
        async with self._lock:
            calls = (self._generate(each, step=step, place=n) for n, each in enumerate(encoded))
            async with aclosing(in_order_of_completion(calls)) as batches:
                async for batch in batches:
                    yield batch

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        """See ``CompletionGenerator``; each completion has its seed."""
        async with self._lock:
            return await asyncio.gather(
                *[
                    self._engine.generate(ids, seed=derived_seed(seed, place), settings=settings)
                    for place, ids in enumerate(prompts)
                ]
            )

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``."""
        async with self._lock:
            await self._engine.push_weights()
            self._version = version

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._encoder.pop_dropped()

    async def _generate(self, prompt: EncodedPrompt, *, step: int, place: int) -> CompletionBatch:
        seed = derived_seed(self._seed, step, place)
        generation = await self._engine.generate(prompt.token_ids, seed=seed)
        return CompletionBatch(
            place, [self._encoder.rollout(prompt, generation, version=self._version)]
        )
