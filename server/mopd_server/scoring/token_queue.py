"""``TokenQueue``: a fair queue limited by tokens, with an estimate of its waiting time."""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Generic, TypeVar

from mopd_server.service_error import ServiceError

MAX_RETRY_SECONDS = 60
#: Half-life of the work that counts in the engine's measured speed.
_HALF_LIFE_SECONDS = 10.0

Entry = TypeVar("Entry")


@dataclass
class _Client(Generic[Entry]):
    """The entries of one API key."""

    weight: float
    tokens: int = 0
    waiting: dict[Entry, int] = field(default_factory=dict[Entry, int])  # entry -> arrival number
    service: float = 0.0  # tokens taken per weight, in virtual time


class TokenQueue(Generic[Entry]):
    """Entries that wait or are processed, and the measured speed of their processing.

    Keys are served in turn, in proportion to their weights in tokens, and each key's entries in
    order of arrival (start-time fair queueing, Goyal et al. 1996). A key that was idle has no
    credit. When the queue is full, a key may still use its share of the limit.

    Args:
        tokens_of: tokens of an entry.
        max_tokens: limit, waiting and processed.
        key_of: API key of an entry.
        weights: by key; 1 for all others.
    """

    def __init__(
        self,
        tokens_of: Callable[[Entry], int],
        *,
        max_tokens: int,
        key_of: Callable[[Entry], str] = lambda entry: "",
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._tokens_of = tokens_of
        self._key_of = key_of
        self._max_tokens = max_tokens
        self._weights = weights or {}
        self._clients: dict[str, _Client[Entry]] = {}
        self._entries: set[Entry] = set()
        self._arrivals = count()
        self._virtual_time = 0.0
        self._tokens = 0
        self._processed_tokens = 0.0
        self._processing_seconds = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all entries."""
        return self._tokens

    @property
    def tokens_by_key(self) -> dict[str, int]:
        """Tokens of the entries of each key that ever had one."""
        return {key: client.tokens for key, client in self._clients.items()}

    def add(self, entries: Sequence[Entry]) -> None:
        """Add all ``entries`` or none; a key without entries may exceed the limit.

        Raises:
            ServiceError: 429 with Retry-After, if the queue is full.
        """
        requested: defaultdict[str, int] = defaultdict(int)
        for entry in entries:
            requested[self._key_of(entry)] += self._tokens_of(entry)
        for key, tokens in requested.items():
            self._require_room(key, tokens)
        for entry in entries:
            client = self._client(self._key_of(entry))
            if not client.waiting:
                client.service = max(client.service, self._virtual_time)
            client.waiting[entry] = next(self._arrivals)
            client.tokens += self._tokens_of(entry)
            self._tokens += self._tokens_of(entry)
            self._entries.add(entry)

    def waiting(self) -> Iterator[Entry]:
        """Iterate over entries that are not taken, in the order of fair service.

        ``take`` and ``remove`` end the iteration.
        """
        heads: list[tuple[float, int, str, Iterator[tuple[Entry, int]], Entry]] = []

        def push(key: str, service: float, entries: Iterator[tuple[Entry, int]]) -> None:
            for entry, arrival in entries:
                heapq.heappush(heads, (service, arrival, key, entries, entry))
                return

        for key, client in self._clients.items():
            push(key, client.service, iter(client.waiting.items()))
        while heads:
            service, _, key, entries, entry = heapq.heappop(heads)
            yield entry
            push(key, service + self._tokens_of(entry) / self._clients[key].weight, entries)

    def take(self, entry: Entry) -> None:
        """Start to process an entry, which stays in the queue until ``remove``."""
        client = self._client(self._key_of(entry))
        del client.waiting[entry]
        self._virtual_time = max(self._virtual_time, client.service)
        client.service += self._tokens_of(entry) / client.weight

    def remove(self, entry: Entry) -> None:
        """Remove an entry, if present."""
        if entry in self._entries:
            self._entries.remove(entry)
            client = self._client(self._key_of(entry))
            client.waiting.pop(entry, None)
            client.tokens -= self._tokens_of(entry)
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

    def _client(self, key: str) -> _Client[Entry]:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = _Client(self._weights.get(key, 1.0))
        return client

    def _require_room(self, key: str, tokens: int) -> None:
        client = self._client(key)
        active = [each.weight for each in self._clients.values() if each.tokens or each is client]
        share = self._max_tokens * client.weight / sum(active)
        if (
            client.tokens
            and min(self._tokens + tokens - self._max_tokens, client.tokens + tokens - share) > 0
        ):
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the queue is full (found {self._tokens} tokens queued and {tokens} requested, "
                f"expected at most {self._max_tokens}). Retry later.",
                retry_after_seconds=self._waiting_seconds(),
            )

    def _waiting_seconds(self) -> int:
        seconds = math.ceil(self.expected_seconds(self._tokens))
        return min(max(seconds, 1), MAX_RETRY_SECONDS)
