"""``Scorer``: a queue and an engine behind one interface."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineCrashError, EngineTimes, ScoringTask
from mopd_server.scoring.token_queue import TokenQueue
from mopd_server.service_error import ServiceError


class QueuedTask(Protocol):
    """A sequence in the queue, with the API key of its request."""

    @property
    def task(self) -> ScoringTask: ...

    @property
    def key(self) -> str: ...


Entry = TypeVar("Entry", bound=QueuedTask)


class Scorer(ABC, Generic[Entry]):
    """Used from one event loop at a time."""

    def __init__(self, *, max_queue_tokens: int, weights: Mapping[str, float] | None) -> None:
        self._queue: TokenQueue[Entry] = TokenQueue(
            lambda entry: entry.task.tokens,
            max_tokens=max_queue_tokens,
            key_of=lambda entry: entry.key,
            weights=weights,
        )

    @property
    def queued_sequences(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt and completion tokens in the queue."""
        return self._queue.tokens

    @abstractmethod
    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float, key: str = ""
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """Score ``tasks``, in order; cancelling drops those that are not scored yet.

        API keys (``key``) share the engine in proportion to their weights.

        Raises:
            ServiceError: 429 if the queue is full, 500 if the engine fails, 503 if it has crashed.
        """

    @property
    def queued_tokens_by_key(self) -> dict[str, int]:
        """Tokens in the queue of each API key that has used it."""
        return self._queue.tokens_by_key

    @property
    @abstractmethod
    def silent_seconds(self) -> float:
        """Seconds for which the engine should have responded, and has not."""

    @abstractmethod
    def close(self) -> None:
        """Shut down the engine; idempotent."""


def as_service_error(error: Exception) -> ServiceError:
    """Convert an engine's error into the error of a request."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, EngineCrashError):
        converted = ServiceError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{error}. Use another replica.", code=error.code
        )
    else:
        converted = ServiceError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"the engine failed on this batch with {type(error).__name__}: {error}",
            code="engine_failed",
        )
    converted.__cause__ = error
    return converted
