"""What a teacher's engine does: token ids in, distributions over the next token out.

An engine knows nothing of text, HTTP or queues. There are two kinds: an ``Engine`` is called with
a batch and blocks until it is scored (``TransformersEngine``); an ``AsyncEngine`` takes sequences
one by one and batches them by itself (``VllmEngine``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mopd_protocol.arrays import IntArray
from mopd_protocol.topk_logprobs import TopKLogprobs


@dataclass(frozen=True, eq=False)
class ScoringTask:
    """One sequence to score.

    ``prompt_ids`` is never empty: something must predict the first completion token.
    ``candidate_ids`` are unique within a row; a row may hold none.
    """

    prompt_ids: IntArray  # [prompt tokens]
    completion_ids: IntArray  # [rows]
    candidate_ids: tuple[IntArray, ...] | None = None  # rows x [candidates of that row]

    @property
    def tokens(self) -> int:
        """Tokens of prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class EngineTimes:
    """Seconds that one sequence waited, and that the engine worked on the batch it was in."""

    queue_seconds: float
    prefill_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What the manifest says about an engine and the model in it."""

    engine: str
    engine_version: str
    model: str
    revision: str
    dtype: str
    logit_width: int  # rows of the language-model head
    max_model_len: int  # tokens
    candidate_ids: bool
    temperature: bool


class EngineDead(RuntimeError):
    """The engine will never score again; the message is one sentence that says what ended it."""


class Engine(Protocol):
    """Scores batches, one call at a time, on whatever thread it is called from."""

    @property
    def description(self) -> EngineDescription:
        """Who this engine is."""
        ...

    def score(
        self, batch: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[TopKLogprobs]:
        """One distribution per completion token of every task, in the order of ``batch``.

        Row ``r`` predicts completion token ``r``; an empty completion has no rows. Distributions
        are over the ids that have a token: the head's padding rows hold no probability. With
        ``candidate_ids`` exactly those entries are returned and ``top_k`` is not read.

        Raises:
            EngineDead: when no later call can succeed either.
        """
        ...


class AsyncEngine(ABC):
    """Scores sequences that arrive at any time, and batches them as it sees fit.

    May be used from any event loop, and from several after one another.
    """

    @property
    @abstractmethod
    def description(self) -> EngineDescription:
        """Who this engine is."""

    @abstractmethod
    async def score(
        self, task: ScoringTask, *, top_k: int, temperature: float
    ) -> tuple[TopKLogprobs, EngineTimes]:
        """The distributions of one task, as ``Engine.score`` defines them.

        Cancelling takes the sequence out of the engine.

        Raises:
            EngineDead: when the engine has died.
        """

    @abstractmethod
    def watch(self, on_death: Callable[[str], None]) -> None:
        """Has ``on_death`` called once, from any thread, with one sentence, if the engine dies.

        An engine that is closed has not died.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and its processes; a second call does nothing."""


def no_rows(k: int) -> TopKLogprobs:
    """The scores of an empty completion."""
    return TopKLogprobs(
        ids=np.zeros((0, k), dtype=np.int32),
        logprobs=np.zeros((0, k), dtype=np.float32),
        token_logprobs=np.zeros(0, dtype=np.float32),
        tail_logprobs=np.zeros(0, dtype=np.float32),
    )
