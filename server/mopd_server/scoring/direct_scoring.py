"""``DirectScorer``: hands every sequence to an asynchronous engine the moment it arrives.

The engine batches by itself, so nothing is held back here and nobody waits for a batch to end.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, EngineTimes, ScoringTask
from mopd_server.scoring.scorer import failure_of
from mopd_server.scoring.token_queue import TokenQueue

logger = logging.getLogger(__name__)


class DirectScorer:
    """A ``SequenceScorer`` in which a sequence counts as waiting until it is scored.

    Which sequences an engine works on is its own business; what is bounded here is how much it has
    been given. ``on_cancelled`` is told how many sequences were taken out of it unscored.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        max_queue_tokens: int,
        on_death: Callable[[str], None],
        on_cancelled: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._on_cancelled = on_cancelled
        self._unscored: TokenQueue[ScoringTask] = TokenQueue(
            lambda task: task.tokens, max_tokens=max_queue_tokens
        )
        self._worked_until = 0.0  # time.monotonic() up to which work has been counted
        engine.watch(on_death)

    @property
    def waiting_sequences(self) -> int:
        """Sequences in the engine."""
        return len(self._unscored)

    @property
    def waiting_tokens(self) -> int:
        """Their tokens, prompts included."""
        return self._unscored.tokens

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """See ``SequenceScorer.score``. If one sequence fails, its request is cancelled."""
        if not self._unscored:
            self._worked_until = time.monotonic()
        self._unscored.enter(tasks)
        scoring = [asyncio.create_task(self._score_one(task, top_k, temperature)) for task in tasks]
        try:
            return list(await asyncio.gather(*scoring))
        except Exception as error:
            refusal = failure_of(error)
            logger.error("%s", refusal, exc_info=error)
            raise refusal from error
        except asyncio.CancelledError:
            self._on_cancelled(sum(ended.cancelled() for ended in scoring))
            raise
        finally:
            for running in scoring:
                running.cancel()
            await asyncio.gather(*scoring, return_exceptions=True)
            for task in tasks:
                self._unscored.leave(task)

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    async def _score_one(
        self, task: ScoringTask, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        scored = await self._engine.score(task, top_k=top_k, temperature=temperature)
        self._unscored.leave(task)
        now = time.monotonic()
        self._unscored.worked(task.tokens, now - self._worked_until)
        self._worked_until = now
        return scored
