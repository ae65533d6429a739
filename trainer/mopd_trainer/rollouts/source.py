"""``CompletionSource``: where the completions of a step come from; and a mixture of two."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mopd_protocol.samples import Prompt, Rollout
from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.student.generation import Generation

_MIXTURE = 1  # seed offset: keeps the mixture's RNG stream independent of prompt shuffling


@dataclass(frozen=True, eq=False)
class CompletionBatch:
    """Completions that were completed together, and the index of the first in its step.

    Examples are ordered by this index, whichever batch is complete first.
    """

    place: int
    rollouts: list[Rollout]


async def in_order_of_completion(
    calls: Iterable[Coroutine[Any, Any, CompletionBatch]],
) -> AsyncGenerator[CompletionBatch]:
    """Run calls concurrently and yield their results; closing cancels the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        for completed in asyncio.as_completed(tasks):
            yield await completed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class CompletionGenerator(Protocol):
    """Generate completions with the sampler's weights, outside the steps of a run."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        """Return one completion per prompt, given in the student's tokens.

        A function of prompts, settings, seed and weights; later steps do not depend on it.
        """
        ...

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``."""
        ...


class CompletionSource(Protocol):
    """Complete prompts in batches, so that the first are scored while the last are sampled.

    Completions are a function of the seed, the step, its prompts and the weights.
    """

    def sample(self, prompts: Sequence[Prompt], *, step: int) -> AsyncGenerator[CompletionBatch]:
        """Yield the batches of a step as they complete; prompts without a completion are counted
        as dropped."""
        ...

    async def push_weights(self, version: int) -> None:
        """Switch to the student's current weights, those after ``version`` steps.

        Waits for completions in progress with older weights.
        """
        ...

    def pop_dropped(self) -> Counter[str]:
        """Return and reset the samples dropped so far, by reason."""
        ...


class Mixture:
    """Sample some of a step's prompts and take the reference answers of the others.

    Over the steps the share of sampled prompts is ``rollout_share`` to within one prompt. The
    choice is a function of the seed and the step.
    """

    def __init__(
        self,
        rollouts: CompletionSource,
        reference_completions: CompletionSource,
        *,
        rollout_share: float,
        seed: int,
    ) -> None:
        self._rollouts = rollouts
        self._reference_completions = reference_completions
        self._share = rollout_share
        self._seed = seed

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``; reference answers come first, without waiting."""
        chosen = self._chosen(len(prompts), step)
        sampled = [p for p, is_sampled in zip(prompts, chosen, strict=True) if is_sampled]
        references = [p for p, is_sampled in zip(prompts, chosen, strict=True) if not is_sampled]
        async with aclosing(self._reference_completions.sample(references, step=step)) as batches:
            async for batch in batches:
                yield batch
        async with aclosing(self._rollouts.sample(sampled, step=step)) as batches:
            async for batch in batches:
                yield CompletionBatch(len(references) + batch.place, batch.rollouts)

    async def push_weights(self, version: int) -> None:
        """See ``CompletionSource``."""
        await self._rollouts.push_weights(version)

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._reference_completions.pop_dropped() + self._rollouts.pop_dropped()

    def _chosen(self, count: int, step: int) -> list[bool]:
        """Return for each prompt of the step whether it is sampled."""
        before, after = round(step * count * self._share), round((step + 1) * count * self._share)
        generator = np.random.default_rng([self._seed, step, _MIXTURE])
        return (generator.permutation(count) < after - before).tolist()
