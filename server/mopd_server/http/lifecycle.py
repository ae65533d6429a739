"""``Lifecycle``: what a teacher process is ready to do, from taking the port to its end.

loading -> warming up -> ready -> draining -> gone. Everything here runs on the event loop's thread,
but for reading ``in_flight`` and for giving the loaded service.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from mopd_server.http.http_metrics import SCORING_PATH, HttpMetrics
from mopd_server.http.problems import refusal_response
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError

#: Probes must see a process that loads or drains, so these answer at any time.
ALWAYS_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})

_LOADING_RETRY_SECONDS = 2
#: A drained teacher is gone first and then loads again, if a supervisor restarts it at all.
_DRAINING_RETRY_SECONDS = 5


class Lifecycle:
    """The service once it is loaded, and whether requests are welcome."""

    def __init__(self, service: TeacherService | None = None) -> None:
        self.service = service
        """``None`` while the model loads."""
        self.in_flight = 0
        """Requests that were let in and are not answered yet."""
        self._end: ServiceError | None = None
        self._abandoned: ServiceError | None = None
        self._on_idle: Callable[[], None] | None = None
        self._endings: set[asyncio.Future[None]] = set()
        self.metrics = HttpMetrics(ready=lambda: self.ready)

    @property
    def draining(self) -> bool:
        """Whether no further request is let in."""
        return self._end is not None

    @property
    def ready(self) -> bool:
        """Whether scoring requests are welcome."""
        return self.service is not None and self.service.ready and not self.draining

    def require_open(self) -> None:
        """Whether another request may come in.

        Raises:
            ServiceError: 503 while the model loads, while draining, after the engine died.
        """
        if self._end is not None:
            raise self._end
        self.require_loaded()

    def require_ready(self) -> None:
        """Whether another scoring request may come in. Told to probes, which carry no key, so it
        says neither who the teacher is nor what failed.

        Raises:
            ServiceError: 503, as ``require_open``, and during warm-up or after its failure.
        """
        self.require_open()
        service = self.require_loaded()
        if service.failure:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "this teacher cannot score, and its log says why; restart it",
                reason="failed",
            )
        if not service.ready:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "this teacher is still warming up; ask again later",
                retry_after_seconds=_LOADING_RETRY_SECONDS,
                reason="warming_up",
            )

    def require_loaded(self) -> TeacherService:
        """The service, for a request that has been let in.

        Raises:
            ServiceError: 503 while it loads.
        """
        if self.service is None:
            raise ServiceError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "this teacher is loading its model; ask again later",
                retry_after_seconds=_LOADING_RETRY_SECONDS,
                reason="loading",
            )
        return self.service

    @contextmanager
    def under_way(self) -> Generator[None]:
        """Counts a request that was let in until the block ends."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight and self._on_idle is not None:
                self._on_idle()

    @contextmanager
    def ending(self) -> Generator[asyncio.Future[None]]:
        """A future that raises the refusal which ends every request, should that come.

        Raises:
            ServiceError: when it has come already.
        """
        if self._abandoned is not None:
            raise self._abandoned
        ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._endings.add(ending)
        try:
            yield ending
        finally:
            self._endings.discard(ending)
            ending.cancel()

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Lets nothing more in; ``on_idle`` is called when the last request has been answered."""
        self._end = ServiceError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "this teacher is shutting down; ask another replica, or again later",
            retry_after_seconds=_DRAINING_RETRY_SECONDS,
            reason="draining",
        )
        self._on_idle = on_idle
        if not self.in_flight:
            on_idle()

    def abandon(self, reason: str, sentence: str) -> None:
        """Answers every request, those in flight and those to come, with 503."""
        refusal = ServiceError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            sentence,
            retry_after_seconds=_DRAINING_RETRY_SECONDS,
            reason=reason,
        )
        self._end = self._abandoned = refusal
        for ending in self._endings:
            if not ending.done():
                ending.set_exception(refusal)


class RefuseUnlessOpen:
    """ASGI middleware: 503 before anything of a request is read that cannot be answered now."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts what it lets in, so that a drain knows when the last answer has been given."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        try:
            self._lifecycle.require_open()
        except ServiceError as refusal:
            await refusal_response(refusal)(scope, receive, send)
            return
        in_flight = self._lifecycle.metrics.in_flight
        scoring = scope["path"] == SCORING_PATH
        in_flight.inc(scoring)
        try:
            with self._lifecycle.under_way():
                await self._app(scope, receive, send)
        finally:
            in_flight.dec(scoring)
