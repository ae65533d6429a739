"""Rollouts by workers elsewhere: each has the whole student, and writes a batch at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.prompt_encoder import PromptEncoder
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.student.student import Generation, Student

#: Parameter name -> float32, whole, of all that is trained.
Weights = Mapping[str, NDArray[np.float32]]


class RolloutWorkers(Protocol):
    """Workers, wherever they are. Which of them writes a batch changes nothing about it."""

    async def push(self, version: int, weights: Weights) -> None:
        """What is begun from here on is written with these weights."""
        ...

    async def write(
        self, prompts: Sequence[Sequence[int]], *, seed: int
    ) -> tuple[list[Generation], int]:
        """A completion of each prompt, and the version of the weights that wrote them; the same
        seed and weights write the same, also where a worker dies over it.

        Raises:
            MopdError: when no worker is left.
        """
        ...

    def take_restarts(self) -> int:
        """How often a worker had to be started again since this was last asked."""
        ...


class WorkerSampler:
    """Has workers write a step's generation batches, as many at once as there are workers: a
    ``CompletionSource``.

    Batches and their seeds are those of ``Sampler``, so that the completions are too. Weights
    change between batches.
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
        self._answerable = PromptEncoder(student, config)
        self._config = config
        self._seed = seed

    async def complete(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``: a batch at a time, in the order in which they are finished."""
        repeated = [p for p in prompts for _ in range(self._config.samples_per_prompt)]
        size = self._config.generation_batch_size
        writing = [
            asyncio.create_task(
                self._write(repeated[place : place + size], step=step, batch=batch, place=place)
            )
            for batch, place in enumerate(range(0, len(repeated), size))
        ]
        try:
            for finished in asyncio.as_completed(writing):
                yield await finished
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    async def push(self, version: int) -> None:
        """See ``CompletionSource``; what is being written goes on with the weights it began
        with."""
        await push_weights(self._workers, self._student, version)

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._answerable.pop_dropped()

    async def _write(
        self, prompts: Sequence[Prompt], *, step: int, batch: int, place: int
    ) -> CompletionBatch:
        asked = self._answerable.encode(prompts)
        if not asked:
            return CompletionBatch(place, [])
        seed = derived_seed(self._seed, step, batch)
        written, version = await self._workers.write([each.token_ids for each in asked], seed=seed)
        return CompletionBatch(
            place,
            [
                self._answerable.rollout(each, sampled, version=version)
                for each, sampled in zip(asked, written, strict=True)
            ],
        )


class WorkerGeneration:
    """Workers as a ``GenerationEngine``: for engines that batch by themselves."""

    def __init__(self, workers: RolloutWorkers, student: Student, *, version: int) -> None:
        self._workers = workers
        self._student = student
        self._version = version

    async def generate(self, prompt_ids: Sequence[int], *, seed: int) -> Generation:
        """See ``GenerationEngine``."""
        (sampled,), _ = await self._workers.write([prompt_ids], seed=seed)
        return sampled

    async def push(self) -> None:
        """See ``GenerationEngine``. Every push is of another version than the one before."""
        await push_weights(self._workers, self._student, self._version)
        self._version += 1


async def push_weights(workers: RolloutWorkers, student: Student, version: int) -> None:
    """Has workers write with the student's weights of now."""
    await workers.push(version, await asyncio.to_thread(_weights_of, student))


def _weights_of(student: Student) -> Weights:
    """A copy: workers may read it while the student is trained."""
    return {
        name: parameter.detach().cpu().float().numpy().copy()
        for name, parameter in student.whole_model().named_parameters()
        if parameter.requires_grad
    }
