"""Send one request until a final response or the deadline; the only place that retries.

Retried are failures independent of the request: no connection, a broken or late response, 429, 502,
503 and 504. Every other status is final and returned.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from mopd_client.transport.balance import NO_WORK, Work
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.discovery import RENEW_FAILED_SECONDS, RENEW_SECONDS, Replicas
from mopd_client.transport.outcome import (
    Outcome,
    certificate_problem,
    is_final,
    problem_of,
    requested_pause,
)
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import TeacherError, TeacherUnavailableError

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 15.0
#: Clients that got the same Retry-After return within this share of it, not all at once.
RETRY_AFTER_SPREAD = 0.25

Send = Callable[[Replica], Awaitable[httpx.Response]]


@dataclass(frozen=True)
class Attempts:
    """Single attempts to reach one teacher, and the settings that all attempts share."""

    teacher: str
    timeout_seconds: float  # for one attempt, from connecting to the last byte
    clock: Clock
    counters: Counters

    async def attempt(self, replica: Replica, send: Send, deadline: float, tokens: int) -> Outcome:
        """Send one request to one replica and record success or failure in its breaker.

        Args:
            deadline: clock seconds of the call's deadline.
            tokens: of the request.
        """
        seconds = min(self.timeout_seconds, deadline - self.clock.now())
        probe = replica.breaker.begin()
        replica.in_flight += tokens
        self.counters.replica(replica.url).requests += 1
        try:
            # httpx limits each read, not their sum: a trickling response would never time out.
            async with asyncio.timeout(seconds):
                response = await send(replica)
        except (httpx.RequestError, TimeoutError) as error:
            # A timeout shortened by the call's deadline is no failure of the replica.
            if not isinstance(error, TimeoutError) or seconds == self.timeout_seconds:
                self._record_failure(replica, str(error) or type(error).__name__, probe)
            elif probe:
                replica.breaker.abandon()
            self.counters.replica(replica.url).failures += 1
            return error
        except BaseException:
            if probe:
                replica.breaker.abandon()
            raise
        finally:
            replica.in_flight -= tokens
        replica.not_before = self.clock.now() + requested_pause(response)
        if response.status_code >= 500:
            failure = f"{response.status_code}: {problem_of(response)}"
            self._record_failure(replica, failure, probe)
        else:
            replica.breaker.succeed()
        counts = self.counters.replica(replica.url)  # another object than before, after a pop
        counts.failures += not is_final(response)
        counts.tokens += tokens if response.status_code == 200 else 0
        return response

    def _record_failure(self, replica: Replica, failure: str, probe: bool) -> None:
        if replica.breaker.fail(self.clock.now(), failure, probe=probe):
            self.counters.breaker_openings += 1
            logger.warning(
                "teacher %r: %s failed %d times in a row (%s); retrying every %g s",
                self.teacher,
                replica.url,
                replica.breaker.failures,
                failure,
                replica.breaker.pause_seconds,
            )


async def send_with_retries(
    replicas: Replicas,
    send: Send,
    *,
    attempts: Attempts,
    deadline_seconds: float,
    work: Work = NO_WORK,
    avoided: Replica | None = None,
) -> httpx.Response:
    """Return the first final response; each attempt may go to another replica.

    ``deadline_seconds`` limits all attempts, pauses and waiting for an available replica together.
    The first attempt does not go to the ``avoided`` replica if another one is available.

    Raises:
        TeacherUnavailableError: at the deadline, with the last failure.
        TeacherError: if a replica's certificate is invalid, which no retry changes.
    """
    clock = attempts.clock
    deadline = clock.now() + deadline_seconds
    last = _LastFailure(attempts.teacher, deadline_seconds)
    failed = avoided
    while True:
        replica = await _available_replica(replicas, work, failed, deadline, clock, last)
        replicas.balance.record(replica, work)
        outcome = await attempts.attempt(replica, send, deadline, work.tokens)
        if isinstance(outcome, httpx.Response) and is_final(outcome):
            return outcome
        if problem := certificate_problem(outcome):
            raise TeacherError(
                f"teacher {attempts.teacher!r}: the certificate of {replica.url} is invalid: "
                f"{problem}. Renew it, or set ca_file to the certificate of its authority.",
                key="certificate",
            )
        last.record(outcome, replica)
        failed = replica
        replicas.renew_if_due(failed=True)
        pause = _backoff(last.attempts, clock)
        following = replicas.choose(work, failed)
        if following is not None and following.available_at < math.inf:
            seconds = _spread(following.available_at - clock.now(), deadline, clock)
            pause = max(pause, seconds)
        if clock.now() + pause >= deadline:
            raise last.error(replica)
        attempts.counters.retries += 1
        await clock.sleep(pause)


async def _available_replica(
    replicas: Replicas,
    work: Work,
    failed: Replica | None,
    deadline: float,
    clock: Clock,
    last: "_LastFailure",
) -> Replica:
    """Wait for an available replica and return the chosen one.

    Raises:
        MopdError: if no replica becomes available before the deadline.
    """
    longest = RENEW_SECONDS if replicas.renewed else math.inf  # others may have come then
    while True:
        replicas.renew_if_due()
        now = clock.now()
        replica = replicas.choose(work, failed)
        if replica is None:
            if now + RENEW_FAILED_SECONDS >= deadline:
                raise replicas.error()
            await clock.sleep(RENEW_FAILED_SECONDS)
            await replicas.renew()
        elif replica.available_at <= now:
            return replica
        elif replica.available_at == math.inf:
            seconds = min(deadline - now, longest)
            if not await _any_probe_end(replicas, seconds) and seconds < longest:
                raise last.error(replica)
        elif replica.available_at >= deadline:
            raise last.error(replica)
        else:
            seconds = _spread(replica.available_at - now, deadline, clock)
            await clock.sleep(min(seconds, longest))


async def _any_probe_end(replicas: Replicas, seconds: float) -> bool:
    """Wait for the end of a probe, one of which is in flight to each replica; False on timeout."""
    probes = [asyncio.create_task(replica.breaker.probe_end()) for replica in replicas.current]
    try:
        done, _ = await asyncio.wait(
            probes, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        for probe in probes:
            probe.cancel()


def _backoff(attempt: int, clock: Clock) -> float:
    """Return the pause in seconds: doubled per attempt, shortened by up to half at random."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
    return longest * (1.0 - 0.5 * clock.random())


