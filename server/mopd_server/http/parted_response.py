"""``PartedResponse``: a body sent in parts, so that other connections get their turn in between."""

from fastapi import Response
from starlette.types import Receive, Scope, Send

#: One write of the complete body would copy hundreds of megabytes on the event loop.
PART_BYTES = 256 * 1024


class PartedResponse(Response):
    """A ``Response`` whose client may be slow: at most one part is in the socket's buffer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body in parts of ``PART_BYTES``."""
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        body = memoryview(self.body)
        for start in range(0, len(body), PART_BYTES):
            part = bytes(body[start : start + PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
