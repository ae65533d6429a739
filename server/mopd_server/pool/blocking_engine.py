"""``BlockingEngine``: an asynchronous engine that scores a batch per call."""

import asyncio
from collections.abc import Sequence

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import AsyncEngine, EngineDescription, ScoringTask


class BlockingEngine:
    """An ``Engine`` around an ``AsyncEngine``, which gets all sequences of a batch at once."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest."""
        return self._engine.description

    @property
    def silent_seconds(self) -> float:
        """See ``AsyncEngine.silent_seconds``."""
        return self._engine.silent_seconds

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """See ``Engine.score``; if one sequence fails, the others are aborted."""

        async def score_all() -> list[TopKLogprobs]:
            scoring = (self._engine.score(t, top_k=top_k, temperature=temperature) for t in batch)
            return [scores for scores, _ in await asyncio.gather(*scoring)]

        return asyncio.run(score_all())

    @property
    def can_suspend(self) -> bool:
        """See ``AsyncEngine.can_suspend``."""
        return self._engine.can_suspend

    def suspend(self) -> None:
        """See ``AsyncEngine.suspend``."""
        self._engine.suspend()

    def resume(self) -> None:
        """See ``AsyncEngine.resume``."""
        self._engine.resume()

    def release(self) -> None:
        """End the engine's processes; the engine cannot score any more."""
        self._engine.close()
