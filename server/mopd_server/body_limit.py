"""Refuses bodies above a size, announced or not, before they fill the memory."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_server.problems import problem_response


class LimitBody:
    """ASGI middleware: 413 for more than ``max_bytes``."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Looks at the announced length first, then counts what really arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            refused = problem_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._sentence(f"{announced} bytes")
            )
            await refused(scope, receive, send)
            return
        arrived = 0

        async def count() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self._max_bytes:
                raise HTTPException(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._sentence(f"over {arrived} bytes")
                )
            return message

        await self._app(scope, count, send)

    def _sentence(self, size: str) -> str:
        return (
            f"the body has {size}, above this teacher's limit of {self._max_bytes}; "
            "send fewer sequences at once"
        )
