"""``Heartbeat``: repeated health checks of an engine, and for how long one is pending."""

import asyncio
import time
from collections.abc import Awaitable, Callable

#: Pause between a response and the next check.
_PAUSE_SECONDS = 2.0


class Heartbeat:
    """Checks an engine until cancelled; readable from any thread.

    An engine responds between two steps, so that a hung one is detected without work, too.
    """

    def __init__(
        self, check: Callable[[], Awaitable[object]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._check = check
        self._now = now
        self._sent: float | None = None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the pending check was sent; 0 without one."""
        sent = self._sent
        return 0.0 if sent is None else self._now() - sent

    async def run(self) -> None:
        """Repeat the check; raises its error."""
        while True:
            self._sent = self._now()
            await self._check()
            self._sent = None
            await asyncio.sleep(_PAUSE_SECONDS)
