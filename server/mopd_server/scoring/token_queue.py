"""``TokenQueue``: what waits for an engine, bounded by its tokens, and how long that will take."""

import math
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Generic, TypeVar

from mopd_server.service_error import ServiceError

LONGEST_RETRY_SECONDS = 60
#: Work this many seconds ago counts half as much in the engine's speed.
_HALF_LIFE_SECONDS = 10.0

Entry = TypeVar("Entry")


class TokenQueue(Generic[Entry]):
    """Entries in order of arrival. Whoever works on them says how fast it went."""

    def __init__(self, tokens_of: Callable[[Entry], int], *, max_tokens: int) -> None:
        self._tokens_of = tokens_of
        self._max_tokens = max_tokens
        self._entries: dict[Entry, None] = {}
        self._tokens = 0
        self._worked_tokens = 0.0
        self._worked_seconds = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all entries."""
        return self._tokens

    def enter(self, entries: Sequence[Entry]) -> None:
        """Takes all ``entries`` in, or none.

        Entries that are together larger than the queue are let in when nothing waits.

        Raises:
            ServiceError: 429 with Retry-After seconds, if the queue is full.
        """
        tokens = sum(map(self._tokens_of, entries))
        if self._entries and self._tokens + tokens > self._max_tokens:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._tokens} tokens wait already and {tokens} more would be above the "
                f"queue's limit of {self._max_tokens}; ask again later",
                retry_after_seconds=self._seconds_of_work(),
            )
        self._entries.update(dict.fromkeys(entries))
        self._tokens += tokens

    def leave(self, entry: Entry) -> None:
        """Takes one out; one that has left already changes nothing."""
        if entry in self._entries:
            del self._entries[entry]
            self._tokens -= self._tokens_of(entry)

    def worked(self, tokens: int, seconds: float) -> None:
        """Remembers that the engine needed ``seconds`` for ``tokens``; idle time is not work."""
        kept = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._worked_tokens = kept * self._worked_tokens + tokens
        self._worked_seconds = kept * self._worked_seconds + seconds

    def _seconds_of_work(self) -> int:
        if not self._worked_tokens:
            return 1
        seconds = math.ceil(self._tokens * self._worked_seconds / self._worked_tokens)
        return min(max(seconds, 1), LONGEST_RETRY_SECONDS)
