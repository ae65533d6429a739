"""How much each API key may ask for: tokens a minute, and requests at once."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from mopd_server.service_error import ServiceError

_SECONDS_PER_MINUTE = 60.0
#: Tokens that sums of floating-point numbers may be short of: who waited as told is let in.
_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class KeyQuota:
    """What one key may use; ``None`` is no limit."""

    tokens_per_minute: int | None = None
    """Prompt and completion tokens together."""
    requests_in_flight: int | None = None


@dataclass
class _Use:
    tokens: float  # that may be spent now; below 0 after a request larger than the quota
    updated: float  # seconds of the clock
    in_flight: int = 0


class Quotas:
    """One bucket of tokens a key, which fills steadily up to a minute's worth.

    ``now`` gives seconds; keys are told apart by name, so two keys of one name share a quota.
    """

    def __init__(self, quota: KeyQuota, now: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._now = now
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def turn(self, name: str) -> Generator[None]:
        """Counts a request of this key until the block ends.

        Raises:
            ServiceError: 429 when the key has as many requests in flight as it may.
        """
        use, limit = self._use(name), self._quota.requests_in_flight
        if limit is not None and use.in_flight >= limit:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"key {name!r} has {use.in_flight} requests in flight already, its quota of "
                "requests at once; ask again when one is answered",
                retry_after_seconds=1,
                reason="quota_in_flight",
            )
        use.in_flight += 1
        try:
            yield
        finally:
            use.in_flight -= 1

    def spend(self, name: str, tokens: int) -> None:
        """Takes ``tokens`` from this key's bucket.

        A request larger than the whole quota is let in when the bucket is full; its debt is paid
        by waiting.

        Raises:
            ServiceError: 429 when they are not there yet.
        """
        rate = self._quota.tokens_per_minute
        if rate is None:
            return
        use = self._refilled(name, rate)
        missing = min(tokens, rate) - use.tokens
        if missing > _ROUNDING:
            raise ServiceError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"key {name!r} has {max(0, math.floor(use.tokens))} tokens left of its quota of "
                f"{rate} a minute, and this request has {tokens}; ask again later",
                retry_after_seconds=math.ceil(missing / rate * _SECONDS_PER_MINUTE),
                reason="quota_tokens",
            )
        use.tokens -= tokens

    def give_back(self, name: str, tokens: int) -> None:
        """Returns tokens that were taken for a request that was then refused."""
        rate = self._quota.tokens_per_minute
        if rate is not None:
            use = self._refilled(name, rate)
            use.tokens = min(use.tokens + tokens, float(rate))

    def _refilled(self, name: str, rate: int) -> _Use:
        use, now = self._use(name), self._now()
        earned = (now - use.updated) / _SECONDS_PER_MINUTE * rate
        use.tokens, use.updated = min(use.tokens + earned, float(rate)), now
        return use

    def _use(self, name: str) -> _Use:
        return self._uses.setdefault(
            name, _Use(float(self._quota.tokens_per_minute or 0), self._now())
        )
