"""``DirectScorer``: passes every sequence to an asynchronous engine on arrival.

The engine batches internally; no sequence waits for the end of a batch.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, EngineTimes, ScoringTask
from mopd_server.scoring.scorer import Scorer, as_service_error
from mopd_server.scoring.token_queue import TokenQueue

logger = logging.getLogger(__name__)


class DirectScorer(Scorer[ScoringTask]):
    """A ``Scorer`` whose queue contains the sequences in the engine.

    ``on_cancelled`` receives the number of sequences that a cancelled request aborts.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        max_queue_tokens: int,
        on_crash: Callable[[str], None],
        on_cancelled: Callable[[int], None],
    ) -> None:
        super().__init__(TokenQueue(lambda task: task.tokens, max_tokens=max_queue_tokens))
        self._engine = engine
        self._on_cancelled = on_cancelled
        self._recorded_until = 0.0  # time.monotonic() of the last record of the speed
        engine.on_crash(on_crash)

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """See ``Scorer.score``; if one sequence fails, the rest of the request is aborted."""
        if not self._queue:
            self._recorded_until = time.monotonic()
        self._queue.add(tasks)
        running = [asyncio.create_task(self._score_one(task, top_k, temperature)) for task in tasks]
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
            for task in tasks:
                self._queue.remove(task)

    @property
    def silent_seconds(self) -> float:
        """See ``AsyncEngine.silent_seconds``."""
        return self._engine.silent_seconds

    def close(self) -> None:
        """Shut down the engine."""
        self._engine.close()

    async def _score_one(
        self, task: ScoringTask, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        result = await self._engine.score(task, top_k=top_k, temperature=temperature)
        self._queue.remove(task)
        now = time.monotonic()
        self._queue.record(task.tokens, now - self._recorded_until)
        self._recorded_until = now
        return result
