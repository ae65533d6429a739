"""``Lifecycle``: the state of a teacher process, from binding the port to its exit.

loading -> warming up -> ready -> draining -> drained. Everything here runs on the event loop's
thread, except reading ``in_flight`` and setting the loaded service.
"""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from mopd_protocol.manifest import MANIFEST_HEADER
from mopd_server.http.http_metrics import SCORING_PATHS, HttpMetrics
from mopd_server.http.problems import error_response
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError
from mopd_server.settings import ListenSettings

#: Probes must respond while the process loads or drains.
ALWAYS_OPEN = frozenset({"/health", "/healthz", "/readyz", "/metrics"})

#: Code -> message and Retry-After in seconds. Probes need no key, so the messages contain neither
#: the teacher's name nor the cause of a failure. A drained teacher must restart and load first.
_UNAVAILABLE: dict[str, tuple[str, int | None]] = {
    "loading": ("this teacher is loading its model. Retry later.", 2),
    "warming_up": ("this teacher is warming up. Retry later.", 2),
    "stalled": ("the engine of this teacher does not respond. Retry later, or restart it.", 2),
    "failed": ("this teacher cannot score. See its log, and restart it.", None),
    "draining": ("this teacher is shutting down. Use another replica, or retry later.", 5),
    "drained": ("this teacher has shut down. Use another replica, or retry later.", 5),
    "engine_dead": (
        "the engine of this teacher has crashed. Use another replica, or retry later.",
        5,
    ),
}


def unavailable(code: str) -> ServiceError:
    """Return the 503 error of a state of the teacher."""
    message, seconds = _UNAVAILABLE[code]
    return ServiceError(
        HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, retry_after_seconds=seconds
    )


class Lifecycle:
    """The service once it is loaded, and whether the process accepts requests."""

    def __init__(
        self,
        service: TeacherService | None = None,
        *,
        liveness_seconds: float = ListenSettings.liveness_seconds,
    ) -> None:
        self._liveness_seconds = liveness_seconds
        self.service = service
        """``None`` while the model loads."""
        self.in_flight = 0
        """Accepted requests without a complete response."""
        self._closed: str | None = None  # code of the state in which no request is accepted
        self._aborted: str | None = None  # code of the state in which requests are aborted
        self._on_idle: Callable[[], None] | None = None
        self._aborts: set[asyncio.Future[None]] = set()
        self.metrics = HttpMetrics(ready=lambda: self.ready)

    @property
    def draining(self) -> bool:
        """True if no further request is accepted."""
        return self._closed is not None

    @property
    def ready(self) -> bool:
        """True if scoring requests are accepted."""
        return self.service is not None and self.service.ready and not self.draining

    def manifest_headers(self, adapter: str | None) -> dict[str, str]:
        """Return a header with the identity of the teacher; empty while the model loads."""
        manifest = None if self.service is None else self.service.manifests.get(adapter)
        return {} if manifest is None else {MANIFEST_HEADER: manifest.manifest_id}

    def require_open(self) -> TeacherService:
        """Return the service if the process accepts requests.

        Raises:
            ServiceError: 503 while loading or draining, or if the engine has crashed.
        """
        if self._closed is not None:
            raise unavailable(self._closed)
        return self.require_loaded()

    def require_ready(self) -> None:
        """Raise ServiceError 503 as ``require_open``, and before or after a failed warm-up."""
        service = self.require_open()
        if service.failure:
            raise unavailable("failed")
        if not service.ready:
            raise unavailable("stalled" if service.warm else "warming_up")

    def require_alive(self) -> None:
        """Raise ServiceError 503 if only a restart helps: after a permanent failure or a long hang.

        Loading, warming up and draining are no reasons to restart.
        """
        if self.service is None:
            return
        if self.service.failure:
            raise unavailable("failed")
        if self.service.silent_seconds > self._liveness_seconds:
            raise unavailable("stalled")

    def require_started(self) -> None:
        """Raise ServiceError 503 as ``require_alive``, and before a successful warm-up."""
        service = self.require_loaded()
        self.require_alive()
        if not service.warm:
            raise unavailable("warming_up")

    def require_loaded(self) -> TeacherService:
        """Return the service, or raise ServiceError 503 while it loads."""
        if self.service is None:
            raise unavailable("loading")
        return self.service

    @contextmanager
    def request(self) -> Generator[None]:
        """Count an accepted request until the block ends."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight and self._on_idle is not None:
                self._on_idle()

    @contextmanager
    def abort_signal(self) -> Generator[asyncio.Future[None]]:
        """Yield a future that raises the error of ``abort``.

        Raises:
            ServiceError: if ``abort`` was called before.
        """
        if self._aborted is not None:
            raise unavailable(self._aborted)
        signal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._aborts.add(signal)
        try:
            yield signal
        finally:
            self._aborts.discard(signal)
            signal.cancel()

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Accept no more requests; call ``on_idle`` after the last response."""
        self._closed = "draining"
        self._on_idle = on_idle
        if not self.in_flight:
            on_idle()

    def abort(self, code: str) -> None:
        """Respond with 503 to all requests, current and future."""
        self._closed = self._aborted = code
        for signal in self._aborts:
            if not signal.done():
                signal.set_exception(unavailable(code))


class LifecycleMiddleware:
    """ASGI middleware: 503 before any of the body is read if the process accepts no requests."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count accepted requests, so that a drain detects the last response."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        try:
            self._lifecycle.require_open()
        except ServiceError as error:
            await error_response(error)(scope, receive, send)
            return
        in_flight = self._lifecycle.metrics.in_flight
        scoring = scope["path"] in SCORING_PATHS
        in_flight.inc(scoring)
        try:
            with self._lifecycle.request():
                await self._app(scope, receive, send)
        finally:
            in_flight.dec(scoring)
