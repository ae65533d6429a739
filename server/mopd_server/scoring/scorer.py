"""``SequenceScorer``: a queue and an engine behind it, as the service sees them."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Protocol

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.engines.base import EngineDead, EngineTimes, ScoringTask
from mopd_server.service_error import ServiceError


class SequenceScorer(Protocol):
    """Used from one event loop at a time."""

    @property
    def waiting_sequences(self) -> int:
        """Sequences that nobody works on yet, as far as can be seen from here."""
        ...

    @property
    def waiting_tokens(self) -> int:
        """Their tokens, prompts included."""
        ...

    async def score(
        self, tasks: Sequence[ScoringTask], *, top_k: int, temperature: float
    ) -> list[tuple[TopKLogprobs, EngineTimes]]:
        """The scores of ``tasks``, in order. Cancelling gives up those that are not scored yet.

        Raises:
            ServiceError: 429 if the queue is full, 500 if the engine fails, 503 if it died.
        """
        ...

    def close(self) -> None:
        """Ends the engine; a second call does nothing."""
        ...


def failure_of(error: Exception) -> ServiceError:
    """How a request is answered whose scoring ended with ``error``."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, EngineDead):
        refusal = ServiceError(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; ask another replica")
    else:
        refusal = ServiceError(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"the engine failed on this batch with {type(error).__name__}: {error}",
        )
    refusal.__cause__ = error
    return refusal
