"""``CircuitBreaker``: leaves an address alone that has failed several times in a row.

Closed, it lets every request through. After ``failures_to_open`` failures in a row it opens and
lets none through for ``pause_seconds``. Then it is half-open: one request may try (the probe). An
answer closes it, a failure opens it again.
"""

import asyncio
import math
from dataclasses import dataclass, field

FAILURES_TO_OPEN = 5
PAUSE_SECONDS = 5.0


@dataclass(eq=False)
class CircuitBreaker:
    """The breaker of one address; times are clock seconds."""

    failures_to_open: int = FAILURES_TO_OPEN
    pause_seconds: float = PAUSE_SECONDS
    failures: int = 0  # in a row
    last_failure: str = ""
    _half_open_at: float | None = None  # None: closed
    _probe_ended: asyncio.Event | None = field(default=None)  # None: no probe under way

    @property
    def closed(self) -> bool:
        """Whether requests go through freely."""
        return self._half_open_at is None

    @property
    def free_at(self) -> float:
        """From when a request may be sent; infinite while another one is the probe."""
        if self._probe_ended is not None:
            return math.inf
        return -math.inf if self._half_open_at is None else self._half_open_at

    async def probe_end(self) -> None:
        """Returns when no probe is under way."""
        if self._probe_ended is not None:
            await self._probe_ended.wait()

    def begin(self) -> bool:
        """A request is being sent; True when it is the probe, because the breaker is not closed."""
        if self.closed:
            return False
        self._probe_ended = asyncio.Event()
        return True

    def succeed(self) -> None:
        """An answer came: the address works."""
        self.failures = 0
        self._half_open_at = None
        self._end_probe()

    def fail(self, now: float, failure: str, *, probe: bool) -> bool:
        """No answer came, or one of the 500s; True when this opens a closed breaker.

        Late failures of requests that were sent before it opened do not prolong the pause.
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
        """The probe was cancelled and says nothing; the next request may be the probe."""
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probe_ended is not None:
            self._probe_ended.set()
            self._probe_ended = None
