"""``Residency``: which teachers of a pool have their weights on the device.

A teacher scores a batch under a lease. Engines in this process have one lease at a time:
transformers changes torch's global settings while it loads a model. A resident teacher gets the
next lease. Another one replaces a resident teacher that is idle, or that has been resident for
several times the duration of a swap while its own queue is worth a swap, or as soon as it has
waited too long: the longest waiting first, so that none starves. A swap may take a minute (vLLM's
processes start again), so that waits and stays are multiples of its measured duration, too.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mopd_server.engines.base import EngineCrashError

#: A busy teacher stays resident for this multiple of a swap: swaps take at most a fifth.
STAY_SWAPS = 4.0

#: The same for overdue batches: while all teachers are busy, swaps take at most a third.
OVERDUE_STAY_SWAPS = 2.0

#: A teacher without work is idle after this multiple of a swap: a client that sends one request at
#: a time sends the next one within milliseconds.
LINGER_SWAPS = 0.1

#: Interval at which waiting threads compare their deadline with the time.
_POLL_SECONDS = 0.1


@dataclass
class Teacher:
    """State of one teacher; times are in seconds of one clock."""

    name: str
    resident: bool = False
    running: bool = False
    loading: bool = False
    waiting_since: float | None = None
    """A batch waits for a lease since then."""
    tokens: int = 0
    """Tokens of the batch and of the queue behind it, at the last request for a lease."""
    resident_since: float = 0.0
    last_used: float = 0.0
    seconds_per_token: float = 0.0
    """Speed of the last batch."""
    swap_seconds: float = 0.0
    """Duration of the last load."""
    swaps: int = 0
    queued_tokens: Callable[[], int] = lambda: 0
    """Tokens in the queue now: the next batch will request a lease."""

    @property
    def idle(self) -> bool:
        """True if no batch waits for a lease or will request one after the last."""
        return self.waiting_since is None and not self.queued_tokens()


@dataclass(frozen=True)
class Grant:
    """A teacher whose batch runs next, and the resident teacher that it replaces, if any."""

    teacher: Teacher
    victim: Teacher | None
    swap: bool


_Condition = Callable[[Teacher, Teacher, float], bool]


def choose(
    teachers: Iterable[Teacher],
    *,
    resident: int,
    max_wait: float,
    now: float,
    concurrent: bool = False,
) -> Grant | None:
    """Return the next lease; None if no waiting batch may run yet.

    Args:
        teachers: all teachers of the pool.
        resident: maximum number of resident teachers.
        max_wait: seconds after which a batch may replace a busy teacher, if four swaps take less.
        now: seconds.
        concurrent: resident teachers score at the same time, and while another one is loaded.
    """
    teachers = list(teachers)
    if not concurrent and any(each.running for each in teachers):
        return None
    waiting = sorted(
        (each for each in teachers if each.waiting_since is not None),
        key=lambda each: (each.waiting_since, each.name),
    )
    residents = [each for each in teachers if each.resident]
    loading = any(each.loading for each in teachers)
    others = [] if loading else [each for each in waiting if not each.resident]

    def swap(candidate: Teacher, may_leave: _Condition) -> Grant | None:
        if len(residents) < resident:
            return Grant(candidate, None, swap=True)
        leaving = (r for r in residents if not r.running and may_leave(r, candidate, now))
        victim = _least_needed(leaving)
        return victim and Grant(candidate, victim, swap=True)

    for each in others:
        longest = max(max_wait, STAY_SWAPS * each.swap_seconds)
        if now - (each.waiting_since or 0.0) >= longest and (grant := swap(each, _has_stayed)):
            return grant
    for each in waiting:
        if each.resident:
            return Grant(each, None, swap=False)
    return next((grant for each in others if (grant := swap(each, _may_leave))), None)


def _has_stayed(resident: Teacher, candidate: Teacher, now: float) -> bool:
    """Return whether a teacher may leave for an overdue batch."""
    stayed = now - resident.resident_since >= OVERDUE_STAY_SWAPS * candidate.swap_seconds
    return stayed or _is_idle(resident, candidate, now)


def _may_leave(resident: Teacher, candidate: Teacher, now: float) -> bool:
    """Return whether a swap that no deadline requires is worth its cost."""
    if _is_idle(resident, candidate, now):
        return True
    worth = candidate.tokens * candidate.seconds_per_token >= candidate.swap_seconds
    return worth and now - resident.resident_since >= STAY_SWAPS * candidate.swap_seconds


def _is_idle(resident: Teacher, candidate: Teacher, now: float) -> bool:
    return resident.idle and now - resident.last_used >= LINGER_SWAPS * candidate.swap_seconds


def _least_needed(residents: Iterable[Teacher]) -> Teacher | None:
    """Return the resident teacher with the least work; None without any."""
    return min(
        residents,
        key=lambda each: (
            not each.idle,
            0 if each.idle else each.tokens,
            each.last_used,
        ),
        default=None,
    )


class Residency:
    """Leases for the threads of a pool's engines.

    Args:
        names: names of the teachers.
        resident: maximum number of resident teachers.
        max_wait: seconds; see ``choose``.
        concurrent: see ``choose``.
        queued_tokens: tokens in the queue of a teacher.
        swap: loads the weights of the first name after releasing those of the second; blocks.
            One call at a time.
        now: seconds.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        resident: int,
        max_wait: float,
        concurrent: bool = False,
        queued_tokens: Callable[[str], int],
        swap: Callable[[str, str | None], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.teachers = {
            name: Teacher(name, queued_tokens=partial(queued_tokens, name)) for name in names
        }
        self._resident = resident
        self._max_wait = max_wait
        self._concurrent = concurrent
        self._swap = swap
        self._now = now
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def lease(self, name: str, tokens: int, batch_tokens: int) -> Generator[None]:
        """Make a teacher resident until the block ends; blocks until it is its turn.

        ``tokens`` are those of the batch and of the queue behind it.
        """
        teacher = self.teachers[name]
        with self._changed:
            teacher.waiting_since, teacher.tokens = self._now(), tokens
            self._changed.notify_all()
            while (grant := self._choose()) is None or grant.teacher is not teacher:
                if self._closed:
                    raise EngineCrashError("the pool is shutting down")
                self._changed.wait(_POLL_SECONDS)
            teacher.running, teacher.waiting_since = True, None
            if grant.victim is not None:
                grant.victim.resident = False
            teacher.resident, teacher.loading = True, grant.swap
            self._changed.notify_all()
        try:
            if grant.swap:
                self._load(teacher, grant.victim)
            started = self._now()
            yield
            if batch_tokens:
                teacher.seconds_per_token = (self._now() - started) / batch_tokens
        finally:
            with self._changed:
                teacher.running, teacher.last_used = False, self._now()
                self._changed.notify_all()

    def close(self) -> None:
        """Grant no more leases: threads that wait for one raise EngineCrashError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _load(self, teacher: Teacher, victim: Teacher | None) -> None:
        started = self._now()
        try:
            self._swap(teacher.name, victim.name if victim else None)
        except BaseException:
            with self._changed:
                teacher.resident = False
            raise
        finally:
            with self._changed:
                teacher.loading = False
                self._changed.notify_all()
        teacher.resident_since = self._now()
        teacher.swap_seconds = teacher.resident_since - started
        teacher.swaps += 1

    def _choose(self) -> Grant | None:
        return choose(
            self.teachers.values(),
            resident=self._resident,
            max_wait=self._max_wait,
            now=self._now(),
            concurrent=self._concurrent,
        )
