"""Tests of direct scoring with an asynchronous engine that the tests control."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    EngineCrashError,
    EngineDescription,
    EngineTimes,
    ScoringTask,
)
from mopd_server.scoring.direct_scoring import DirectScorer
from mopd_server.service_error import ServiceError
from tests.server.tiny_teachers import short_task

TIMES = EngineTimes(0.25, 0.5)


class ControlledEngine(AsyncEngine):
    """Finishes a sequence when the test sets its future, by the name of the task."""

    def __init__(self) -> None:
        self.options: dict[int, tuple[int, float]] = {}  # name -> top_k, temperature
        self.futures: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []
        self.callback: Callable[[str], None] | None = None
        self.closed = False

    @property
    def description(self) -> EngineDescription:
        raise NotImplementedError

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        name = int(task.prompt_ids[0])
        self.options[name] = (top_k, temperature)
        self.futures[name] = asyncio.get_running_loop().create_future()
        try:
            await self.futures[name]
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        zeros = np.zeros(1, dtype=np.float32)
        ids = np.array([[name]], dtype=np.int32)
        return TopKLogprobs(ids, zeros[:, None], zeros, np.log(zeros + 1e-9)), TIMES

    def on_crash(self, callback: Callable[[str], None]) -> None:
        self.callback = callback

    def close(self) -> None:
        self.closed = True


class Trial:
    """A scorer and its callbacks."""

    def __init__(self, queue_tokens: int = 1000, engine_tokens: int = 1000) -> None:
        self.engine = ControlledEngine()
        self.crashes: list[str] = []
        self.cancelled: list[int] = []
        self.scorer = DirectScorer(
            self.engine,
            engine_tokens=engine_tokens,
            max_queue_tokens=queue_tokens,
            on_crash=self.crashes.append,
            on_cancelled=self.cancelled.append,
        )

    @property
    def queue(self) -> tuple[int, int]:
        """Sequences and tokens in the queue."""
        return self.scorer.queued_sequences, self.scorer.queued_tokens

    async def names(self, *tasks: ScoringTask, top_k: int = 1) -> list[int]:
        results = await self.scorer.score(tasks, top_k=top_k, temperature=1.0)
        assert all(times.queue_seconds >= TIMES.queue_seconds for _, times in results)
        assert {times.prefill_seconds for _, times in results} == {TIMES.prefill_seconds}
        return [int(topk.ids[0, 0]) for topk, _ in results]

    async def start(self, *names: int, top_k: int = 1) -> "asyncio.Task[list[int]]":
        """Start a request, and wait until all of its sequences are in the engine."""
        request = asyncio.create_task(self.names(*map(short_task, names), top_k=top_k))
        while not self.engine.futures.keys() >= set(names):
            assert not request.done(), request
            await asyncio.sleep(0)
        return request

    def finish(self, *names: int) -> None:
        for name in names:
            self.engine.futures[name].set_result(None)


def test_sequences_reach_the_engine_on_arrival() -> None:
    async def scenario() -> None:
        trial = Trial()
        first = await trial.start(1, 2, top_k=5)
        second = await trial.start(3, top_k=7)
        assert trial.engine.options == {1: (5, 1.0), 2: (5, 1.0), 3: (7, 1.0)}
        assert trial.queue == (3, 30)
        trial.finish(3)
        assert await second == [3]
        assert trial.queue == (2, 20)
        trial.finish(2, 1)
        assert await first == [1, 2]
        assert trial.queue == (0, 0)
        assert sum(trial.cancelled) == 0

    asyncio.run(scenario())


def test_engine_gets_a_limited_part_of_the_queue_in_fair_order() -> None:
    async def scenario() -> None:
        trial = Trial(engine_tokens=20)
        requests = [
            asyncio.create_task(
                trial.scorer.score([short_task(name)], top_k=1, temperature=1.0, key=key)
            )
            for name, key in [(1, "a"), (2, "a"), (3, "a"), (4, "a"), (5, "b"), (6, "b")]
        ]
        while len(trial.engine.futures) < 2:
            await asyncio.sleep(0)
        assert trial.queue == (6, 60)
        requests[2].cancel()  # waits
        requests[1].cancel()  # in the engine
        while len(trial.engine.futures) < 3:
            await asyncio.sleep(0)
        assert sorted(trial.engine.futures) == [1, 2, 5]
        for name, following in ((1, 4), (5, 6)):
            trial.finish(name)
            while following not in trial.engine.futures:
                await asyncio.sleep(0)
        trial.finish(4, 6)
        await asyncio.gather(*requests, return_exceptions=True)
        assert trial.queue == (0, 0)
        assert trial.scorer._running_tokens == 0

    asyncio.run(scenario())


def test_scored_sequence_leaves_the_queue_before_its_request_ends() -> None:
    async def scenario() -> None:
        trial = Trial(queue_tokens=20)
        request = await trial.start(1, 2)
        with pytest.raises(ServiceError) as caught:
            await trial.names(short_task(3))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        trial.finish(1)
        while trial.scorer.queued_sequences > 1:
            await asyncio.sleep(0)
        third = await trial.start(3)
        trial.finish(2, 3)
        assert (await request, await third) == ([1, 2], [3])

    asyncio.run(scenario())


def test_cancelled_request_is_aborted_in_the_engine_and_counted() -> None:
    async def scenario() -> None:
        trial = Trial()
        cancelled, running = await trial.start(1, 2, 3), await trial.start(4)
        trial.finish(2)
        while trial.scorer.queued_sequences > 3:
            await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert sorted(trial.engine.cancelled) == [1, 3]
        assert trial.cancelled == [2]
        assert trial.queue == (1, 10)
        trial.finish(4)
        assert await running == [4]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RuntimeError("no pages"), 500, "engine_failed"),
        (EngineCrashError("killed"), 503, "engine_dead"),
        (ServiceError(413, "too long"), 413, "too_large"),
    ],
)
def test_error_fails_only_its_request(error: Exception, status: int, code: str) -> None:
    async def scenario() -> None:
        trial = Trial()
        failing, running = await trial.start(1, 2), await trial.start(3)
        trial.engine.futures[1].set_exception(error)
        with pytest.raises(ServiceError) as caught:
            await failing
        assert (caught.value.status, caught.value.code) == (status, code)
        assert str(error) in str(caught.value)
        assert trial.engine.cancelled == [2]
        assert trial.cancelled == []  # no client disconnected
        assert trial.scorer.queued_sequences == 1
        trial.finish(3)
        assert await running == [3]

    asyncio.run(scenario())


def test_crash_and_close_are_forwarded() -> None:
    trial = Trial()
    assert trial.engine.callback is not None
    trial.engine.callback("killed")
    assert trial.crashes == ["killed"]
    trial.scorer.close()
    assert trial.engine.closed
