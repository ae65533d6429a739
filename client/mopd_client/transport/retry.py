"""Sends one request until it is answered or its deadline ends; the only place that tries again.

Tried again are failures that say nothing about the request itself: no connection, a broken or
late answer, 429, 502, 503 and 504. Any other status is the teacher's answer and is handed back.
"""

import asyncio
import math
from collections.abc import Sequence

import httpx

from mopd_client.transport.attempt import Attempts, Outcome, Send, is_answer
from mopd_client.transport.clock import Clock
from mopd_client.transport.problem import problem_of
from mopd_client.transport.replica import Replica, least_busy
from mopd_protocol.errors import TeacherError

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0


async def send_with_retries(
    replicas: Sequence[Replica],
    send: Send,
    *,
    attempts: Attempts,
    deadline_seconds: float,
) -> httpx.Response:
    """The first answer that is not a passing failure; each attempt may go to another replica.

    ``deadline_seconds`` bounds all attempts and pauses together, and the wait for a replica that
    is not left alone.

    Raises:
        TeacherError: when the deadline ends first; it tells the last failure.
    """
    clock = attempts.clock
    ends = clock.now() + deadline_seconds
    last = _LastFailure(attempts.teacher, deadline_seconds)
    failed: Replica | None = None
    while True:
        replica = await _free_replica(replicas, failed, ends, clock, last)
        outcome = await attempts.first_answer(replicas, replica, send, ends=ends)
        if isinstance(outcome, httpx.Response) and is_answer(outcome):
            return outcome
        last.remember(outcome)
        failed = replica
        following = least_busy(replicas, now=clock.now(), failed=failed).free_at - clock.now()
        pause = _backoff(last.attempts, clock)
        if following < math.inf:
            pause = max(pause, following)
        if clock.now() + pause >= ends:
            raise last.told()
        attempts.counters.retries += 1
        await clock.sleep(pause)


async def _free_replica(
    replicas: Sequence[Replica],
    failed: Replica | None,
    ends: float,
    clock: Clock,
    last: "_LastFailure",
) -> Replica:
    """The least busy replica, once one may be asked at all.

    Raises:
        TeacherError: when none may be within the deadline.
    """
    while True:
        now = clock.now()
        replica = least_busy(replicas, now=now, failed=failed)
        if replica.free_at <= now:
            return replica
        if replica.free_at == math.inf:
            if not await _any_probe_end(replicas, ends - now):
                raise last.told(replica.breaker.last_failure)
        elif replica.free_at >= ends:
            raise last.told(replica.breaker.last_failure)
        else:
            await clock.sleep(replica.free_at - now)


async def _any_probe_end(replicas: Sequence[Replica], seconds: float) -> bool:
    """Whether a probe ended, all replicas having one under way, before the time was over."""
    probes = [asyncio.create_task(replica.breaker.probe_end()) for replica in replicas]
    try:
        done, _ = await asyncio.wait(
            probes, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        for probe in probes:
            probe.cancel()


def _backoff(attempt: int, clock: Clock) -> float:
    """Seconds: doubled each time, then shortened by up to half so that callers spread out."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
    return longest * (1.0 - 0.5 * clock.chance())


class _LastFailure:
    """Why a call is given up, in a sentence."""

    def __init__(self, teacher: str, deadline_seconds: float) -> None:
        self.attempts = 0
        self._teacher = teacher
        self._deadline_seconds = deadline_seconds
        self._outcome: Outcome | None = None

    def remember(self, outcome: Outcome) -> None:
        """Another attempt failed."""
        self.attempts += 1
        self._outcome = outcome

    def told(self, others: str = "") -> TeacherError:
        """The error to raise; ``others`` is what earlier calls met, for a call never sent."""
        outcome = self._outcome
        tried = f"gave up after {self.attempts} attempts within {self._deadline_seconds:g} s"
        if isinstance(outcome, httpx.Response):
            status = outcome.status_code
            return TeacherError(
                f"teacher {self._teacher!r} answered {status}: {problem_of(outcome)} ({tried})",
                status=status,
            )
        if outcome is None:
            what = f"{others or 'it asked to be left alone'}, as other calls found"
        else:
            what = str(outcome) or type(outcome).__name__
        return TeacherError(f"teacher {self._teacher!r} gave no answer: {what} ({tried})")
