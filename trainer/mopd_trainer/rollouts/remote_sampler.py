"""Rollouts from worker processes, each with an unsharded student."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.prompt_encoder import PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch, in_order_of_completion
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.student import Student

#: Parameter name -> float32, unsharded, of all trained parameters.
Weights = Mapping[str, NDArray[np.float32]]


class RolloutWorkers(Protocol):
    """Worker processes; results do not depend on which worker generates a batch."""

    async def push_weights(self, version: int, weights: Weights) -> None:
        """Use these weights for batches that start later."""
        ...

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        settings: RolloutConfig | None = None,
    ) -> tuple[list[Generation], int]:
        """Return a completion per prompt, and the version of the weights used.

        A function of prompts, seed, settings and weights, also when a worker crashes and the batch
        is retried.

        Args:
            settings: default: those of the run.

        Raises:
            MopdError: when no worker is left.
        """
        ...

    def take_restarts(self) -> int:
        """Return and reset the number of worker restarts."""
        ...


class WorkerSampler:
    """Sample a step's batches on workers, as many at once as there are workers: a
    ``CompletionSource``.

    Batches and their seeds equal those of ``Sampler``, and so do the completions. Weights change
    between batches.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        student: Student,
        config: RolloutConfig,
        *,
        seed: int,
    ) -> None:
        self._workers = workers
        self._student = student
        self._encoder = PromptEncoder(student, config)
        self._config = config
        self._seed = seed

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: a batch at a time, in order of completion."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        size = self._config.generation_batch_size
        calls = (
            self._generate(repeated[place : place + size], step=step, batch=number, place=place)
            for number, place in enumerate(range(0, len(repeated), size))
        )
        async with aclosing(in_order_of_completion(calls)) as batches:
            async for batch in batches:
                yield batch

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        """See ``CompletionGenerator``: batches and seeds of ``Sampler``."""
        size = settings.generation_batch_size
        batches = await asyncio.gather(
            *[
                self._workers.generate(
                    prompts[place : place + size],
                    seed=derived_seed(seed, place),
                    settings=settings,
                )
                for place in range(0, len(prompts), size)
            ]
        )
        return [generation for generations, _ in batches for generation in generations]

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``; batches in progress keep the weights they started with."""
        await push_to_workers(self._workers, self._student, version)

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._encoder.pop_dropped()

    async def _generate(
        self, prompts: Sequence[Prompt], *, step: int, batch: int, place: int
    ) -> CompletionBatch:
        encoded = self._encoder.encode(prompts, first=place)
        if not encoded:
            return CompletionBatch(place, [])
        seed = derived_seed(self._seed, step, batch)
        token_ids = [prompt.token_ids for prompt in encoded]
        generations, version = await self._workers.generate(token_ids, seed=seed)
        return CompletionBatch(
            place,
            [
                self._encoder.rollout(prompt, generation, version=version)
                for prompt, generation in zip(encoded, generations, strict=True)
            ],
        )


class WorkerEngine:
    """Workers as a ``GenerationEngine``, for engines that batch concurrent requests."""

    def __init__(self, workers: RolloutWorkers, student: Student, *, version: int) -> None:
        self._workers = workers
        self._student = student
        self._version = version

    async def generate(
        self, prompt_ids: Sequence[int], *, seed: int, settings: RolloutConfig | None = None
    ) -> Generation:
        """See ``GenerationEngine``."""
        call = self._workers.generate([prompt_ids], seed=seed, settings=settings)
        (generation,), _ = await call
        return generation

    async def push_weights(self) -> None:
        """See ``GenerationEngine``; each push has the next version."""
        await push_to_workers(self._workers, self._student, self._version)
        self._version += 1

    def close(self) -> None:
        """See ``GenerationEngine``; the run ends the workers."""


async def push_to_workers(workers: RolloutWorkers, student: Student, version: int) -> None:
    """Push a copy of the trained weights, which workers may load while the student is trained."""

    def trained_weights() -> Weights:
        return {
            name: parameter.detach().cpu().float().numpy().copy()
            for name, parameter in student.full_model().named_parameters()
            if parameter.requires_grad
        }

    await workers.push_weights(version, await asyncio.to_thread(trained_weights))
