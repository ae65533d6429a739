"""``Clock``: where the client gets time, sleep and chance from, so that tests need none of them."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Time in seconds, of which only differences mean anything."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    chance: Callable[[], float] = random.random  # uniform in [0, 1)
