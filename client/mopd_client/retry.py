"""Sends one request until it is answered or its deadline ends; the only place that tries again.

Tried again are failures that say nothing about the request itself: no connection, a broken or
late answer, 429, 502, 503 and 504. Any other status is the teacher's answer and is handed back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from mopd_client.clock import Clock
from mopd_client.problem import problem_of
from mopd_client.replica import Replica, least_busy
from mopd_protocol.errors import TeacherError

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0


async def send_with_retries(
    replicas: Sequence[Replica],
    send: Callable[[Replica], Awaitable[httpx.Response]],
    *,
    teacher: str,
    timeout_seconds: float,
    deadline_seconds: float,
    clock: Clock,
    on_retry: Callable[[], None],
) -> httpx.Response:
    """The first answer that is not a passing failure; each attempt may go to another replica.

    ``timeout_seconds`` bounds one attempt from connecting to the last byte, ``deadline_seconds``
    all attempts and pauses together.

    Raises:
        TeacherError: when the deadline ends first; it tells the last failure.
    """
    started = clock.now()
    failed: Replica | None = None
    attempt = 0
    while True:
        remaining = started + deadline_seconds - clock.now()
        replica = least_busy(replicas, now=clock.now(), failed=failed)
        outcome = await _attempt(replica, send, min(timeout_seconds, remaining))
        if isinstance(outcome, httpx.Response) and outcome.status_code not in RETRIED_STATUSES:
            return outcome
        failed, attempt = replica, attempt + 1
        replica.not_before = clock.now() + _requested_pause(outcome)
        following = least_busy(replicas, now=clock.now(), failed=failed)
        pause = max(_backoff(attempt, clock), following.not_before - clock.now())
        if clock.now() + pause >= started + deadline_seconds:
            raise _gave_up(teacher, outcome, attempt, deadline_seconds)
        on_retry()
        await clock.sleep(pause)


async def _attempt(
    replica: Replica, send: Callable[[Replica], Awaitable[httpx.Response]], seconds: float
) -> httpx.Response | httpx.RequestError | TimeoutError:
    replica.in_flight += 1
    try:
        # httpx limits each read, not the sum of them: a trickling answer would never time out.
        async with asyncio.timeout(seconds):
            return await send(replica)
    except (httpx.RequestError, TimeoutError) as error:
        return error
    finally:
        replica.in_flight -= 1


def _requested_pause(outcome: httpx.Response | Exception) -> float:
    """Seconds of a Retry-After header; its date form is left to the ordinary backoff."""
    if not isinstance(outcome, httpx.Response):
        return 0.0
    requested = outcome.headers.get("retry-after", "").strip()
    return float(requested) if requested.isdecimal() else 0.0


def _backoff(attempt: int, clock: Clock) -> float:
    """Seconds: doubled each time, then shortened by up to half so that callers spread out."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
    return longest * (1.0 - 0.5 * clock.chance())


def _gave_up(
    teacher: str, outcome: httpx.Response | Exception, attempts: int, deadline_seconds: float
) -> TeacherError:
    tried = f"gave up after {attempts} attempts within {deadline_seconds:g} s"
    if isinstance(outcome, httpx.Response):
        status = outcome.status_code
        return TeacherError(
            f"teacher {teacher!r} answered {status}: {problem_of(outcome)} ({tried})", status=status
        )
    what = str(outcome) or type(outcome).__name__
    return TeacherError(f"teacher {teacher!r} gave no answer: {what} ({tried})")
