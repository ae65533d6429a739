"""``TeacherReplica``: one replica of a teacher, with the application of ``mopd-teacher serve``."""

# ray has incomplete annotations, and need not be installed for type checking.
# pyright: reportMissingImports=false, reportUntypedClassDecorator=false

import asyncio
import logging
import os
import threading

from ray import serve
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mopd_server.exit_status import CRASH_STATUS
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.logs import configure_logs
from mopd_server.http.middleware.authentication import KEYS_VARIABLE, ApiKeys
from mopd_server.http.middleware.observation import REQUEST_ID_HEADER
from mopd_server.process.serving import create_listening_app, require_known_names, warm_up
from mopd_server.ray_serve.autoscaling import QUEUE_TOKENS
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import ListenSettings, TeacherSettings

logger = logging.getLogger(__name__)

#: For the responses with 503 of requests in flight after a crash of the engine.
_ABORT_SECONDS = 1.0


class MountedApp:
    """ASGI middleware: an application below the route of its deployment.

    Serve keeps the route in the path, and adds a second header with the request's id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Remove the route from the path, and the id that Serve adds from the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER)

        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get(REQUEST_ID_HEADER) == request_id:
                    del headers[REQUEST_ID_HEADER]
            await send(message)

        mounted = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(mounted, receive, send_once)


@serve.ingress()
class TeacherReplica:
    """A teacher, loaded by the constructor; Serve starts routing after the first health check.

    Args:
        keys: API keys, comma-separated, besides those of ``listen.api_key_file``.
    """

    async def __init__(self, teacher: TeacherSettings, listen: ListenSettings, keys: str) -> None:
        configure_logs(listen.log_level, listen.log_format)
        if keys:
            os.environ[KEYS_VARIABLE] = keys
        self._lifecycle = Lifecycle(liveness_seconds=listen.liveness_seconds)
        api_keys = ApiKeys.load(listen.api_key_file)
        require_known_names(teacher, api_keys)
        self._app = MountedApp(create_listening_app(self._lifecycle, listen, api_keys))
        self._loop = asyncio.get_running_loop()
        self._lifecycle.service = await asyncio.to_thread(self._load, teacher)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    def check_health(self) -> None:
        """Raise ServiceError if only another replica helps: Serve then replaces this one.

        A replica that has not warmed up has not started: its constructor has not returned.
        """
        self._lifecycle.require_started()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the tokens in the queue."""
        return {QUEUE_TOKENS: self._lifecycle.require_loaded().queued_tokens}

    def __del__(self) -> None:
        if self._lifecycle.service is not None:
            self._lifecycle.service.close()

    def _load(self, teacher: TeacherSettings) -> TeacherService:
        service = TeacherService.load(teacher)
        warm_up(service)
        service.on_engine_crash = self._exit_after_crash
        return service

    def _exit_after_crash(self, cause: str) -> None:
        """Reject all requests, and exit: Serve starts another replica sooner than by its checks."""
        self._loop.call_soon_threadsafe(self._lifecycle.abort, "engine_dead")
        timer = threading.Timer(_ABORT_SECONDS, os._exit, (CRASH_STATUS,))
        timer.daemon = True
        timer.start()
