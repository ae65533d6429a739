"""Interfaces of engines: token ids in, next-token distributions out.

Engines handle neither text nor HTTP nor queues. There are two kinds: an ``Engine`` scores one
batch per blocking call (``TransformersEngine``); an ``AsyncEngine`` receives single sequences and
batches them internally (``VllmEngine``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mopd_protocol.arrays import IntArray
from mopd_protocol.errors import TeacherError
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.adapters import Adapter


@dataclass(frozen=True, eq=False)
class ScoringTask:
    """One sequence to score.

    ``prompt_ids`` is never empty: the first completion token needs a position that predicts it.
    ``candidate_ids`` are unique within a row; a row may be empty.
    """

    prompt_ids: IntArray  # [prompt tokens]
    completion_ids: IntArray  # [rows]
    candidate_ids: tuple[IntArray, ...] | None = None  # rows x [candidates of that row]
    adapter: str | None = None  # name; None: the base model

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class EngineTimes:
    """Seconds of one sequence in the engine's queue, and of the batch that contained it."""

    queue_seconds: float
    prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """The manifest's facts about an engine and its model."""

    engine: str
    engine_version: str
    model: str
    revision: str
    dtype: str
    logit_width: int  # rows of the language-model head
    max_model_len: int  # tokens
    candidate_ids: bool
    temperature: bool
    exact_tails: bool = True
    adapters: tuple[Adapter, ...] = ()


class EngineCrashError(TeacherError):
    """The engine failed permanently; only a new process can score again."""

    code = "engine_dead"


class Engine(Protocol):
    """Scores batches, one blocking call at a time, on any thread."""

    @property
    def description(self) -> EngineDescription:
        """Facts for the manifest."""
        ...

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """Return one distribution per completion token of every task, in the order of ``batch``.

        Row ``r`` predicts completion token ``r``; an empty completion has no rows. Distributions
        cover the ids that have a token: padding rows of the head get no probability. With
        ``candidate_ids``, exactly those entries are returned and ``top_k`` is ignored.

        Raises:
            EngineCrashError: if no later call can succeed.
        """
        ...


class AsyncEngine(ABC):
    """Scores sequences as they arrive, and batches them internally.

    Usable from any event loop, and from several in succession.
    """

    @property
    @abstractmethod
    def description(self) -> EngineDescription:
        """Facts for the manifest."""

    @abstractmethod
    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """Score one task, as defined by ``Engine.score``; cancelling aborts the sequence.

        Raises:
            EngineCrashError: if the engine has crashed.
        """

    @abstractmethod
    def on_crash(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` once, from any thread, with the cause, if the engine crashes.

        Closing the engine is not a crash.
        """

    @property
    def silent_seconds(self) -> float:
        """Seconds for which the engine's processes have not responded to a health check."""
        return 0.0

    @property
    def can_suspend(self) -> bool:
        """True if ``suspend`` frees the device's memory while the processes keep running."""
        return False

    def suspend(self) -> None:
        """Free the device's memory; nothing may be in flight. Blocks."""
        raise NotImplementedError

    def resume(self) -> None:
        """Restore the weights of a suspended engine; blocks."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Shut down the engine and its processes; idempotent."""


def empty_scores(k: int) -> TopKLogprobs:
    """Return the scores of an empty completion: ``[0, k]``."""
    return TopKLogprobs(
        ids=np.zeros((0, k), dtype=np.int32),
        logprobs=np.zeros((0, k), dtype=np.float32),
        token_logprobs=np.zeros(0, dtype=np.float32),
        tail_logprobs=np.zeros(0, dtype=np.float32),
    )
