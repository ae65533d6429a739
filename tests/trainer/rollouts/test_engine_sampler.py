"""Completions of a generation engine: yielded when finished, with the pushed weights."""

import asyncio
from collections.abc import Sequence

import pytest

from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.data.seeds import derived_seed
from mopd_trainer.rollouts.engine_sampler import EngineSampler
from mopd_trainer.student.generation import Generation
from tests.trainer.students import MESSAGES, student_of

pytestmark = pytest.mark.anyio

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(3)]
CONFIG = RolloutConfig(max_new_tokens=4, samples_per_prompt=2)
STUDENT = student_of()


class ManualEngine:
    """A ``GenerationEngine`` that finishes a completion when a test resolves its future."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.futures: list[asyncio.Future[None]] = []
        self.pushes = 0
        self.cancelled = 0

    async def generate(self, prompt_ids: Sequence[int], *, seed: int) -> Generation:
        """One token, which is the number of the completion."""
        number = len(self.seeds)
        self.seeds.append(seed)
        self.futures.append(asyncio.get_running_loop().create_future())
        try:
            await self.futures[number]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Generation([number + 10], [-1.0])

    async def push_weights(self) -> None:
        """Counts it."""
        assert all(future.done() for future in self.futures)
        self.pushes += 1


def sampler_of(engine: ManualEngine) -> EngineSampler:
    return EngineSampler(engine, STUDENT, CONFIG, seed=7)


async def test_a_completion_is_yielded_when_finished_with_its_place() -> None:
    engine = ManualEngine()
    completed = sampler_of(engine).sample(PROMPTS, step=4)
    actual: list[tuple[int, int, int]] = []
    first = asyncio.ensure_future(anext(completed))
    await asyncio.sleep(0.0)
    while len(engine.futures) < 6:
        await asyncio.sleep(0.0)
    for number in (3, 0, 5, 1, 2, 4):
        engine.futures[number].set_result(None)
        each = await first if first else await anext(completed)
        first = None
        (rollout,) = each.rollouts
        actual.append((each.place, rollout.prompt.index, int(rollout.completion.token_ids[0])))
    await completed.aclose()
    assert actual == [(n, n // 2, n + 10) for n in (3, 0, 5, 1, 2, 4)]
    assert engine.seeds == [derived_seed(7, 4, place) for place in range(6)]
    assert len(set(engine.seeds)) == 6


async def test_weights_are_pushed_when_nothing_is_being_written() -> None:
    engine = ManualEngine()
    sampler = sampler_of(engine)
    completed = sampler.sample(PROMPTS[:1], step=0)
    first = asyncio.ensure_future(anext(completed))
    while len(engine.futures) < 2:
        await asyncio.sleep(0.0)
    pushing = asyncio.create_task(sampler.push_weights(3))
    for future in engine.futures:
        future.set_result(None)
    old = [await first, *[each async for each in completed]]
    await pushing
    assert engine.pushes == 1
    engine_again = sampler.sample(PROMPTS[:1], step=1)
    new = asyncio.ensure_future(anext(engine_again))
    while len(engine.futures) < 4:
        await asyncio.sleep(0.0)
    engine.futures[2].set_result(None)
    assert [each.rollouts[0].policy_version for each in old] == [0, 0]
    assert (await new).rollouts[0].policy_version == 3
    await engine_again.aclose()
    assert engine.cancelled == 1  # the completion that is no longer awaited


async def test_a_prompt_without_room_is_counted_and_not_submitted() -> None:
    engine = ManualEngine()
    config = CONFIG.model_copy(update={"max_new_tokens": 1000})
    sampler = EngineSampler(engine, STUDENT, config, seed=7)
    assert [each async for each in sampler.sample(PROMPTS, step=0)] == []
    assert sampler.pop_dropped() == {"prompt_too_long": 6}
    assert not engine.seeds
