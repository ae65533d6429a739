"""``ReloadableEngine``: an ``Engine`` whose weights are loaded and released repeatedly."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import (
    AsyncEngine,
    Engine,
    EngineCrashError,
    EngineDescription,
    ScoringTask,
)
from mopd_server.pool.blocking_engine import BlockingEngine


class ReleasableEngine(Engine, Protocol):
    """An ``Engine`` in this process."""

    def release(self) -> None:
        """Free the memory of the weights; the engine cannot score any more."""
        ...


class ReloadableEngine:
    """An ``Engine`` that loads its model from the checkpoint; the same weights score the same bits.

    An asynchronous engine is closed and started again, unless it can be suspended.

    Args:
        load: returns the engine with its model loaded.
    """

    def __init__(self, load: Callable[[], ReleasableEngine | AsyncEngine]) -> None:
        self._load = load
        self._engine: ReleasableEngine | BlockingEngine | None = None
        self._suspended: BlockingEngine | None = None
        self._description: EngineDescription | None = None
        self.on_crash: Callable[[str], None] = lambda cause: None
        """Called from any thread with the cause if a process of the engine exits."""

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest; known after the first load."""
        assert self._description is not None, "never loaded"
        return self._description

    @property
    def loaded(self) -> bool:
        """True while the weights are in memory."""
        return self._engine is not None

    @property
    def can_suspend(self) -> bool:
        """True if a later load restores the weights of a suspended engine."""
        return isinstance(self._engine, BlockingEngine) and self._engine.can_suspend

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the engine's processes, if there are any, have not responded."""
        engine = self._engine
        return engine.silent_seconds if isinstance(engine, BlockingEngine) else 0.0

    def load(self) -> None:
        """Load the weights; no-op if loaded.

        Raises:
            EngineCrashError: if the checkpoint cannot be loaded again, or is another one by now.
            MopdError: if the first load fails.
        """
        if self._engine is not None:
            return
        if self._description is None:
            self._engine = self._start()
            self._description = self._engine.description
            return
        subject = f"model {self._description.model!r}"
        try:
            engine = self._start() if self._suspended is None else self._resumed(self._suspended)
        except Exception as error:
            raise EngineCrashError(f"{subject}: reloading failed: {error}") from error
        self._engine = engine  # so that ``release`` ends its processes
        if engine.description != self._description:
            raise EngineCrashError(
                f"{subject}: the checkpoint has changed since the start "
                f"(found {engine.description}, expected {self._description}). Restart the service."
            )

    def release(self) -> None:
        """Release the weights; no-op unless loaded."""
        engine, self._engine = self._engine, None
        if isinstance(engine, BlockingEngine) and engine.can_suspend:
            engine.suspend()
            self._suspended = engine
        elif engine is not None:
            engine.release()

    def close(self) -> None:
        """Release the weights, and end suspended ones."""
        for engine in (self._engine, self._suspended):
            if engine is not None:
                engine.release()
        self._engine = self._suspended = None

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """See ``Engine.score``; the weights must be loaded."""
        assert self._engine is not None, "no lease"
        return self._engine.score(batch, top_k=top_k, temperature=temperature)

    def _start(self) -> ReleasableEngine | BlockingEngine:
        engine = self._load()
        if not isinstance(engine, AsyncEngine):
            return engine
        engine.on_crash(lambda cause: self.on_crash(cause))
        return BlockingEngine(engine)

    def _resumed(self, engine: BlockingEngine) -> BlockingEngine:
        engine.resume()
        self._suspended = None
        return engine
