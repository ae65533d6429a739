"""``Clock``: source of time, sleep and randomness, replaceable in tests."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Monotonic time in seconds; only differences are meaningful."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random  # uniform in [0, 1)
