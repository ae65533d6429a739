"""Merging requests into batches, with an engine that records and waits when it is told to."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineDead, EngineDescription, ScoringTask
from mopd_server.scoring.batching import Batcher
from mopd_server.service_error import ServiceError


class ScriptedEngine:
    """Answers each task with its first completion id in every row, when the gate is open."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], int, float]] = []  # prompts' first ids, top_k, T
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.error: Exception | None = None
        self.unfit: set[int] = set()  # names on which it fails

    @property
    def description(self) -> EngineDescription:
        raise NotImplementedError("the batcher asks an engine for scores only")

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        self.batches.append(([int(t.prompt_ids[0]) for t in batch], top_k, temperature))
        self.begun.release()
        assert self.gate.wait(timeout=300), "a failed test left the gate closed"
        if self.error is not None:
            raise self.error
        if self.unfit.intersection(self.batches[-1][0]):
            raise FloatingPointError("overflow")
        return [
            TopKLogprobs(
                ids=task.completion_ids[:, None],
                logprobs=np.zeros((len(task.completion_ids), 1), dtype=np.float32),
                token_logprobs=np.zeros(len(task.completion_ids), dtype=np.float32),
                tail_logprobs=np.full(len(task.completion_ids), -np.inf, dtype=np.float32),
            )
            for task in batch
        ]


def task(name: int, tokens: int = 10) -> ScoringTask:
    """A task whose prompt begins with ``name``, of ``tokens`` tokens in all."""
    return ScoringTask(np.full(tokens - 1, name, dtype=np.int32), np.array([name], dtype=np.int32))


def batcher(
    engine: ScriptedEngine,
    batch_tokens: int = 100,
    queue_tokens: int = 1000,
    deaths: list[str] | None = None,
    cancelled: list[int] | None = None,
) -> Batcher:
    return Batcher(
        engine,
        max_batch_tokens=batch_tokens,
        max_queue_tokens=queue_tokens,
        on_death=([] if deaths is None else deaths).append,
        on_cancelled=([] if cancelled is None else cancelled).append,
    )


async def score(
    queue: Batcher, *tasks: ScoringTask, top_k: int = 1, temperature: float = 1.0
) -> list[int]:
    scored = await queue.score(tasks, top_k=top_k, temperature=temperature)
    return [int(topk.ids[0, 0]) for topk, _ in scored]


async def behind_a_closed_gate(engine: ScriptedEngine, queue: Batcher) -> "asyncio.Task[list[int]]":
    """Keeps the engine busy with task 0 until the gate opens."""
    engine.gate.clear()
    first = asyncio.create_task(score(queue, task(0)))
    await asyncio.to_thread(engine.begun.acquire)
    return first


async def queued(queue: Batcher, sequences: int) -> None:
    """Returns once ``sequences`` wait."""
    while queue.waiting_sequences < sequences:
        await asyncio.sleep(0)


def test_what_waits_together_is_scored_together_and_answered_apart() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine)

    async def scenario() -> list[list[int]]:
        first = await behind_a_closed_gate(engine, queue)
        others = [asyncio.create_task(score(queue, task(n), task(n + 10))) for n in (1, 2, 3)]
        await queued(queue, 6)
        assert queue.waiting_tokens == 60
        engine.gate.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(scenario()) == [[0], [1, 11], [2, 12], [3, 13]]
    assert [names for names, _, _ in engine.batches] == [[0], [1, 11, 2, 12, 3, 13]]
    assert (queue.waiting_sequences, queue.waiting_tokens) == (0, 0)


def test_requests_that_arrive_at_once_need_no_busy_engine_to_be_merged() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine)

    async def scenario() -> None:
        await asyncio.gather(score(queue, task(1)), score(queue, task(2)))

    asyncio.run(scenario())
    assert [names for names, _, _ in engine.batches] == [[1, 2]]


def test_a_batch_ends_at_the_token_budget_and_a_giant_goes_alone() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine, batch_tokens=25)
    asyncio.run(score(queue, task(1), task(2), task(3), task(4, 90), task(5)))
    assert [names for names, _, _ in engine.batches] == [[1, 2], [3], [4], [5]]


