"""Merges sequences that arrive together into batches for the engine.

One thread runs the engine. While it works, sequences wait; when it is free, whatever waits under
the same settings is taken together, up to a token budget. So a lonely request waits for nobody,
and a busy teacher gets full batches.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engine import Engine, ScoringTask
from mopd_server.refusal import Refusal

logger = logging.getLogger(__name__)

_LONGEST_RETRY_SECONDS = 60
#: Share of the newest batch in the running estimate of the engine's speed.
_SPEED_UPDATE = 0.2


@dataclass(frozen=True)
class EngineTimes:
    """Seconds that one sequence waited, and that the engine spent on its batch."""

    queue_seconds: float
    prefill_seconds: float


@dataclass(frozen=True)
class _Settings:
    """What must be equal for two sequences to share a batch."""

    top_k: int
    temperature: float


@dataclass(frozen=True, eq=False)
class _Waiting:
    task: ScoringTask
    settings: _Settings
    submitted: float  # time.monotonic()
    scored: asyncio.Future[tuple[TopKLogprobs, EngineTimes]]


class Batcher:
    """The queue in front of an engine, bounded by tokens.

    Used from one event loop at a time. The worker is a task that ends when nothing waits, so there
    is nothing to start.
    """

    def __init__(self, engine: Engine, *, max_batch_tokens: int, max_queue_tokens: int) -> None:
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._max_queue_tokens = max_queue_tokens
        self._waiting: dict[_Waiting, None] = {}  # in order of arrival
        self._waiting_tokens = 0
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._tokens_per_second: float | None = None

    @property
    def waiting_sequences(self) -> int:
        """Sequences that no batch has taken yet."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Their tokens, prompts included."""
        return self._waiting_tokens

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """The scores of ``tasks``, in order. Cancelling takes those still waiting off the queue.

        Raises:
            Refusal: 429 when too much waits already, 500 when the engine fails on the batch.
        """
        self._require_room(sum(task.tokens for task in tasks))
        loop = asyncio.get_running_loop()
        settings = _Settings(top_k, temperature)
        entries = [
            _Waiting(task, settings, time.monotonic(), loop.create_future()) for task in tasks
        ]
        for entry in entries:
            self._waiting[entry] = None
            self._waiting_tokens += entry.task.tokens
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return list(await asyncio.gather(*(entry.scored for entry in entries)))
        finally:
            for entry in entries:
                self._leave_queue(entry)
                entry.scored.cancel()

    def close(self) -> None:
        """Lets the engine's thread end after the batch that it is on."""
        self._thread.shutdown(wait=True)

    def _require_room(self, tokens: int) -> None:
        """A request that alone is larger than the queue is let in when nothing waits."""
        if self._waiting and self._waiting_tokens + tokens > self._max_queue_tokens:
            raise Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._waiting_tokens} tokens wait already and {tokens} more would be above the "
                f"queue's limit of {self._max_queue_tokens}; ask again later",
                retry_after_seconds=self._seconds_of_work(),
            )

    def _seconds_of_work(self) -> int:
        if self._tokens_per_second is None:
            return 1
        seconds = math.ceil(self._waiting_tokens / self._tokens_per_second)
        return min(max(seconds, 1), _LONGEST_RETRY_SECONDS)

    def _leave_queue(self, entry: _Waiting) -> None:
        if entry in self._waiting:
            del self._waiting[entry]
            self._waiting_tokens -= entry.task.tokens

    def _take(self) -> list[_Waiting]:
        """The longest waiting sequence and others like it, off the queue; empty when none waits."""
        first = next(iter(self._waiting), None)
        if first is None:
            return []
        taken = [first]
        tokens = first.task.tokens
        for entry in islice(self._waiting, 1, None):
            if entry.settings == first.settings:
                tokens += entry.task.tokens
                if tokens > self._max_batch_tokens:
                    break
                taken.append(entry)
        for entry in taken:
            self._leave_queue(entry)
        return taken

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._take():
            started = time.monotonic()
            try:
                scores = await loop.run_in_executor(self._thread, self._run_engine, batch)
            # Whatever the engine fails with belongs to this batch; the next one gets its chance.
            except Exception as error:
                logger.exception("the engine failed on a batch of %d sequences", len(batch))
                _fail(batch, error)
                continue
            seconds = time.monotonic() - started
            self._learn_speed(sum(entry.task.tokens for entry in batch), seconds)
            for entry, score in zip(batch, scores, strict=True):
                if not entry.scored.done():  # its client may have gone meanwhile
                    times = EngineTimes(started - entry.submitted, seconds)
                    entry.scored.set_result((score, times))

    def _run_engine(self, batch: Sequence[_Waiting]) -> list[TopKLogprobs]:
        settings = batch[0].settings
        scores = self._engine.score(
            [entry.task for entry in batch],
            top_k=settings.top_k,
            temperature=settings.temperature,
        )
        if len(scores) != len(batch):
            raise RuntimeError(f"the engine answered {len(scores)} of {len(batch)} sequences")
        return scores

    def _learn_speed(self, tokens: int, seconds: float) -> None:
        newest = tokens / max(seconds, 1e-6)
        before = newest if self._tokens_per_second is None else self._tokens_per_second
        self._tokens_per_second = before + _SPEED_UPDATE * (newest - before)


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    refusal = Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"the engine failed on this batch with {type(error).__name__}: {error}",
    )
    refusal.__cause__ = error
    for entry in batch:
        if not entry.scored.done():
            entry.scored.set_exception(refusal)
