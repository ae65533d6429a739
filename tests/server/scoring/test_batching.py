"""Tests of batching with an engine that records its batches and blocks at a gate."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineCrashError, EngineDescription, ScoringTask
from mopd_server.scoring.batching import Batcher
from mopd_server.service_error import ServiceError
from tests.server.tiny_teachers import short_task as task


class ScriptedEngine:
    """Returns the name of each task as the id of its row, when the gate is open."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], int, float]] = []  # names, top_k, temperature
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.error: Exception | None = None
        self.failing_names: set[int] = set()

    @property
    def description(self) -> EngineDescription:
        raise NotImplementedError

    @property
    def names(self) -> list[list[int]]:
        return [names for names, _, _ in self.batches]

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        self.batches.append(([int(t.prompt_ids[0]) for t in batch], top_k, temperature))
        self.started.release()
        assert self.gate.wait(timeout=300), "the gate is closed after a failed test"
        if self.error is not None:
            raise self.error
        if self.failing_names.intersection(self.names[-1]):
            raise FloatingPointError("overflow")
        zeros = np.zeros(1, dtype=np.float32)
        return [
            TopKLogprobs(task.completion_ids[:, None], zeros[:, None], zeros, zeros - np.inf)
            for task in batch
        ]


class Trial:
    """A batcher, its engine and its callbacks."""

    def __init__(
        self,
        batch_tokens: int = 100,
        queue_tokens: int = 1000,
        now: Callable[[], float] = time.monotonic,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.engine = ScriptedEngine()
        self.crashes: list[str] = []
        self.cancelled: list[int] = []
        self.batcher = Batcher(
            self.engine,
            max_batch_tokens=batch_tokens,
            max_queue_tokens=queue_tokens,
            on_crash=self.crashes.append,
            on_cancelled=self.cancelled.append,
            now=now,
            weights=weights,
        )

    @property
    def queue(self) -> tuple[int, int]:
        """Sequences and tokens in the queue."""
        return self.batcher.queued_sequences, self.batcher.queued_tokens

    async def score(
        self, *tasks: ScoringTask, top_k: int = 1, temperature: float = 1.0, key: str = ""
    ) -> list[int]:
        results = await self.batcher.score(tasks, top_k=top_k, temperature=temperature, key=key)
        return [int(topk.ids[0, 0]) for topk, _ in results]

    def start(self, *tasks: ScoringTask, key: str = "") -> "asyncio.Task[list[int]]":
        return asyncio.create_task(self.score(*tasks, key=key))

    async def block(self) -> "asyncio.Task[list[int]]":
        """Occupy the engine with task 0 until the gate opens."""
        self.engine.gate.clear()
        first = self.start(task(0))
        await asyncio.to_thread(self.engine.started.acquire)
        return first

    async def queued(self, sequences: int) -> None:
        """Wait for ``sequences`` in the queue."""
        while self.batcher.queued_sequences < sequences:
            await asyncio.sleep(0)


def test_queued_sequences_are_batched_and_results_returned_to_their_requests() -> None:
    trial = Trial()

    async def scenario() -> list[list[int]]:
        first = await trial.block()
        others = [trial.start(task(n), task(n + 10)) for n in (1, 2, 3)]
        await trial.queued(6)
        assert trial.queue == (6, 60)
        trial.engine.gate.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(scenario()) == [[0], [1, 11], [2, 12], [3, 13]]
    assert trial.engine.names == [[0], [1, 11, 2, 12, 3, 13]]
    assert trial.queue == (0, 0)


def test_concurrent_requests_with_equal_settings_share_a_batch() -> None:
    trial = Trial()

    async def scenario() -> None:
        await asyncio.gather(
            trial.score(task(1), top_k=5),
            trial.score(task(2), top_k=6),
            trial.score(task(3), top_k=5, temperature=0.5),
            trial.score(task(4), top_k=5),
        )

    asyncio.run(scenario())
    assert trial.engine.batches == [([1, 4], 5, 1.0), ([2], 6, 1.0), ([3], 5, 0.5)]


def test_batch_ends_at_the_token_budget_and_longer_sequences_run_unbatched() -> None:
    trial = Trial(batch_tokens=25)
    asyncio.run(trial.score(task(1), task(2), task(3), task(4, 90), task(5)))
    assert trial.engine.names == [[1, 2], [3], [4], [5]]


def test_full_queue_is_a_429_with_retry_after() -> None:
    trial = Trial(queue_tokens=35)

    async def scenario() -> ServiceError:
        first = await trial.block()
        second = trial.start(task(1, 30))
        await trial.queued(1)
        with pytest.raises(ServiceError) as caught:
            await trial.score(task(2))
        third = trial.start(task(3, 5))
        await trial.queued(2)
        trial.engine.gate.set()
        await asyncio.gather(first, second, third)
        return caught.value

    error = asyncio.run(scenario())
    assert (error.status, error.code) == (429, "queue_full")
    assert error.retry_after_seconds is not None
    assert error.retry_after_seconds >= 1
    assert all(2 not in names for names in trial.engine.names)


def test_a_rude_client_gets_its_share_only() -> None:
    trial = Trial(batch_tokens=10, queue_tokens=10_000, weights={"heavy": 2.0})
    clients = {"rude": 1, "polite": 2, "heavy": 3}

    async def scenario() -> None:
        requests = [await trial.block()]
        requests += [trial.start(task(1), key="rude") for _ in range(200)]
        await trial.queued(200)
        for key in ("polite", "heavy"):
            requests += [trial.start(task(clients[key]), key=key) for _ in range(60)]
        await trial.queued(320)
        trial.engine.gate.set()
        await asyncio.gather(*requests)

    asyncio.run(scenario())
    served = [names[0] for names in trial.engine.names][1:121]
    shares = {key: served.count(name) / len(served) for key, name in clients.items()}
    assert shares == {
        "rude": pytest.approx(0.25, rel=0.1),
        "polite": pytest.approx(0.25, rel=0.1),
        "heavy": pytest.approx(0.5, rel=0.1),
    }


def test_request_above_the_limit_is_accepted_by_an_empty_queue() -> None:
    assert asyncio.run(Trial(queue_tokens=5).score(task(1))) == [1]


def test_cancelled_request_leaves_the_queue_and_is_counted() -> None:
    trial = Trial()

    async def scenario() -> None:
        first = await trial.block()
        cancelled, second = trial.start(task(1), task(2)), trial.start(task(3))
        await trial.queued(3)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert trial.queue == (1, 10)
        assert trial.cancelled == [2]
        trial.engine.gate.set()
        assert await asyncio.gather(first, second) == [[0], [3]]
        assert sum(trial.cancelled) == 2

    asyncio.run(scenario())
    assert trial.engine.names == [[0], [3]]


def test_request_cancelled_in_the_engine_does_not_block_the_next() -> None:
    trial = Trial()

    async def scenario() -> list[int]:
        cancelled = await trial.block()
        cancelled.cancel()
        await asyncio.wait({cancelled})
        trial.engine.gate.set()
        return await trial.score(task(4))

    assert asyncio.run(scenario()) == [4]


def test_failed_batch_is_retried_in_halves_and_the_engine_stays_usable() -> None:
    trial = Trial()
    trial.engine.error = RuntimeError("out of memory")

    async def scenario() -> list[int]:
        requests = (trial.score(task(1)), trial.score(task(2)))
        for error in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(error, ServiceError)
            assert (error.status, error.code) == (500, "engine_failed")
            assert "RuntimeError: out of memory" in str(error)
        trial.engine.error = None
        return await trial.score(task(3))

    assert asyncio.run(scenario()) == [3]
    assert trial.engine.names == [[1, 2], [1], [2], [3]]
    assert trial.crashes == []


def test_sequence_that_cannot_be_scored_fails_only_its_request() -> None:
    trial = Trial()
    trial.engine.failing_names = {5}

    async def scenario() -> list[list[int] | BaseException]:
        first = await trial.block()
        requests = [trial.start(*map(task, names)) for names in ((1, 2), (5, 6), (7,))]
        await trial.queued(5)
        trial.engine.gate.set()
        return await asyncio.gather(first, *requests, return_exceptions=True)

    first, second, error, last = asyncio.run(scenario())
    assert (first, second, last) == ([0], [1, 2], [7])
    assert isinstance(error, ServiceError)
    assert "FloatingPointError: overflow" in str(error)
    assert trial.cancelled == []  # no client disconnected
    assert trial.engine.names[1:4] == [[1, 2, 5, 6, 7], [1, 2], [5, 6, 7]]


def test_engine_crash_is_reported_and_later_requests_do_not_reach_the_engine() -> None:
    trial = Trial()
    trial.engine.error = EngineCrashError("the device is lost")

    async def scenario() -> None:
        first = await trial.block()
        queued = trial.start(task(1))
        await trial.queued(1)
        trial.engine.gate.set()
        for error in await asyncio.gather(first, queued, return_exceptions=True):
            assert isinstance(error, ServiceError)
            assert (error.status, error.code) == (503, "engine_dead")
            assert "the device is lost" in str(error)

    asyncio.run(scenario())
    assert trial.crashes == ["the device is lost"]
    assert trial.engine.names == [[0]]


def test_batcher_supports_successive_event_loops() -> None:
    trial = Trial()
    assert [asyncio.run(trial.score(task(n))) for n in (1, 2)] == [[1], [2]]
