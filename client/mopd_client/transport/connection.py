"""``Connection``: sends all requests to one teacher's replicas."""

import asyncio
import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from mopd_client.transport.balance import NO_WORK, Work
from mopd_client.transport.circuit_breaker import CircuitBreaker
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.discovery import Replicas, Resolve, resolve
from mopd_client.transport.http_pools import HttpPools
from mopd_client.transport.outcome import problem_of
from mopd_client.transport.replica import Replica
from mopd_client.transport.retry import Attempts, send_with_retries
from mopd_protocol.errors import ConfigError, DataError, InvalidResponseError, TeacherError


class Connection:
    """Requests to one teacher: at most ``max_concurrency`` in flight, retried until the deadline.

    Raises:
        ConfigError: on an invalid address, key, certificate file or limit.
    """

    def __init__(
        self,
        teacher: str,
        urls: Sequence[str],
        *,
        api_key: str | None,
        ca_file: str | Path | None,
        timeout_seconds: float,
        deadline_seconds: float,
        max_concurrency: int,
        transport: httpx.AsyncBaseTransport | None,
        clock: Clock,
        resolve: Resolve = resolve,
    ) -> None:
        _require_positive(
            teacher,
            timeout_seconds=timeout_seconds,
            deadline_seconds=deadline_seconds,
            max_concurrency=max_concurrency,
        )
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                f"teacher {teacher!r}: api_key has characters that are invalid in a header "
                "(expected printable ASCII without spaces or line ends)",
                key="api_key",
            )
        self.teacher = teacher
        self.counters = Counters()
        self.replicas = Replicas(
            teacher, urls, resolve=resolve, clock=clock, counters=self.counters
        )
        self.deadline_seconds = deadline_seconds
        self.clock = clock
        self._slots = asyncio.Semaphore(max_concurrency)
        self._attempts = Attempts(teacher, timeout_seconds, clock, self.counters)
        self._avoided: Replica | None = None
        self._follows_prompts = True
        # Requests about the teacher are not counted.
        self._uncounted = Attempts(teacher, timeout_seconds, clock, Counters())
        self._http = HttpPools(
            max_concurrency,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
            ca_file=ca_file,
        )

    def for_spot_checks(self, avoided_url: str) -> "Connection":
        """Return this connection with separate counters, which prefers other replicas."""
        other = copy.copy(self)
        other.counters = Counters()
        other._attempts = replace(self._attempts, counters=other.counters)
        other._avoided = next((r for r in self.replicas.known if r.url == avoided_url), None)
        other._follows_prompts = False
        return other

    def for_parts_of_prompts(self) -> "Connection":
        """Return this connection for samples that shall not wait for those of the same prompts."""
        other = copy.copy(self)
        other._follows_prompts = False
        return other

    async def send_to_replica(
        self,
        replica: Replica,
        path: str,
        *,
        body: object = None,
        deadline_seconds: float | None = None,
    ) -> httpx.Response:
        """Send a GET, or a POST of JSON, to one replica; return the response, 200 or not.

        Neither counters nor the replica's breaker record a failure: it may still be starting.

        Raises:
            TeacherUnavailableError: without a response before the deadline.
        """
        only = Replicas(self.teacher, [replica.url], clock=self.clock, counters=Counters())
        only.fixed[0].breaker = CircuitBreaker(failures_to_open=sys.maxsize)
        method = "GET" if body is None else "POST"
        return await send_with_retries(
            only,
            lambda _: self._http.send(method, replica.url + path, json=body, host=replica.host),
            attempts=self._uncounted,
            deadline_seconds=deadline_seconds or self.deadline_seconds,
        )

    async def get(self, path: str) -> httpx.Response:
        """Send a GET to any replica, without counting it.

        Raises:
            TeacherError: without a response, or on another status than 200.
        """
        response = await send_with_retries(
            self.replicas,
            lambda replica: self._http.send("GET", replica.url + path, host=replica.host),
            attempts=self._uncounted,
            deadline_seconds=self.deadline_seconds,
        )
        return self.require_ok(response)

    async def post(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        work: Work = NO_WORK,
        check: Callable[[httpx.Response], None] = lambda response: None,
    ) -> httpx.Response:
        """Send a scoring request to any replica, once a slot is free; counters record the request.

        Args:
            path: path on each replica.
            body: JSON.
            headers: further headers.
            work: tokens and prompts, for the choice of the replica.
            check: called with every response, retried ones included; raises to reject it. A
                discovered replica is not used any more, and the request is retried.

        Returns:
            The response; its extension ``url`` is the address of the replica.

        Raises:
            TeacherError: without a response, or on another status than 200.
        """

        async def send(replica: Replica) -> httpx.Response:
            response = await self._http.send(
                "POST", replica.url + path, content=body, headers=all_headers, host=replica.host
            )
            try:
                check(response)
            except (DataError, InvalidResponseError) as error:
                if not self.replicas.reject(replica, error):
                    raise
                raise httpx.RemoteProtocolError(str(error)) from error  # is retried
            response.extensions["url"] = replica.url
            return response

        all_headers = {"content-type": "application/json", **(headers or {})}
        if not self._follows_prompts:
            work = replace(work, prompts=frozenset())
        async with self._slots:
            started = self.clock.now()
            self.counters.requests += 1
            response = self.require_ok(
                await send_with_retries(
                    self.replicas,
                    send,
                    attempts=self._attempts,
                    deadline_seconds=self.deadline_seconds,
                    work=work,
                    avoided=self._avoided,
                )
            )
            self.counters.received_bytes += len(response.content)
            self.counters.seconds.append(self.clock.now() - started)
            return response

    def require_ok(self, response: httpx.Response) -> httpx.Response:
        """Return the response.

        Raises:
            TeacherError: if the status is not 200, with the problem that the teacher reports.
        """
        status = response.status_code
        if status == 200:
            return response
        problem = problem_of(response)
        if status in (401, 403):
            problem = f"{problem.rstrip('.')}. Check its api_key"
        raise TeacherError(
            f"teacher {self.teacher!r} at {response.url} returned status {status}: {problem}",
            status=status,
        )

    def json_object(self, response: httpx.Response, *, kind: str) -> dict[str, Any]:
        """Parse the JSON object in a response.

        Args:
            kind: expected kind of server, for the error message.

        Raises:
            InvalidResponseError: if the body is not a JSON object.
        """
        try:
            body: Any = json.loads(response.content)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise InvalidResponseError(
                f"teacher {self.teacher!r} at {response.url}: invalid response (found "
                f"{response.headers.get('content-type', 'no content type')}, expected a JSON "
                f"object). Check that this address is a {kind}",
                status=response.status_code,
            )
        return body  # pyright: ignore[reportUnknownVariableType]

    async def aclose(self) -> None:
        """Close the connections."""
        await self.replicas.aclose()
        await self._http.aclose()


def _require_positive(teacher: str, **settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ConfigError(
                f"teacher {teacher!r}: {name} is invalid (found {value}, expected more than 0)",
                key=name,
            )
