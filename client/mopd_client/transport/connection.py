"""``Connection``: the way to one teacher's addresses; all that a client sends goes through it."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from mopd_client.transport.attempt import Attempts
from mopd_client.transport.circuit_breaker import CircuitBreaker
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.hedging import Hedging
from mopd_client.transport.http_pools import HttpPools
from mopd_client.transport.problem import problem_of
from mopd_client.transport.replica import Replica, replicas_at
from mopd_client.transport.retry import send_with_retries
from mopd_protocol.errors import ConfigError, TeacherError


class Connection:
    """Sends to the replicas of one teacher: at most ``max_concurrency`` questions at once, each
    tried again until it is answered or its deadline ends.

    Raises:
        ConfigError: on addresses, keys or limits that cannot work.
    """

    def __init__(
        self,
        teacher: str,
        urls: Sequence[str],
        *,
        api_key: str | None,
        timeout_seconds: float,
        deadline_seconds: float,
        max_concurrency: int,
        hedging: Hedging,
        transport: httpx.AsyncBaseTransport | None,
        clock: Clock,
    ) -> None:
        _require_positive(
            teacher,
            timeout_seconds=timeout_seconds,
            deadline_seconds=deadline_seconds,
            max_concurrency=max_concurrency,
        )
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                f"teacher {teacher!r} has an api_key with characters that no header can carry; "
                "expected printable ASCII without spaces or line ends"
            )
        self.teacher = teacher
        self.replicas = replicas_at(teacher, urls)
        self.counters = Counters()
        self.deadline_seconds = deadline_seconds
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._turns = asyncio.Semaphore(max_concurrency)
        self._attempts = Attempts(
            teacher, timeout_seconds, clock, counters=self.counters, hedging=hedging
        )
        self._http = HttpPools(
            max_concurrency,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
        )

    async def ask_replica(
        self,
        replica: Replica,
        path: str,
        *,
        body: object = None,
        deadline_seconds: float | None = None,
    ) -> httpx.Response:
        """The answer of this one replica to a GET, or to a POST of JSON; 200 or not.

        Who is not there yet is no failing replica: no breaker opens, and nothing is counted.

        Raises:
            TeacherError: when it does not answer.
        """
        return await send_with_retries(
            [Replica(replica.url, breaker=CircuitBreaker(failures_to_open=sys.maxsize))],
            lambda replica: self._http.next().request(
                "GET" if body is None else "POST", replica.url + path, json=body
            ),
            attempts=Attempts(self.teacher, self._timeout_seconds, self._clock, Counters()),
            deadline_seconds=deadline_seconds or self.deadline_seconds,
        )

    async def get(self, path: str) -> httpx.Response:
        """The answer of any replica to a question about the teacher, which is not counted.

        Raises:
            TeacherError: when none answers, or with another status than 200.
        """
        response = await send_with_retries(
            self.replicas,
            lambda replica: self._http.next().get(replica.url + path),
            attempts=Attempts(self.teacher, self._timeout_seconds, self._clock, Counters()),
            deadline_seconds=self.deadline_seconds,
        )
        return self.answered(response)

    async def question(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The answer of any replica to a question that costs the teacher work; it is counted.

        Raises:
            TeacherError: when none answers, or with another status than 200.
        """
        sent = {"content-type": "application/json", **(headers or {})}
        async with self._turns:
            started = self._clock.now()
            self.counters.requests += 1
            response = await send_with_retries(
                self.replicas,
                lambda replica: self._http.next().post(
                    replica.url + path, content=body, headers=sent
                ),
                attempts=self._attempts,
                deadline_seconds=self.deadline_seconds,
            )
            answered = self.answered(response)
            self.counters.received_bytes += len(answered.content)
            self.counters.seconds.append(self._clock.now() - started)
            return answered

    def answered(self, response: httpx.Response) -> httpx.Response:
        """The response, where it is one.

        Raises:
            TeacherError: with what the teacher said, when its status is not 200.
        """
        status = response.status_code
        if status == 200:
            return response
        advice = "; is its api_key right?" if status in (401, 403) else ""
        raise TeacherError(
            f"teacher {self.teacher!r} answered {status}: {problem_of(response)}{advice}",
            status=status,
        )

    def document(self, response: httpx.Response, *, kind: str) -> dict[str, Any]:
        """The JSON object in a response.

        Args:
            kind: what the address should be, for the sentence when it is not.

        Raises:
            TeacherError: when there is none.
        """
        try:
            body: Any = json.loads(response.content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise TeacherError(
                f"teacher {self.teacher!r} answered {response.url.path} with "
                f"{response.headers.get('content-type', 'no content type')}; expected a JSON "
                f"object; is this address a {kind}?",
                status=response.status_code,
            )
        return body  # pyright: ignore[reportUnknownVariableType]

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()


def _require_positive(teacher: str, **settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ConfigError(f"teacher {teacher!r} has {name} {value}; expected more than 0")
