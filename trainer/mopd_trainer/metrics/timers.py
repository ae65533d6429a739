"""``StepTimer``: where a step's seconds go, when several phases may go on at once."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Literal

from mopd_trainer.metrics.step_metrics import Metrics, ratio

Phase = Literal["sample", "score", "train", "push"]


class StepTimer:
    """Seconds by the set of phases that went on together. For one thread: the event loop's.

    A phase that is entered several times at once goes on until all have left it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._running: Counter[Phase] = Counter()
        self._seconds: dict[frozenset[Phase], float] = defaultdict(float)
        self._since = now()

    @contextmanager
    def phase(self, name: Phase) -> Generator[None]:
        """That this phase goes on."""
        self._settle()
        self._running[name] += 1
        try:
            yield
        finally:
            self._settle()
            self._running[name] -= 1

    def take(self) -> Metrics:
        """Seconds since this was last asked.

        ``time/wait`` is of teachers at work while the student writes nothing,
        ``time/hidden_share`` the share of their time in which it does (NaN without any).
        """
        self._settle()
        taken, self._seconds = self._seconds, defaultdict[frozenset[Phase], float](float)
        scored = _seconds_of(taken, "score")
        waited = sum(s for p, s in taken.items() if "score" in p and "sample" not in p)
        return {
            "time/sample": _seconds_of(taken, "sample"),
            "time/score": scored,
            "time/wait": waited,
            "time/train": _seconds_of(taken, "train"),
            "time/push": _seconds_of(taken, "push"),
            "time/step": sum(taken.values()),
            "time/hidden_share": 1 - ratio(waited, scored),
        }

    def _settle(self) -> None:
        """Gives the seconds until now to the phases that were going on."""
        now = self._now()
        self._seconds[frozenset(+self._running)] += now - self._since
        self._since = now


def _seconds_of(seconds: Mapping[frozenset[Phase], float], name: Phase) -> float:
    return sum(s for phases, s in seconds.items() if name in phases)
