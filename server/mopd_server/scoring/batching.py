"""``Batcher``: merges sequences that arrive together into batches for a synchronous engine.

One thread runs the engine. While it works, sequences wait; when it is free, whatever waits under
the same settings is taken together, up to a token budget. So a lonely request waits for nobody,
and a busy teacher gets full batches.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineDead, EngineTimes, ScoringTask
from mopd_server.scoring.scorer import failure_of
from mopd_server.scoring.token_queue import TokenQueue

logger = logging.getLogger(__name__)


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
    """A ``SequenceScorer`` around an engine that blocks.

    The worker is a task that ends when nothing waits, so there is nothing to start. A batch that
    the engine has begun is finished even if its clients leave; ``on_cancelled`` is told how many
    sequences were given up by them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        on_death: Callable[[str], None],
        on_cancelled: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._on_death = on_death
        self._death: EngineDead | None = None
        self._on_cancelled = on_cancelled
        self._waiting: TokenQueue[_Waiting] = TokenQueue(
            lambda entry: entry.task.tokens, max_tokens=max_queue_tokens
        )
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    @property
    def waiting_sequences(self) -> int:
        """Sequences that no batch has taken yet."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Their tokens, prompts included."""
        return self._waiting.tokens

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """See ``SequenceScorer.score``. Cancelling takes those still waiting off the queue."""
        loop = asyncio.get_running_loop()
        settings = _Settings(top_k, temperature)
        entries = [
            _Waiting(task, settings, time.monotonic(), loop.create_future()) for task in tasks
        ]
        self._waiting.enter(entries)
        if self._worker is None or self._worker.done():
            # In a context of its own: its log lines are not about the request that woke it.
            self._worker = asyncio.create_task(self._work(), context=contextvars.Context())
        try:
            return list(await asyncio.gather(*(entry.scored for entry in entries)))
        except asyncio.CancelledError:
            self._on_cancelled(sum(entry.scored.cancelled() for entry in entries))
            raise
        finally:
            for entry in entries:
                self._waiting.leave(entry)
                entry.scored.cancel()

    def close(self) -> None:
        """Lets the engine's thread end after the batch that it is on."""
        self._thread.shutdown(wait=True)

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
            self._waiting.leave(entry)
        return taken

    async def _work(self) -> None:
        while batch := self._take():
            if self._death is None:
                await self._score_batch(batch)
            else:  # nothing that it says now is to be trusted
                _refuse(batch, self._death)

    async def _score_batch(self, batch: Sequence[_Waiting]) -> None:
        """Scores a batch; where that fails, its halves, so that only what cannot be scored fails.

        One sequence on which the precision overflows, or one batch too many for the memory, is no
        matter of the other clients whose sequences happened to wait beside it.
        """
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            scores = await loop.run_in_executor(self._thread, self._run_engine, batch)
        except Exception as error:
            if len(batch) == 1 or isinstance(error, EngineDead):
                self._fail(batch, error)
                return
            logger.warning(
                "the engine failed on a batch of %d sequences with %s; its halves are tried",
                len(batch),
                type(error).__name__,
            )
        else:
            self._answer(batch, scores, started)
            return
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            # A request that has failed already, or whose client has gone, needs no more work.
            if wanted := [entry for entry in part if not entry.scored.done()]:
                await self._score_batch(wanted)

    def _answer(
        self, batch: Sequence[_Waiting], scores: Sequence[TopKLogprobs], started: float
    ) -> None:
        seconds = time.monotonic() - started
        self._waiting.worked(sum(entry.task.tokens for entry in batch), seconds)
        for entry, score in zip(batch, scores, strict=True):
            if not entry.scored.done():  # its client may have gone meanwhile
                times = EngineTimes(started - entry.submitted, seconds)
                entry.scored.set_result((score, times))

    def _fail(self, batch: Sequence[_Waiting], error: Exception) -> None:
        logger.error("the engine failed on a batch of %d sequences", len(batch), exc_info=error)
        _refuse(batch, error)
        if isinstance(error, EngineDead):
            self._death = error
            self._on_death(str(error))

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


def _refuse(batch: Sequence[_Waiting], error: Exception) -> None:
    refusal = failure_of(error)
    for entry in batch:
        if not entry.scored.done():
            entry.scored.set_exception(refusal)
