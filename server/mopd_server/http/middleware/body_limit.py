"""Limits of the size and duration of bodies, announced or not."""

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_server.http.problems import error_response
from mopd_server.service_error import ServiceError

#: Limit of the bodies of all requests in flight, as a multiple of the largest single body.
CONCURRENT_BODIES = 16


class BodyLimitMiddleware:
    """ASGI middleware: 413 above ``max_bytes``, 408 after ``seconds``.

    The bodies of all requests in flight are limited together: 503 above the sum.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._total_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the announced length first, then count the received bytes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = Headers(scope=scope).get("content-length", "")
        announced = int(header) if header.isdecimal() and len(header) < 20 else 0
        try:
            self._require_room(announced, f"{announced} bytes", additional=announced)
        except ServiceError as error:
            await error_response(error)(scope, receive, send)
            return
        received = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self._seconds

        async def limited_receive() -> Message:
            nonlocal received, complete
            if complete:  # the next message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise self._timeout_error(received) from error
            size = len(message.get("body", b""))
            received += size
            self._total_bytes += size
            self._require_room(received, f"over {received} bytes", additional=0)
            complete = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, limited_receive, send)
        finally:
            self._total_bytes -= received

    def _require_room(self, size: int, size_text: str, *, additional: int) -> None:
        if size > self._max_bytes:
            raise ServiceError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is too large (found {size_text}, expected at most {self._max_bytes}). "
                "Send fewer sequences per request.",
            )
        limit = self._max_bytes * CONCURRENT_BODIES
        if self._total_bytes + additional > limit:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the bodies of other requests fill this teacher's limit of {limit} bytes. Retry "
                "later.",
                code="bodies",
                retry_after_seconds=1,
            )

    def _timeout_error(self, received: int) -> ServiceError:
        return ServiceError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body is incomplete after {self._seconds:g} s (found {received} bytes). Send the "
            "body faster, or fewer sequences per request.",
            code="slow_body",
        )
