"""``ReloadableEngine``: an ``Engine`` whose weights are loaded and released repeatedly."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import Engine, EngineCrashError, ScoringTask


class ReleasableEngine(Engine, Protocol):
    """An ``Engine`` in this process."""

    def release(self) -> None:
        """Free the memory of the weights; the engine cannot score any more."""
        ...


class ReloadableEngine:
    """An ``Engine`` that loads its model from the checkpoint; the same weights score the same bits.

    Args:
        load: returns the engine with its model loaded.
    """

    def __init__(self, load: Callable[[], ReleasableEngine]) -> None:
        self._load = load
        self._engine: ReleasableEngine | None = load()
        self.description = self._engine.description
        """Facts for the manifest."""

    @property
    def loaded(self) -> bool:
        """True while the weights are in memory."""
        return self._engine is not None

    def load(self) -> None:
        """Load the weights; no-op if loaded.

        Raises:
            EngineCrashError: if the checkpoint cannot be loaded, or is another one by now.
        """
        if self._engine is not None:
            return
        try:
            engine = self._load()
        except Exception as error:
            raise EngineCrashError(
                f"model {self.description.model!r}: reloading failed: {error}"
            ) from error
        if engine.description != self.description:
            raise EngineCrashError(
                f"model {self.description.model!r}: the checkpoint has changed since the start "
                f"(found {engine.description}, expected {self.description}). Restart the service."
            )
        self._engine = engine

    def release(self) -> None:
        """Release the weights; no-op unless loaded."""
        if self._engine is not None:
            self._engine.release()
        self._engine = None
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """See ``Engine.score``; the weights must be loaded."""
        assert self._engine is not None, "no lease"
        return self._engine.score(batch, top_k=top_k, temperature=temperature)
