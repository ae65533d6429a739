"""Watches every request go by: its id, its count, its line in the log, and what nobody foresaw."""

import logging
import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_server.http.http_metrics import SCORING_PATH
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.logs import FIELDS
from mopd_server.http.problems import problem_response
from mopd_server.http.request_record import RequestRecord, begin_record

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"


class ObserveRequests:
    """ASGI middleware, the outermost: nothing is answered that it has not seen."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 500 where an error was left to it; an answer already begun is broken off."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        status: int | None = None

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = record.id
                if self._lifecycle.draining:  # or a pooled connection would be cut in mid-request
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if status is not None:
                raise
            refused = problem_response(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the teacher failed with {type(error).__name__}; its log says more",
            )
            await refused(scope, receive, watch)
        finally:
            self._count(scope["path"], status or HTTPStatus.INTERNAL_SERVER_ERROR, record)

    def _count(self, path: str, status: int, record: RequestRecord) -> None:
        seconds = time.monotonic() - record.started
        self._lifecycle.metrics.count(path, status, record, seconds)
        if path == SCORING_PATH:
            logger.info(
                "scored" if status < 400 else "refused", extra=_told(status, record, seconds)
            )


def _told(status: int, record: RequestRecord, seconds: float) -> dict[str, object]:
    """The named values of a log line: never a key, never a text."""
    known: dict[str, object] = {"status": status, "seconds": round(seconds, 6)}
    if record.key_name:
        known["key"] = record.key_name
    if record.reason:
        known["reason"] = record.reason
    if record.sequences:
        known |= {
            "sequences": record.sequences,
            "prompt_tokens": record.prompt_tokens,
            "tokens": record.completion_tokens,
            "top_k": record.top_k,
        }
    known |= {f"{phase}_seconds": round(spent, 6) for phase, spent in record.phase_seconds.items()}
    return {FIELDS: known}
