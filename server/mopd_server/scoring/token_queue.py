"""``TokenQueue``: a queue limited by tokens, with an estimate of its waiting time."""

import math
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Generic, TypeVar

from mopd_server.service_error import ServiceError

MAX_RETRY_SECONDS = 60
#: Half-life of the work that counts in the engine's measured speed.
_HALF_LIFE_SECONDS = 10.0

Entry = TypeVar("Entry")


class TokenQueue(Generic[Entry]):
    """Entries in order of arrival, and the measured speed of their processing."""

    def __init__(self, tokens_of: Callable[[Entry], int], *, max_tokens: int) -> None:
        self._tokens_of = tokens_of
        self._max_tokens = max_tokens
        self._entries: dict[Entry, None] = {}
        self._tokens = 0
        self._processed_tokens = 0.0
        self._processing_seconds = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all entries."""
        return self._tokens

    def add(self, entries: Sequence[Entry]) -> None:
        """Add all ``entries`` or none; an empty queue accepts entries above its limit.

        Raises:
            ServiceError: 429 with Retry-After, if the queue is full.
        """
        tokens = sum(map(self._tokens_of, entries))
        if self._entries and self._tokens + tokens > self._max_tokens:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the queue is full (found {self._tokens} tokens queued and {tokens} requested, "
                f"expected at most {self._max_tokens}). Retry later.",
                retry_after_seconds=self._waiting_seconds(),
            )
        self._entries.update(dict.fromkeys(entries))
        self._tokens += tokens

    def remove(self, entry: Entry) -> None:
        """Remove an entry, if present."""
        if entry in self._entries:
            del self._entries[entry]
            self._tokens -= self._tokens_of(entry)

    def record(self, tokens: int, seconds: float) -> None:
        """Record that the engine processed ``tokens`` in ``seconds``, idle time excluded."""
        decay = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._processed_tokens = decay * self._processed_tokens + tokens
        self._processing_seconds = decay * self._processing_seconds + seconds

    def expected_seconds(self, tokens: int) -> float:
        """Return the time to process ``tokens`` at the measured speed; 0 before the first."""
        if not self._processed_tokens:
            return 0.0
        return tokens * self._processing_seconds / self._processed_tokens

    def _waiting_seconds(self) -> int:
        seconds = math.ceil(self.expected_seconds(self._tokens))
        return min(max(seconds, 1), MAX_RETRY_SECONDS)
