"""Handing sequences to an asynchronous engine, with one that answers when it is told to."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    EngineDead,
    EngineDescription,
    EngineTimes,
    ScoringTask,
)
from mopd_server.scoring.direct_scoring import DirectScorer
from mopd_server.service_error import ServiceError

TIMES = EngineTimes(0.25, 0.5)


class OpenEngine(AsyncEngine):
    """Holds every sequence until the test answers it, by its name."""

    def __init__(self) -> None:
        self.asked: dict[int, tuple[int, float]] = {}  # name -> top_k, temperature
        self.answers: dict[int, asyncio.Future[None]] = {}
        self.given_up: list[int] = []
        self.on_death: Callable[[str], None] | None = None
        self.closed = False

    @property
    def description(self) -> EngineDescription:
        raise NotImplementedError("a scorer asks an engine for scores only")

    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        name = int(task.prompt_ids[0])
        self.asked[name] = (top_k, temperature)
        self.answers[name] = asyncio.get_running_loop().create_future()
        try:
            await self.answers[name]
        except asyncio.CancelledError:
            self.given_up.append(name)
            raise
        zeros = np.zeros(1, dtype=np.float32)
        ids = np.array([[name]], dtype=np.int32)
        return TopKLogprobs(ids, zeros[:, None], zeros, np.log(zeros + 1e-9)), TIMES

    def watch(self, on_death: Callable[[str], None]) -> None:
        self.on_death = on_death

    def close(self) -> None:
        self.closed = True


class Trial:
    """A scorer and all that it reports."""

    def __init__(self, queue_tokens: int = 1000) -> None:
        self.engine = OpenEngine()
        self.deaths: list[str] = []
        self.cancelled: list[int] = []
        self.scorer = DirectScorer(
            self.engine,
            max_queue_tokens=queue_tokens,
            on_death=self.deaths.append,
            on_cancelled=self.cancelled.append,
        )

    async def names(self, *tasks: ScoringTask, top_k: int = 1) -> list[int]:
        scored = await self.scorer.score(tasks, top_k=top_k, temperature=1.0)
        assert all(times == TIMES for _, times in scored)
        return [int(topk.ids[0, 0]) for topk, _ in scored]

    async def begun(self, *tasks: ScoringTask, top_k: int = 1) -> "asyncio.Task[list[int]]":
        """A request whose sequences have all reached the engine."""
        request = asyncio.create_task(self.names(*tasks, top_k=top_k))
        while not all(int(task.prompt_ids[0]) in self.engine.answers for task in tasks):
            assert not request.done(), request
            await asyncio.sleep(0)
        return request


def task(name: int, tokens: int = 10) -> ScoringTask:
    return ScoringTask(np.full(tokens - 1, name, dtype=np.int32), np.array([name], dtype=np.int32))


def test_every_sequence_reaches_the_engine_at_once_whatever_else_is_under_way() -> None:
    async def scenario() -> None:
        trial = Trial()
        first = await trial.begun(task(1), task(2), top_k=5)
        second = await trial.begun(task(3), top_k=7)
        assert trial.engine.asked == {1: (5, 1.0), 2: (5, 1.0), 3: (7, 1.0)}
        assert (trial.scorer.waiting_sequences, trial.scorer.waiting_tokens) == (3, 30)
        trial.engine.answers[3].set_result(None)  # the last one in is the first one out
        assert await second == [3]
        assert (trial.scorer.waiting_sequences, trial.scorer.waiting_tokens) == (2, 20)
        for name in (2, 1):
            trial.engine.answers[name].set_result(None)
        assert await first == [1, 2]
        assert trial.scorer.waiting_sequences == 0
        assert sum(trial.cancelled) == 0

    asyncio.run(scenario())


def test_a_sequence_leaves_the_queue_when_it_is_scored_not_when_its_request_is() -> None:
    async def scenario() -> None:
        trial = Trial(queue_tokens=20)
        request = await trial.begun(task(1), task(2))
        with pytest.raises(ServiceError, match="20 tokens wait already and 10 more") as raised:
            await trial.names(task(3))
        assert raised.value.http_status == 429
        trial.engine.answers[1].set_result(None)
        while trial.scorer.waiting_sequences > 1:
            await asyncio.sleep(0)
        third = await trial.begun(task(3))
        for name in (2, 3):
            trial.engine.answers[name].set_result(None)
        assert (await request, await third) == ([1, 2], [3])

    asyncio.run(scenario())


def test_a_request_that_is_given_up_is_taken_out_of_the_engine_and_counted() -> None:
    async def scenario() -> None:
        trial = Trial()
        gone, stays = await trial.begun(task(1), task(2), task(3)), await trial.begun(task(4))
        trial.engine.answers[2].set_result(None)
        while trial.scorer.waiting_sequences > 3:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})
        assert sorted(trial.engine.given_up) == [1, 3]
        assert trial.cancelled == [2]
        assert (trial.scorer.waiting_sequences, trial.scorer.waiting_tokens) == (1, 10)
        trial.engine.answers[4].set_result(None)
        assert await stays == [4]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (RuntimeError("no pages"), 500, "failed on this batch with RuntimeError: no pages"),
        (EngineDead("it was killed"), 503, "it was killed; ask another replica"),
        (ServiceError(413, "too long"), 413, "too long"),
    ],
)
def test_one_failure_ends_its_request_and_no_other(
    error: Exception, status: int, sentence: str
) -> None:
    async def scenario() -> None:
        trial = Trial()
        fails, stays = await trial.begun(task(1), task(2)), await trial.begun(task(3))
        trial.engine.answers[1].set_exception(error)
        with pytest.raises(ServiceError, match=sentence) as raised:
            await fails
        assert raised.value.http_status == status
        assert trial.engine.given_up == [2]
        assert trial.cancelled == []  # no client has left
        assert trial.scorer.waiting_sequences == 1
        trial.engine.answers[3].set_result(None)
        assert await stays == [3]

    asyncio.run(scenario())


def test_a_death_in_the_engine_is_passed_on_and_closing_closes_it() -> None:
    trial = Trial()
    assert trial.engine.on_death is not None
    trial.engine.on_death("killed")
    assert trial.deaths == ["killed"]
    trial.scorer.close()
    assert trial.engine.closed
