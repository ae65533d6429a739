"""``HttpServer``: answers HTTP on a thread of its own, while the main thread loads the model."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from mopd_protocol.errors import ConfigError
from mopd_server.process.connection import BoundedConnection
from mopd_server.settings import ListenSettings

#: A connection without a request is closed after this. Longer than clients (httpx: 5 s) and proxies
#: (60 s) keep one, so that the end that asks is the end that closes, and no request meets a
#: connection on its way out.
IDLE_SECONDS = 75

#: For the last bytes of the last answers.
_FLUSH_SECONDS = 5
#: A request's head; what it asks for stands in its body.
_LARGEST_HEAD_BYTES = 64 * 1024


class HttpServer:
    """uvicorn around ``app``. ``on_end`` is called, from its thread, when it has stopped.

    Raises:
        ConfigError: when the TLS files cannot be used.
    """

    def __init__(self, app: FastAPI, listen: ListenSettings, on_end: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ssl_certfile=listen.tls_certificate,
            ssl_keyfile=listen.tls_key,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            h11_max_incomplete_event_size=_LARGEST_HEAD_BYTES,
        )
        try:
            config.load()
        except ssl.SSLError as error:
            raise ConfigError(
                f"the TLS files {listen.tls_certificate} and {listen.tls_key} cannot be used: "
                f"{error.reason or error}; expected a certificate and its private key, both PEM"
            ) from error
        self._server = uvicorn.Server(config)
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self, bound: socket.socket) -> None:
        """Listens from here on."""
        bound.listen()  # connections made before the loop accepts them wait instead of failing
        self._bound = bound
        self._thread.start()
        self._begun.wait()

    def call(self, function: Callable[[], None]) -> None:
        """Runs ``function`` on the event loop, soon; nothing where that has ended."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Closes the port and all connections, after the last bytes of answers."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(timeout=2 * _FLUSH_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._begun.set()
            self._on_end()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        await self._server.serve(sockets=[self._bound])
