"""``CircuitBreaker``: stops requests to an address after several consecutive failures.

Closed, it allows every request. After ``failures_to_open`` consecutive failures it opens and blocks
requests for ``pause_seconds``; it is half-open afterwards and allows one request, the probe. A
response closes it, a failure opens it again.
"""

import asyncio
import math
from dataclasses import dataclass, field

FAILURES_TO_OPEN = 5
PAUSE_SECONDS = 5.0


@dataclass(eq=False)
class CircuitBreaker:
    """Circuit breaker of one address; times are clock seconds."""

    failures_to_open: int = FAILURES_TO_OPEN
    pause_seconds: float = PAUSE_SECONDS
    failures: int = 0  # consecutive
    last_failure: str = ""
    _half_open_at: float | None = None  # None: closed
    _probe_ended: asyncio.Event | None = field(default=None)  # None: no probe in flight

    @property
    def closed(self) -> bool:
        """True while every request is allowed."""
        return self._half_open_at is None

    @property
    def available_at(self) -> float:
        """Earliest time of the next request; infinite while a probe is in flight."""
        if self._probe_ended is not None:
            return math.inf
        return -math.inf if self._half_open_at is None else self._half_open_at

    async def probe_end(self) -> None:
        """Wait until no probe is in flight."""
        if self._probe_ended is not None:
            await self._probe_ended.wait()

    def begin(self) -> bool:
        """Register a request; return True if it is the probe of a breaker that is not closed."""
        if self.closed:
            return False
        self._probe_ended = asyncio.Event()
        return True

    def succeed(self) -> None:
        """Register a response: close the breaker."""
        self.failures = 0
        self._half_open_at = None
        self._end_probe()

    def fail(self, now: float, failure: str, *, probe: bool) -> bool:
        """Register a failure (no response, or a 5xx); return True if a closed breaker opens.

        Late failures of requests that were sent before the breaker opened do not prolong the pause.
        """
        self.failures += 1
        self.last_failure = failure
        opens = self.closed and self.failures >= self.failures_to_open
        if opens or (probe and not self.closed):
            self._half_open_at = now + self.pause_seconds
        if probe:
            self._end_probe()
        return opens

    def abandon(self) -> None:
        """Register a cancelled probe: the next request may be the probe."""
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probe_ended is not None:
            self._probe_ended.set()
            self._probe_ended = None
