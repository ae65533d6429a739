"""A clock that moves only when somebody sleeps, and remembers for how long."""

from dataclasses import dataclass, field

from mopd_client.transport.clock import Clock


@dataclass
class StillClock:
    """Seconds since it was made; ``chance`` 0 makes every pause the longest that it may be."""

    seconds: float = 0.0
    chance: float = 0.0
    sleeps: list[float] = field(default_factory=list[float])

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, sleep=self._sleep, chance=lambda: self.chance)

    async def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.seconds += seconds
