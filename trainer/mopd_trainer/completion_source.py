"""``CompletionSource``: where the completions of a step come from, and a mixture of two."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mopd_protocol.samples import Prompt, Rollout

#: Makes one batch of completions when it is called, from any thread.
CompletionBatch = Callable[[], list[Rollout]]

_MIXTURE = 1  # what tells the mixture's random numbers from those of the prompts' order


class CompletionSource(Protocol):
    """Completes prompts, a batch at a time, so that teachers can read one while the next is made.

    What it makes is a function of the seed, the step and its prompts alone.
    """

    def batches(self, prompts: Sequence[Prompt], *, step: int) -> list[CompletionBatch]:
        """The work that completes a step's prompts, in order; a prompt that cannot be completed
        has no rollout, and is counted."""
        ...

    def take_dropped(self) -> Counter[str]:
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

    def batches(self, prompts: Sequence[Prompt], *, step: int) -> list[CompletionBatch]:
        """See ``CompletionSource``; the data's answers come first: they are there at once."""
        chosen = self._chosen(len(prompts), step)
        own = [prompt for prompt, mine in zip(prompts, chosen, strict=True) if mine]
        given = [prompt for prompt, mine in zip(prompts, chosen, strict=True) if not mine]
        return [
            *self._answers.batches(given, step=step),
            *self._rollouts.batches(own, step=step),
        ]

    def take_dropped(self) -> Counter[str]:
        """See ``CompletionSource``."""
        return self._answers.take_dropped() + self._rollouts.take_dropped()

    def _chosen(self, count: int, step: int) -> list[bool]:
        """Which of a step's prompts the student answers."""
        before, after = round(step * count * self._share), round((step + 1) * count * self._share)
        generator = np.random.default_rng([self._seed, step, _MIXTURE])
        return (generator.permutation(count) < after - before).tolist()
