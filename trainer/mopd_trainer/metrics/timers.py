"""``StepTimer``: the seconds of a step by phase, for phases that overlap."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Literal

from mopd_trainer.metrics.step_metrics import Metrics, ratio

Phase = Literal["sample", "score", "train", "evaluate", "push"]


class StepTimer:
    """Seconds by the set of concurrent phases; for the thread of the event loop.

    A phase that is entered several times at once lasts until the last one ends.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._running: Counter[Phase] = Counter()
        self._seconds: dict[frozenset[Phase], float] = defaultdict(float)
        self._since = now()

    @contextmanager
    def phase(self, name: Phase) -> Generator[None]:
        """Time a phase."""
        self._record()
        self._running[name] += 1
        try:
            yield
        finally:
            self._record()
            self._running[name] -= 1

    def pop(self) -> Metrics:
        """Return and reset the seconds.

        ``time/wait`` is the time with scoring but no sampling in progress, ``time/hidden_share``
        the share of the scoring time with sampling in progress (NaN without scoring).
        """
        self._record()
        seconds, self._seconds = self._seconds, defaultdict[frozenset[Phase], float](float)
        scoring = _total(seconds, "score")
        waiting = sum(s for p, s in seconds.items() if "score" in p and "sample" not in p)
        evaluating = _total(seconds, "evaluate")
        return {
            "time/sample": _total(seconds, "sample"),
            "time/score": scoring,
            "time/wait": waiting,
            "time/train": _total(seconds, "train"),
            "time/push": _total(seconds, "push"),
            **({"time/evaluate": evaluating} if evaluating else {}),
            "time/step": sum(seconds.values()),
            "time/hidden_share": 1 - ratio(waiting, scoring),
        }

    def _record(self) -> None:
        """Add the time since the last call to the phases in progress."""
        now = self._now()
        self._seconds[frozenset(+self._running)] += now - self._since
        self._since = now


def _total(seconds: Mapping[frozenset[Phase], float], name: Phase) -> float:
    return sum(s for phases, s in seconds.items() if name in phases)
