"""``HttpServer``: HTTP in its own thread, while the main thread loads the model."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from mopd_server.process.certificate import ServerCertificate
from mopd_server.process.connection import BoundedConnection
from mopd_server.settings import ListenSettings

#: Idle time before a connection is closed. Longer than in clients (httpx: 5 s) and proxies (60 s):
#: if the client closes first, no request is lost on a closing connection.
IDLE_SECONDS = 75

#: For the last bytes of the last responses.
_FLUSH_SECONDS = 5
_MAX_HEADER_BYTES = 64 * 1024


class HttpServer:
    """uvicorn around ``app``; ``on_stopped`` is called from its thread.

    Raises:
        ConfigError: if the TLS files are invalid or the certificate has expired.
    """

    def __init__(
        self, app: ASGIApp, listen: ListenSettings, on_stopped: Callable[[], None]
    ) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        )
        config.load()
        if listen.tls_certificate and listen.tls_key:
            config.ssl = ServerCertificate(listen.tls_certificate, listen.tls_key).context
        self._server = uvicorn.Server(config)
        self._on_stopped = on_stopped
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self, bound: socket.socket) -> None:
        """Accept connections of a listening socket."""
        self._bound = bound
        self._thread.start()
        self._started.wait()

    def call(self, function: Callable[[], None]) -> None:
        """Schedule ``function`` on the event loop; ignored after its end."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # loop closed
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Close the port and all connections, after the last bytes of responses."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _FLUSH_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._started.set()
            self._on_stopped()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        await self._server.serve(sockets=[self._bound])
