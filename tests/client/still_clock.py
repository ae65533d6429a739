"""Clock that advances only in ``sleep`` and records each sleep."""

import asyncio
from dataclasses import dataclass, field

from mopd_client.transport.clock import Clock


@dataclass
class StillClock:
    """Seconds since creation; with ``random`` 0 every pause has its maximum length."""

    seconds: float = 0.0
    random: float = 0.0
    pauses: list[float] = field(default_factory=list[float])

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, sleep=self._sleep, random=lambda: self.random)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


async def settle() -> None:
    """Run every task until all tasks wait for an event."""
    for _ in range(50):
        await asyncio.sleep(0)
