"""Refuses bodies that are too large or too slow, announced or not, before they fill the memory."""

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_server.http.problems import refusal_response
from mopd_server.service_error import ServiceError

#: Bodies of all requests together may take this many times the largest single one.
HELD_BODIES = 16


class LimitBody:
    """ASGI middleware: 413 for more than ``max_bytes``, 408 for more than ``seconds``.

    The bodies of all requests in flight together are bounded too: 503 beyond that.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Looks at the announced length first, then counts what really arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        expected = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
        try:
            self._require_room(expected, f"{expected} bytes", more=expected)
        except ServiceError as refusal:
            await refusal_response(refusal)(scope, receive, send)
            return
        arrived = 0
        whole = False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def count() -> Message:
            nonlocal arrived, whole
            if whole:  # what comes now is only the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise self._too_slow(arrived) from error
            more = len(message.get("body", b""))
            arrived += more
            self._held_bytes += more
            self._require_room(arrived, f"over {arrived} bytes", more=0)
            whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, count, send)
        finally:
            self._held_bytes -= arrived

    def _require_room(self, size: int, found: str, *, more: int) -> None:
        if size > self._max_bytes:
            raise ServiceError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {found}, above this teacher's limit of {self._max_bytes}; "
                "send fewer sequences at once",
            )
        if self._held_bytes + more > self._max_bytes * HELD_BODIES:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the bodies of other requests fill the {self._max_bytes * HELD_BODIES} bytes "
                "that this teacher keeps for them; ask again later",
                retry_after_seconds=1,
                reason="bodies",
            )

    def _too_slow(self, arrived: int) -> ServiceError:
        return ServiceError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body was not whole after {self._seconds:g} s ({arrived} bytes of it arrived); "
            "send it faster, or fewer sequences at once",
            reason="slow_body",
        )
