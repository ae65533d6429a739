"""One attempt: a request to one replica, with a second one elsewhere where the first is slow."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.hedging import Hedging, Latencies
from mopd_client.transport.problem import problem_of
from mopd_client.transport.replica import Replica, spare

logger = logging.getLogger(__name__)

#: A longer Retry-After is taken for this: no deadline is so long, and a number of a thousand digits
#: is infinite as a float.
_LONGEST_REQUESTED_SECONDS = 86_400.0

RETRIED_STATUSES = frozenset({429, 502, 503, 504})

Send = Callable[[Replica], Awaitable[httpx.Response]]
Outcome = httpx.Response | httpx.RequestError | TimeoutError


@dataclass(frozen=True)
class Attempts:
    """What all attempts for one teacher share."""

    teacher: str
    timeout_seconds: float  # for one attempt, from connecting to the last byte
    clock: Clock
    counters: Counters
    latencies: Latencies = field(default_factory=Latencies)
    hedging: Hedging = field(default_factory=Hedging)

    async def first_answer(
        self, replicas: Sequence[Replica], first: Replica, send: Send, *, ends: float
    ) -> Outcome:
        """The answer of ``first``, or of a spare replica that was asked later and was sooner.

        Args:
            ends: clock seconds at which the call's deadline is.
        """
        delay = self.latencies.hedge_delay(self.hedging)
        if delay is None or len(replicas) < 2:
            return await self.attempt(first, send, ends)
        tasks = [asyncio.create_task(self.attempt(first, send, ends))]
        alarm = asyncio.ensure_future(self.clock.sleep(delay))
        try:
            await asyncio.wait({tasks[0], alarm}, return_when=asyncio.FIRST_COMPLETED)
            second = spare(replicas, now=self.clock.now(), asked=first)
            if tasks[0].done() or second is None:
                return await tasks[0]
            tasks.append(asyncio.create_task(self.attempt(second, send, ends)))
            return await self._sooner(*tasks)
        finally:
            await _cancel(alarm, *tasks)

    async def _sooner(
        self, first: "asyncio.Task[Outcome]", second: "asyncio.Task[Outcome]"
    ) -> Outcome:
        """The sooner of two answers; a passing failure is no answer while the other may come."""
        won = False
        try:
            pending = {first, second}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in (first, second):
                    if task in done and is_answer(task.result()):
                        won = task is second
                        return task.result()
            return second.result()
        finally:
            self.counters.hedges_won += won
            self.counters.hedges_lost += not won

    async def attempt(self, replica: Replica, send: Send, ends: float) -> Outcome:
        """One request to one replica, which is remembered as working or failing."""
        started = self.clock.now()
        seconds = min(self.timeout_seconds, ends - started)
        probe = replica.breaker.begin()
        replica.in_flight += 1
        try:
            # httpx limits each read, not the sum of them: a trickling answer would never time out.
            async with asyncio.timeout(seconds):
                response = await send(replica)
        except (httpx.RequestError, TimeoutError) as error:
            # A call near its deadline leaves little time, which says nothing about the replica.
            if not isinstance(error, TimeoutError) or seconds == self.timeout_seconds:
                self._failed(replica, str(error) or type(error).__name__, probe)
            elif probe:
                replica.breaker.abandon()
            return error
        except BaseException:
            if probe:
                replica.breaker.abandon()
            # Mostly a hedge was sooner. Without the slow ones a quantile would fall at each hedge.
            self.latencies.seconds.append(self.clock.now() - started)
            raise
        finally:
            replica.in_flight -= 1
        self._answered(replica, response, probe, self.clock.now() - started)
        return response

    def _answered(
        self, replica: Replica, response: httpx.Response, probe: bool, seconds: float
    ) -> None:
        replica.not_before = self.clock.now() + _requested_pause(response)
        if response.status_code >= 500:
            self._failed(replica, f"{response.status_code}: {problem_of(response)}", probe)
            return
        replica.breaker.succeed()
        if is_answer(response):
            self.latencies.seconds.append(seconds)

    def _failed(self, replica: Replica, failure: str, probe: bool) -> None:
        if replica.breaker.fail(self.clock.now(), failure, probe=probe):
            self.counters.breaker_openings += 1
            logger.warning(
                "teacher %r at %s failed %d times in a row (%s); left alone for %g s at a time",
                self.teacher,
                replica.url,
                replica.breaker.failures,
                failure,
                replica.breaker.pause_seconds,
            )


def is_answer(outcome: Outcome) -> bool:
    """Whether it is the teacher's word, and not a failure that may pass."""
    return isinstance(outcome, httpx.Response) and outcome.status_code not in RETRIED_STATUSES


def _requested_pause(response: httpx.Response) -> float:
    """Seconds of a Retry-After header; its date form is left to the ordinary backoff."""
    if response.status_code not in RETRIED_STATUSES:
        return 0.0
    requested = response.headers.get("retry-after", "").strip()
    return min(float(requested), _LONGEST_REQUESTED_SECONDS) if requested.isdecimal() else 0.0


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
