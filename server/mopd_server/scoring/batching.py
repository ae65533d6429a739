"""``Batcher``: batches sequences of several requests for a blocking engine.

One thread runs the engine. When the engine is idle, queued sequences with equal settings form the
next batch, up to a token budget: a single request never waits for others, and a busy teacher runs
full batches.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineCrashError, EngineTimes, ScoringTask
from mopd_server.scoring.scorer import Scorer, as_service_error

logger = logging.getLogger(__name__)

#: Called in the engine's thread with the tokens of a batch and the queue behind it, and of the
#: batch; the context surrounds the engine's call.
Lease = Callable[[int, int], AbstractContextManager[None]]

#: A batch may take this multiple of its time at the measured speed before the engine is silent:
#: attention is quadratic in the length, and an accelerator may be shared.
_SLOWER = 10.0


@dataclass(frozen=True, eq=False)
class _Entry:
    task: ScoringTask
    key: str
    settings: tuple[int, float]  # top_k and temperature: equal within a batch
    submitted: float  # time.monotonic()
    result: asyncio.Future[tuple[TopKLogprobs, EngineTimes]]


class Batcher(Scorer[_Entry]):
    """A ``Scorer`` around a blocking engine.

    The worker task ends when the queue is empty, so there is no start method. A running batch is
    finished even if its clients disconnect; ``on_cancelled`` receives the number of sequences that
    a cancelled request drops.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        on_crash: Callable[[str], None],
        on_cancelled: Callable[[int], None],
        now: Callable[[], float] = time.monotonic,
        weights: Mapping[str, float] | None = None,
        lease: Lease | None = None,
        heartbeat: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(max_queue_tokens=max_queue_tokens, weights=weights)
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._on_crash = on_crash
        self._crash: EngineCrashError | None = None
        self._on_cancelled = on_cancelled
        self._now = now
        self._lease: Lease = lease or (lambda tokens, batch_tokens: nullcontext())
        self._heartbeat = heartbeat
        self._silent_from: float | None = None  # while a batch runs
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float, key: str = ""
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """See ``Scorer.score``; cancelling removes the queued sequences."""
        loop, now = asyncio.get_running_loop(), self._now()
        settings = (top_k, temperature)
        entries = [_Entry(task, key, settings, now, loop.create_future()) for task in tasks]
        self._queue.add(entries)
        if self._worker is None or self._worker.done():
            # In a new context: its log records do not belong to the request that starts it.
            self._worker = asyncio.create_task(self._work(), context=contextvars.Context())
        try:
            return list(await asyncio.gather(*(entry.result for entry in entries)))
        except asyncio.CancelledError:
            self._on_cancelled(sum(entry.result.cancelled() for entry in entries))
            raise
        finally:
            for entry in entries:
                self._queue.remove(entry)
                entry.result.cancel()

    @property
    def silent_seconds(self) -> float:
        """Seconds without a heartbeat, or by which a batch exceeds ten times its expected time."""
        if self._heartbeat is not None:
            return self._heartbeat()
        limit = self._silent_from
        return 0.0 if limit is None else max(0.0, self._now() - limit)

    def close(self) -> None:
        """Stop the engine's thread after its current batch."""
        self._thread.shutdown(wait=True)

    def _next_batch(self) -> list[_Entry]:
        """Remove the next entry and others with equal settings from the queue."""
        batch: list[_Entry] = []
        tokens = 0
        for entry in self._queue.waiting():
            if not batch:
                tokens = entry.task.tokens
                batch.append(entry)
            elif entry.settings == batch[0].settings:
                tokens += entry.task.tokens
                if tokens > self._max_batch_tokens:
                    break
                batch.append(entry)
        for entry in batch:
            self._queue.take(entry)
            self._queue.remove(entry)
        return batch

    async def _work(self) -> None:
        while batch := self._next_batch():
            if self._crash is None:
                await self._score_batch(batch)
            else:  # results of a crashed engine cannot be trusted
                _set_error(batch, self._crash)

    async def _score_batch(self, batch: Sequence[_Entry]) -> None:
        """Score a batch; if that fails, score its halves, so that only the cause fails.

        One sequence that overflows the precision, or a batch too large for the memory, must not
        fail the requests of other clients.
        """
        tokens = sum(entry.task.tokens for entry in batch)
        loop = asyncio.get_running_loop()
        try:
            scores, started = await loop.run_in_executor(
                self._thread, self._run_engine, batch, tokens
            )
        except Exception as error:
            if len(batch) == 1 or isinstance(error, EngineCrashError):
                self._fail(batch, error)
                return
            logger.warning(
                "the engine failed on a batch of %d sequences with %s; retrying its halves",
                len(batch),
                type(error).__name__,
            )
        else:
            self._queue.record(tokens, self._now() - started)
            self._set_results(batch, scores, started)
            return
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            # Skip entries of requests that have failed or were cancelled.
            if pending := [entry for entry in part if not entry.result.done()]:
                await self._score_batch(pending)

    def _set_results(
        self, batch: Sequence[_Entry], scores: Sequence[TopKLogprobs], started: float
    ) -> None:
        seconds = self._now() - started
        for entry, score in zip(batch, scores, strict=True):
            if not entry.result.done():  # cancelled meanwhile
                times = EngineTimes(started - entry.submitted, seconds)
                entry.result.set_result((score, times))

    def _fail(self, batch: Sequence[_Entry], error: Exception) -> None:
        logger.error("the engine failed on a batch of %d sequences", len(batch), exc_info=error)
        _set_error(batch, error)
        if isinstance(error, EngineCrashError):
            self._crash = error
            self._on_crash(str(error))

    def _run_engine(self, batch: Sequence[_Entry], tokens: int) -> tuple[list[TopKLogprobs], float]:
        """Return the scores, and when the engine started."""
        top_k, temperature = batch[0].settings
        tasks = [entry.task for entry in batch]
        with self._lease(tokens + self._queue.tokens, tokens):
            started = self._now()
            self._silent_from = started + _SLOWER * self._queue.expected_seconds(tokens)
            try:
                scores = self._engine.score(tasks, top_k=top_k, temperature=temperature)
            finally:
                self._silent_from = None
        if len(scores) != len(batch):
            raise RuntimeError(
                f"the engine returned the wrong number of results (found {len(scores)}, expected "
                f"{len(batch)})"
            )
        return scores, started


def _set_error(batch: Sequence[_Entry], error: Exception) -> None:
    converted = as_service_error(error)
    for entry in batch:
        if not entry.result.done():
            entry.result.set_exception(converted)