def _spread(seconds: float, deadline: float, clock: Clock) -> float:
    """Lengthen a pause at random, but not past the deadline."""
    longer = seconds * (1.0 + RETRY_AFTER_SPREAD * clock.random())
    return longer if clock.now() + longer < deadline else seconds


class _LastFailure:
    """Number of failed attempts of a call and the last outcome, for the error message."""

    def __init__(self, teacher: str, deadline_seconds: float) -> None:
        self.attempts = 0
        self._teacher = teacher
        self._deadline_seconds = deadline_seconds
        self._outcome: Outcome | None = None
        self._replica: Replica | None = None

    def record(self, outcome: Outcome, replica: Replica) -> None:
        """Record another failed attempt."""
        self.attempts += 1
        self._outcome, self._replica = outcome, replica

    def error(self, unavailable: Replica) -> TeacherUnavailableError:
        """Build the error.

        Args:
            unavailable: replica whose failures in other calls are the reason, if this call was not
                sent.
        """
        outcome, replica = self._outcome, self._replica or unavailable
        subject = f"teacher {self._teacher!r} at {replica.url}"
        attempts = f"{self.attempts} attempts within {self._deadline_seconds:g} s"
        if isinstance(outcome, httpx.Response):
            return TeacherUnavailableError(
                f"{subject} is unavailable: status {outcome.status_code}: "
                f"{problem_of(outcome)} (after {attempts})",
                status=outcome.status_code,
            )
        if outcome is None:
            earlier_failure = unavailable.breaker.last_failure
            reason = f"{earlier_failure or 'Retry-After has not expired'}, as in earlier calls"
        else:
            reason = str(outcome) or type(outcome).__name__
        return TeacherUnavailableError(f"{subject} is unreachable: {reason} (after {attempts})")
