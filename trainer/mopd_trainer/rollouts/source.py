"""``CompletionSource``: where the completions of a step come from, and a mixture of two."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mopd_protocol.samples import Prompt, Rollout

_MIXTURE = 1  # what tells the mixture's random numbers from those of the prompts' order


@dataclass(frozen=True, eq=False)
class CompletionBatch:
    """Completions that were finished together, and where the first of them stands in its step.

    Whatever is finished first, a step's examples are in the order of their places.
    """

    place: int
    rollouts: list[Rollout]


class CompletionSource(Protocol):
    """Completes prompts, some at a time, so that teachers can read some while others are made.

    What it makes is a function of the seed, the step, its prompts and the weights alone.
    """

    def complete(self, prompts: Sequence[Prompt], *, step: int) -> AsyncGenerator[CompletionBatch]:
        """A step's completions, as they are finished; a prompt that cannot be completed has no
        rollout, and is counted."""
        ...

    async def push(self, version: int) -> None:
        """From here on the student's weights of now write: those after ``version`` steps.

        Waits for what is being written with older ones.
        """
        ...

    def pop_dropped(self) -> Counter[str]:
        """Samples dropped since this was last asked, by reason."""
        ...


class Mixture:
    """Some of a step's prompts are answered by the student, the others by the data.

    Over the steps the student's share is ``rollout_share`` exactly, to within one prompt; which of
    a step's prompts are its own is a function of the seed and the step.
    """

    def __init__(
        self,
        rollouts: CompletionSource,
        answers: CompletionSource,
        *,
        rollout_share: float,
        seed: int,
    ) -> None:
        self._rollouts = rollouts
        self._answers = answers
        self._share = rollout_share
        self._seed = seed

    async def complete(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        """See ``CompletionSource``; the data's answers come first: they are there at once."""
        chosen = self._chosen(len(prompts), step)
        own = [prompt for prompt, mine in zip(prompts, chosen, strict=True) if mine]
        given = [prompt for prompt, mine in zip(prompts, chosen, strict=True) if not mine]
        async with aclosing(self._answers.complete(given, step=step)) as answers:
            async for read in answers:
                yield read
        async with aclosing(self._rollouts.complete(own, step=step)) as rollouts:
            async for written in rollouts:
                yield CompletionBatch(len(given) + written.place, written.rollouts)

    async def push(self, version: int) -> None:
        """See ``CompletionSource``."""
        await self._rollouts.push(version)

    def pop_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._answers.pop_dropped() + self._rollouts.pop_dropped()

    def _chosen(self, count: int, step: int) -> list[bool]:
        """Which of a step's prompts the student answers."""
        before, after = round(step * count * self._share), round((step + 1) * count * self._share)
        generator = np.random.default_rng([self._seed, step, _MIXTURE])
        return (generator.permutation(count) < after - before).tolist()
