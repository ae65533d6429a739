"""``BoundedConnection``: an HTTP/1.1 connection on which no phase lasts for ever.

The server below answers requests; it does not mind a client that never ends its request's head,
never ends a body that nobody reads any more, or never reads its answer. Many of those are an
attack that costs a line of shell, so each of the three has a time here.
"""

import asyncio
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mopd_server.http.problems import PROBLEM_MEDIA_TYPE, Problem

logger = logging.getLogger(__name__)

#: From connecting, or from the first byte of a further request, to the end of its head.
HEAD_SECONDS = 20.0
#: After an early answer (413), for the rest of a body. It is thrown away, but read: a connection
#: cut at once would often take the answer with it.
REST_OF_BODY_SECONDS = 20.0
#: An answer of which the client takes nothing for so long is thrown away.
STUCK_ANSWER_SECONDS = 60.0


class BoundedConnection(H11Protocol):
    """uvicorn's connection, with those three times."""

    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from here."""
        super().connection_made(transport)
        self._set_late()

    def data_received(self, data: bytes) -> None:
        """A head that has begun must end; one that has ended sets the client free."""
        super().data_received(data)
        self._set_late()

    def on_response_complete(self) -> None:
        """What is left of the body must come, and the answer must be taken."""
        super().on_response_complete()
        self._set_late()
        self._watch_answer(left_before=-1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        self._late = self._stuck = None
        super().connection_lost(exc)

    def _set_late(self) -> None:
        """One timer for what the client owes. It is never set back by single bytes."""
        waits_for = self._owed()
        if waits_for is None:
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            seconds = HEAD_SECONDS if waits_for is h11.IDLE else REST_OF_BODY_SECONDS
            self._late = self.loop.call_later(seconds, self._client_is_late)

    def _owed(self) -> object | None:
        """The part that the client is to send now; ``None`` while it may wait for an answer."""
        state: object = self.conn.their_state
        if state is h11.IDLE and not self._is_kept_alive():
            return state
        # A body has a head before it, so there is a cycle.
        return state if state is h11.SEND_BODY and self.cycle.response_complete else None

    def _is_kept_alive(self) -> bool:
        """Between two requests, where uvicorn's own, shorter time runs."""
        return self.timeout_keep_alive_task is not None

    def _client_is_late(self) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        logger.info("closed a connection whose client did not end its request")
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE:
            self._refuse_head()
        self.transport.close()

    def _refuse_head(self) -> None:
        problem = Problem(
            title="Request Timeout",
            status=408,
            detail=f"the request's head was not whole after {HEAD_SECONDS:g} s; send it faster",
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

    def _watch_answer(self, left_before: int) -> None:
        """Looks again and again whether the client has taken some of its answer."""
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        left = self.transport.get_write_buffer_size()
        if not left:
            return
        if left == left_before:
            logger.info("dropped an answer whose client does not read it")
            self.transport.abort()
            return
        self._stuck = self.loop.call_later(STUCK_ANSWER_SECONDS, self._watch_answer, left)
