"""Requests grouped by teacher, counted in swaps of a real pool of models."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.rollouts.source import CompletionBatch
from mopd_trainer.teachers.scoring import RolloutScorer
from mopd_trainer.teachers.turns import TeacherTurns
from tests.server.pool.test_teacher_pool import folders, pooled
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.teachers.test_scoring import IDENTITY, written

__all__ = ["folders"]
pytestmark = pytest.mark.anyio

NAMES = ("qwen", "llama", "gpt_neox")
STEPS, BATCHES = 2, 6
PROMPTS = [written("", place).prompt for place in range(BATCHES)]


class SlowSource:
    """A completion for each teacher in turn, after the scores of the previous one, if requested."""

    def __init__(self, scorer: RolloutScorer, *, waits: bool) -> None:
        self._turns = scorer._turns
        self._waits = waits
        self._submitted: Counter[str] = Counter()
        self._scored: Counter[str] = Counter()
        score = scorer._pool.score

        async def counted(name: str, *sequences: Any, **options: Any) -> Any:
            scores = await score(name, *sequences, **options)
            self._scored[name] += 1
            return scores

        scorer._pool.score = counted  # type: ignore[method-assign]

    async def sample(
        self, prompts: Sequence[Prompt], *, step: int
    ) -> AsyncGenerator[CompletionBatch]:
        for place in range(BATCHES):
            name = NAMES[place % len(NAMES)]
            self._submitted[name] += 1
            yield CompletionBatch(place, [written(f"{step} {place}", place, **{name: 1.0})])
            await asyncio.sleep(0)  # the scoring task begins
            sent = not self._waits or self._turns._services[name].current == name
            while sent and self._scored[name] < self._submitted[name]:
                await asyncio.sleep(0.001)

    def pop_dropped(self) -> Counter[str]:
        return Counter()


async def test_a_step_swaps_to_each_teacher_once(folders: dict[str, Path]) -> None:
    """Without turns, every completion of another teacher costs a swap."""
    pool, app = await asyncio.to_thread(
        pooled, folders, 1
    )  # the last one is resident after the warm-up
    teachers = {
        name: (Recorded(app), teacher_config(url=f"http://pool/teachers/{name}"))  # type: ignore[arg-type]
        for name in NAMES
    }

    async def swaps(*, grouped: bool) -> int:
        before = sum(each.swaps for each in pool.residency.teachers.values())
        async with scorer_of(IDENTITY, teachers) as scorer:
            if not grouped:
                scorer._turns = TeacherTurns({})
            source: Any = SlowSource(scorer, waits=grouped)
            for step in range(STEPS):
                examples, _ = await collect(PROMPTS, source, scorer, step)
                assert [each.rollout.prompt.index for each in examples] == [*range(BATCHES)]
        return sum(each.swaps for each in pool.residency.teachers.values()) - before

    assert await swaps(grouped=False) == STEPS * BATCHES
    assert await swaps(grouped=True) == len(NAMES) + (STEPS - 1) * (len(NAMES) - 1)


async def test_turns_are_in_order_and_a_cancelled_one_is_passed_on() -> None:
    turns = TeacherTurns({name: [f"http://pool/teachers/{name}"] for name in "ab"})
    finish, order = [asyncio.Event() for _ in range(5)], []

    async def request(name: str, number: int) -> None:
        async with turns.turn(name):
            order.append(number)
            await finish[number].wait()

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(request(name, at)) for at, name in enumerate("abab")]
    await until(lambda: order == [0, 2])  # together
    tasks.append(asyncio.create_task(request("a", 4)))
    await until(lambda: "a" in turns._services["a"].waiting)  # behind those of b
    tasks[1].cancel()
    finish[0].set()
    finish[2].set()
    await until(lambda: turns._services["a"].current == "b")
    tasks[3].cancel()  # its turn has come
    finish[4].set()
    await tasks[4]
    assert order[-1] == 4
    assert turns._services["a"].running == 0
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_teachers_of_other_services_do_not_wait() -> None:
    urls = {"a": ["http://one/teachers/a"], "b": ["http://two/teachers/b"], "c": ["http://c"]}
    turns = TeacherTurns(urls)
    async with turns.turn("a"), turns.turn("b"), turns.turn("c"):
        for name in urls:
            await turns.sampled(name, asyncio.Event())
