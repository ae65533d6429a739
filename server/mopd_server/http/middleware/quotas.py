"""Quotas of API keys: tokens per minute, and concurrent requests."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from mopd_server.service_error import ServiceError

_SECONDS_PER_MINUTE = 60.0
#: Rounding of floating-point sums: a client that waits for Retry-After seconds must be accepted.
_ROUNDING_TOKENS = 1e-6


@dataclass(frozen=True, kw_only=True)
class KeyQuota:
    """Limits of one key; ``None``: unlimited."""

    tokens_per_minute: int | None = None
    """Prompt and completion tokens."""
    requests_in_flight: int | None = None


@dataclass
class _Usage:
    tokens: float  # available; below 0 after a request above the quota
    updated: float  # seconds of the clock
    in_flight: int = 0


class Quotas:
    """One token bucket per key, with a capacity of one minute.

    ``now`` returns seconds; keys with equal names share a quota.
    """

    def __init__(self, quota: KeyQuota, now: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._now = now
        self._usages: dict[str, _Usage] = {}

    @contextmanager
    def request(self, name: str) -> Generator[None]:
        """Count a request of a key until the block ends.

        Raises:
            ServiceError: 429 if the key has too many requests in flight.
        """
        usage, limit = self._usage(name), self._quota.requests_in_flight
        if limit is not None and usage.in_flight >= limit:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"key {name!r}: too many requests in flight (found {usage.in_flight}, expected "
                f"less than {limit}). Retry after a response.",
                code="quota_in_flight",
                retry_after_seconds=1,
            )
        usage.in_flight += 1
        try:
            yield
        finally:
            usage.in_flight -= 1

    def charge(self, name: str, tokens: int) -> None:
        """Charge ``tokens`` to a key.

        A request above the quota of a minute is accepted if the bucket is full; later requests
        wait until the debt is repaid.

        Raises:
            ServiceError: 429 if the key has too few tokens.
        """
        rate = self._quota.tokens_per_minute
        if rate is None:
            return
        usage = self._refilled(name, rate)
        missing = min(tokens, rate) - usage.tokens
        if missing > _ROUNDING_TOKENS:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"key {name!r}: quota of {rate} tokens per minute exhausted (found {tokens} tokens "
                f"requested, expected at most {max(0, math.floor(usage.tokens))}). Retry later.",
                code="quota_tokens",
                retry_after_seconds=math.ceil(missing / rate * _SECONDS_PER_MINUTE),
            )
        usage.tokens -= tokens

    def refund(self, name: str, tokens: int) -> None:
        """Refund the tokens of a request that failed after ``charge``."""
        rate = self._quota.tokens_per_minute
        if rate is not None:
            usage = self._refilled(name, rate)
            usage.tokens = min(usage.tokens + tokens, float(rate))

    def _refilled(self, name: str, rate: int) -> _Usage:
        usage, now = self._usage(name), self._now()
        earned = (now - usage.updated) / _SECONDS_PER_MINUTE * rate
        usage.tokens, usage.updated = min(usage.tokens + earned, float(rate)), now
        return usage

    def _usage(self, name: str) -> _Usage:
        return self._usages.setdefault(
            name, _Usage(float(self._quota.tokens_per_minute or 0), self._now())
        )