def test_other_settings_make_other_batches() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine)

    async def scenario() -> None:
        await asyncio.gather(
            score(queue, task(1), top_k=5),
            score(queue, task(2), top_k=6),
            score(queue, task(3), top_k=5, temperature=0.5),
            score(queue, task(4), top_k=5),
        )

    asyncio.run(scenario())
    assert engine.batches == [([1, 4], 5, 1.0), ([2], 6, 1.0), ([3], 5, 0.5)]


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine, queue_tokens=35)

    async def scenario() -> ServiceError:
        first = await behind_a_closed_gate(engine, queue)
        second = asyncio.create_task(score(queue, task(1, 30)))
        await queued(queue, 1)
        with pytest.raises(ServiceError, match="30 tokens wait already and 10 more") as raised:
            await score(queue, task(2))
        fits = asyncio.create_task(score(queue, task(3, 5)))
        await queued(queue, 2)
        engine.gate.set()
        await asyncio.gather(first, second, fits)
        return raised.value

    refused = asyncio.run(scenario())
    assert refused.http_status == 429
    assert refused.retry_after_seconds is not None
    assert refused.retry_after_seconds >= 1
    assert 2 not in [name for names, _, _ in engine.batches for name in names]


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits() -> None:
    assert asyncio.run(score(batcher(ScriptedEngine(), queue_tokens=5), task(1))) == [1]


def test_a_request_that_is_given_up_leaves_the_queue_and_is_counted() -> None:
    engine = ScriptedEngine()
    cancelled: list[int] = []
    queue = batcher(engine, cancelled=cancelled)

    async def scenario() -> None:
        first = await behind_a_closed_gate(engine, queue)
        gone = asyncio.create_task(score(queue, task(1), task(2)))
        stays = asyncio.create_task(score(queue, task(3)))
        await queued(queue, 3)
        gone.cancel()
        await asyncio.wait({gone})
        assert (queue.waiting_sequences, queue.waiting_tokens) == (1, 10)
        assert cancelled == [2]
        engine.gate.set()
        assert await asyncio.gather(first, stays) == [[0], [3]]
        assert sum(cancelled) == 2

    asyncio.run(scenario())
    assert [names for names, _, _ in engine.batches] == [[0], [3]]


def test_a_request_that_is_given_up_in_the_engine_does_not_stop_the_next() -> None:
    engine = ScriptedEngine()
    queue = batcher(engine)

    async def scenario() -> list[int]:
        gone = await behind_a_closed_gate(engine, queue)
        gone.cancel()
        await asyncio.wait({gone})
        engine.gate.set()
        return await score(queue, task(4))

    assert asyncio.run(scenario()) == [4]


def test_an_engine_that_fails_fails_its_batch_and_then_works_on() -> None:
    engine = ScriptedEngine()
    deaths: list[str] = []
    queue = batcher(engine, deaths=deaths)
    engine.error = RuntimeError("out of memory")

    async def scenario() -> list[int]:
        refusals = await asyncio.gather(
            score(queue, task(1)), score(queue, task(2)), return_exceptions=True
        )
        for refused in refusals:
            assert isinstance(refused, ServiceError)
            assert refused.http_status == 500
            assert "RuntimeError: out of memory" in str(refused)
        engine.error = None
        return await score(queue, task(3))

    assert asyncio.run(scenario()) == [3]
    assert [names for names, _, _ in engine.batches] == [[1, 2], [1], [2], [3]]
    assert deaths == []


def test_a_sequence_that_cannot_be_scored_fails_its_own_request_only() -> None:
    engine = ScriptedEngine()
    engine.unfit = {5}
    cancelled: list[int] = []
    queue = batcher(engine, cancelled=cancelled)

    async def scenario() -> list[list[int] | BaseException]:
        first = await behind_a_closed_gate(engine, queue)
        others = [score(queue, task(1), task(2)), score(queue, task(5), task(6))]
        asked = [asyncio.create_task(call) for call in (*others, score(queue, task(7)))]
        await queued(queue, 5)
        engine.gate.set()
        return await asyncio.gather(first, *asked, return_exceptions=True)

    first, before, unfit, after = asyncio.run(scenario())
    assert (first, before, after) == ([0], [1, 2], [7])
    assert isinstance(unfit, ServiceError)
    assert "FloatingPointError: overflow" in str(unfit)
    assert cancelled == []  # no client has left
    assert [names for names, _, _ in engine.batches[1:4]] == [[1, 2, 5, 6, 7], [1, 2], [5, 6, 7]]


def test_an_engine_that_dies_is_told_apart_from_one_that_fails() -> None:
    engine = ScriptedEngine()
    deaths: list[str] = []
    engine.error = EngineDead("the device is gone")
    with pytest.raises(ServiceError, match="the device is gone; ask another replica") as raised:
        asyncio.run(score(batcher(engine, deaths=deaths), task(1)))
    assert raised.value.http_status == 503
    assert deaths == ["the device is gone"]


def test_a_batcher_serves_one_event_loop_after_another() -> None:
    queue = batcher(ScriptedEngine())
    assert [asyncio.run(score(queue, task(n))) for n in (1, 2)] == [[1], [2]]
