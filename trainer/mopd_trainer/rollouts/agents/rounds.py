"""``Rounds``: sample the next turns of several trajectories together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from mopd_trainer.config.rollout import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.source import CompletionGenerator
from mopd_trainer.student.generation import Generation


@dataclass(frozen=True, eq=False)
class _Request:
    prompt_ids: Sequence[int]
    sample: int
    result: asyncio.Future[tuple[Generation, int]]


class Rounds:
    """Sample a round once every active trajectory waits for a turn, in the order of their numbers.

    Completions are thus a function of the seed, the conversations and the weights, however long the
    tools take.

    Args:
        members: number of trajectories; None: a round samples what waits when the last one is
            complete.
    """

    def __init__(
        self,
        generator: CompletionGenerator,
        config: RolloutConfig,
        *,
        seed: int,
        weights: "Weights",
        members: int | None = None,
    ) -> None:
        self._generator = generator
        self._config = config
        self._seed = seed
        self._weights = weights
        self._active = members
        self._waiting: list[_Request] = []
        self._round = 0
        self._running: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        """Error of the sampler, which an agent may have caught."""

    async def generate(self, prompt_ids: Sequence[int], sample: int) -> tuple[Generation, int]:
        """Return a completion and its policy version; see ``Generate``."""
        request = _Request(prompt_ids, sample, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._start()
        return await request.result

    def leave(self) -> None:
        """Remove a trajectory that is complete; the others no longer wait for it."""
        assert self._active is not None
        self._active -= 1
        self._start()

    async def close(self) -> None:
        """Cancel the round that is being sampled."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _start(self) -> None:
        self._waiting = [each for each in self._waiting if not each.result.done()]
        complete = self._active is None or len({r.sample for r in self._waiting}) >= self._active
        if self._waiting and complete and self._running is None:
            self._running = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        batch, self._waiting = sorted(self._waiting, key=lambda each: each.sample), []
        seed = derived_seed(self._seed, self._round)
        self._round += 1
        try:
            async with self._weights.lock:
                version = self._weights.version
                generations = await self._generator.generate(
                    [each.prompt_ids for each in batch], self._config, seed=seed
                )
        except Exception as error:  # every trajectory of the round fails with it
            self.failure = error
            for each in batch:
                if not each.result.done():
                    each.result.set_exception(error)
        else:
            for each, generation in zip(batch, generations, strict=True):
                if not each.result.done():
                    each.result.set_result((generation, version))
        self._running = None
        self._start()


class Weights:
    """Version of the sampler's weights; locked while a round is sampled or weights are pushed."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.lock = asyncio.Lock()
