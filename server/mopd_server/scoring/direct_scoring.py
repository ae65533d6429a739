"""``DirectScorer``: passes sequences to an asynchronous engine, which batches internally.

No sequence waits for the end of a batch. The engine gets a few steps of work at a time; the rest
waits in the queue, whose order is fair to all API keys.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, EngineTimes, ScoringTask
from mopd_server.scoring.scorer import Scorer, as_service_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Entry:
    task: ScoringTask
    key: str
    admitted: asyncio.Future[None]


class DirectScorer(Scorer[_Entry]):
    """A ``Scorer`` whose queue contains waiting sequences and those in the engine.

    ``on_cancelled`` receives the number of sequences that a cancelled request aborts. The engine
    gets sequences until it has ``engine_tokens``.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        engine_tokens: int,
        max_queue_tokens: int,
        on_crash: Callable[[str], None],
        on_cancelled: Callable[[int], None],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(max_queue_tokens=max_queue_tokens, weights=weights)
        self._engine = engine
        self._engine_tokens = engine_tokens
        self._running: set[_Entry] = set()
        self._running_tokens = 0
        self._on_cancelled = on_cancelled
        self._recorded_until = 0.0  # time.monotonic() of the last record of the speed
        engine.on_crash(on_crash)

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float, key: str = ""
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """See ``Scorer.score``; if one sequence fails, the rest of the request is aborted."""
        if not self._queue:
            self._recorded_until = time.monotonic()
        loop = asyncio.get_running_loop()
        entries = [_Entry(task, key, loop.create_future()) for task in tasks]
        self._queue.add(entries)
        running = [
            asyncio.create_task(self._score_one(entry, top_k, temperature)) for entry in entries
        ]
        self._admit()
        try:
            return list(await asyncio.gather(*running))
        except Exception as error:
            converted = as_service_error(error)
            logger.error("%s", converted, exc_info=error)
            raise converted from error
        except asyncio.CancelledError:
            self._on_cancelled(sum(task.cancelled() for task in running))
            raise
        finally:
            for scoring in running:
                scoring.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for entry in entries:
                self._release(entry)

    @property
    def silent_seconds(self) -> float:
        """See ``AsyncEngine.silent_seconds``."""
        return self._engine.silent_seconds

    def close(self) -> None:
        """Shut down the engine."""
        self._engine.close()

    def _admit(self) -> None:
        """Let the next sequences start, up to the limit of the engine."""
        while self._running_tokens < self._engine_tokens:
            entry = next(self._queue.waiting(), None)
            if entry is None:
                return
            self._queue.take(entry)
            self._running.add(entry)
            self._running_tokens += entry.task.tokens
            if not entry.admitted.done():  # cancelled
                entry.admitted.set_result(None)

    def _release(self, entry: _Entry) -> None:
        """Remove an entry, if present, and let others start."""
        self._queue.remove(entry)
        if entry in self._running:
            self._running.remove(entry)
            self._running_tokens -= entry.task.tokens
            self._admit()

    async def _score_one(
        self, entry: _Entry, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        submitted, task = time.monotonic(), entry.task
        try:
            await entry.admitted
            admitted = time.monotonic()
            topk, times = await self._engine.score(task, top_k=top_k, temperature=temperature)
        finally:
            self._release(entry)
        now = time.monotonic()
        self._queue.record(task.tokens, now - self._recorded_until)
        self._recorded_until = now
        queue_seconds = times.queue_seconds + admitted - submitted
        return topk, EngineTimes(queue_seconds, times.prefill_seconds)
