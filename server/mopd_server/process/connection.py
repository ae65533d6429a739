"""``BoundedConnection``: an HTTP/1.1 connection with a timeout for every phase.

uvicorn limits the idle time between two requests only. A client that never completes the headers
of its request, never completes a body after an early response, or never reads its response would
keep a socket forever; nothing else in the service limits these three phases.
"""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mopd_server.http.problems import PROBLEM_MEDIA_TYPE, Problem

logger = logging.getLogger(__name__)

#: From connecting, or from the first byte of a further request, to the end of its headers.
HEADER_SECONDS = 20.0
#: After an early response (413), for the rest of a body, which is read and discarded: closing
#: immediately would often lose the response.
DISCARD_SECONDS = 20.0
#: A response of which the client reads nothing for this time is dropped.
STALLED_RESPONSE_SECONDS = 60.0


class BoundedConnection(H11Protocol):
    """uvicorn's connection with the timeouts above."""

    _request_timer: asyncio.TimerHandle | None = None
    _response_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first headers."""
        super().connection_made(transport)
        self._update_request_timer()

    def data_received(self, data: bytes) -> None:
        """Start or stop the timeout of the headers."""
        super().data_received(data)
        self._update_request_timer()

    def on_response_complete(self) -> None:
        """Start the timeouts of the rest of the body and of the response."""
        super().on_response_complete()
        self._update_request_timer()
        self._check_response(previous_size=-1)

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP; a request in progress is disconnected, since no response can follow
        this one."""
        super().send_400_response(msg)
        if self.cycle:  # None before the first request
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        """Start the timeout of a response that is sent in parts."""
        super().pause_writing()
        self._check_response(previous_size=-1)

    def resume_writing(self) -> None:
        """Restart the timeout: the client has read a part."""
        self._check_response(previous_size=-1)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        for timer in (self._request_timer, self._response_timer):
            if timer is not None:
                timer.cancel()
        self._request_timer = self._response_timer = None
        super().connection_lost(exc)

    def _update_request_timer(self) -> None:
        """Start one timer per phase; received bytes do not restart it."""
        phase = self._pending_phase()
        if phase is None:
            if self._request_timer is not None:
                self._request_timer.cancel()
                self._request_timer = None
        elif self._request_timer is None:
            seconds = HEADER_SECONDS if phase is h11.IDLE else DISCARD_SECONDS
            self._request_timer = self.loop.call_later(seconds, self._on_request_timeout)

    def _pending_phase(self) -> object | None:
        """Return the phase that the client must complete; ``None`` while a response is pending."""
        state: object = self.conn.their_state
        # Between two requests, uvicorn's shorter keep-alive timeout applies.
        if state is h11.IDLE and self.timeout_keep_alive_task is None:
            return state
        # A body follows headers, so there is a cycle.
        return state if state is h11.SEND_BODY and self.cycle.response_complete else None

    def _on_request_timeout(self) -> None:
        self._request_timer = None
        if self.transport.is_closing():
            return
        logger.info("closed a connection: incomplete request")
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._send_timeout_response()
        self.transport.close()

    def _send_timeout_response(self) -> None:
        detail = (
            f"the headers of the request are incomplete after {HEADER_SECONDS:g} s. Send the "
            "request faster."
        )
        problem = Problem(
            title="Request Timeout",
            status=408,
            code="slow_headers",
            detail=detail,
            message=detail,
        )
        body = problem.model_dump_json(exclude_none=True).encode()
        headers = [
            ("Content-Type", PROBLEM_MEDIA_TYPE),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        for event in (
            h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")

    def _check_response(self, previous_size: int) -> None:
        """Abort if the client has read nothing since the previous check; else check later."""
        if self._response_timer is not None:
            self._response_timer.cancel()
            self._response_timer = None
        size = self.transport.get_write_buffer_size()
        if not size:
            return
        if size == previous_size:
            logger.info("closed a connection: response not read")
            self.transport.abort()
            return
        self._response_timer = self.loop.call_later(
            STALLED_RESPONSE_SECONDS, self._check_response, size
        )
