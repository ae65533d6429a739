"""Id, metrics and log line of every request; problem documents for unexpected errors."""

import asyncio
import logging
import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_protocol.requests import REQUEST_HEADER
from mopd_server.http.http_metrics import SCORING_PATHS, requires_key
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.logs import FIELDS
from mopd_server.http.middleware.adapter_path import adapter_of
from mopd_server.http.problems import problem_response
from mopd_server.http.request_record import RequestRecord, begin_record
from mopd_server.service_error import CLIENT_CLOSED_REQUEST

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"


class ObservationMiddleware:
    """ASGI middleware: sees every request and response."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 500 to unexpected errors; abort a response that has started."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        record.adapter = adapter_of(scope)
        status: int | None = None

        async def observed_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = record.id
                if _identifies_teacher(scope["path"], message["status"]):
                    headers.update(self._lifecycle.manifest_headers(record.adapter))
                if record.body_hash is not None:
                    headers[REQUEST_HEADER] = record.body_hash
                if self._lifecycle.draining:  # the connection will be closed
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, observed_send)
        except asyncio.CancelledError:
            # Ray Serve cancels the request of a client that has disconnected.
            status = status or CLIENT_CLOSED_REQUEST
            raise
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if status is not None:
                raise
            response = problem_response(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the teacher failed with {type(error).__name__}. See its log.",
            )
            await response(scope, receive, observed_send)
        finally:
            self._finish(scope["path"], status or HTTPStatus.INTERNAL_SERVER_ERROR, record)

    def _finish(self, path: str, status: int, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.started
        self._lifecycle.metrics.count(path, status, record, seconds)
        if path in SCORING_PATHS:
            message = "scored" if status < 400 else "failed"
            logger.info(message, extra={FIELDS: _log_fields(status, record, seconds)})


def _identifies_teacher(path: str, status: int) -> bool:
    """Return whether the response names the teacher: not to callers without a valid key."""
    return requires_key(path) and status != HTTPStatus.UNAUTHORIZED


def _log_fields(status: int, record: RequestRecord, seconds: float) -> dict[str, object]:
    """Return the named values of a log line, without keys and texts."""
    fields: dict[str, object] = {"status": status, "seconds": round(seconds, 6)}
    if record.adapter:
        fields["adapter"] = record.adapter
    if record.key_name:
        fields["key"] = record.key_name
    if record.reason:
        fields["reason"] = record.reason
    if record.sequences:
        fields |= {
            "sequences": record.sequences,
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.completion_tokens,
            "top_k": record.top_k,
        }
    return fields | {
        f"{phase}_seconds": round(spent, 6) for phase, spent in record.phase_seconds.items()
    }
