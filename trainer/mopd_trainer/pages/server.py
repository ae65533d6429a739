"""``PageServer``: an HTTP server for a page and its data, for people on this machine."""

import json
import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mopd_protocol.errors import ConfigError, MopdError

logger = logging.getLogger(__name__)

#: Parameters of a request (of its query, or the JSON object that was posted) -> response.
Route = Callable[[Mapping[str, Any]], Any]

_MAX_BODY = 1_000_000
_ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Serves the page of a route as HTML (``str``), and other values as JSON.

    A request whose ``Host`` is not this server's is rejected: a web page in the same browser could
    else read a run's completions by a name that resolves to this machine.

    Args:
        page: returns the HTML of ``/``.
        routes: path -> function of the parameters; a ``MopdError`` becomes a response with status
            400 and its message.
        port: 0 for a free one.

    Raises:
        ConfigError: if the address is in use or not available.
    """

    daemon_threads = True

    def __init__(
        self, page: Callable[[], str], routes: Mapping[str, Route], *, host: str, port: int
    ) -> None:
        self.page = page
        self.routes = routes
        self._hosts = None if host in _ANY_ADDRESS else {host, *_LOCAL}
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port: listening on {host}:{port} failed: {error}. Choose another port, or 0 "
                "for a free one.",
                key="port",
            ) from error

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self.server_address[:2]
        return f"http://{'127.0.0.1' if host in _ANY_ADDRESS else host!s}:{port}/"

    def accepts(self, host: str | None) -> bool:
        """Return True for the ``Host`` header of a request to this server."""
        return self._hosts is None or urlsplit(f"//{host}").hostname in self._hosts

    def serve_until_interrupted(self) -> None:
        """Serve until SIGINT."""
        with self:
            try:
                self.serve_forever()
            except KeyboardInterrupt:
                logger.info("interrupted")


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Return the page, or the value of a route."""
        url = urlsplit(self.path)
        if not self.server.accepts(self.headers["Host"]):
            self._send_error(HTTPStatus.FORBIDDEN, "Host: not this server")
        elif url.path == "/":
            self._send(HTTPStatus.OK, self.server.page().encode(), "text/html; charset=utf-8")
        else:
            parameters = {name: values[-1] for name, values in parse_qs(url.query).items()}
            self._call(url.path, parameters)

    def do_POST(self) -> None:
        """Return the value of a route for a JSON object."""
        # A browser sends the text of any other page, but its JSON only if this server permits it.
        kind = self.headers.get_content_type()
        size = int(self.headers.get("Content-Length") or 0)
        if not self.server.accepts(self.headers["Host"]) or kind != "application/json":
            self._send_error(HTTPStatus.FORBIDDEN, "Host or Content-Type: not accepted")
            return
        if size > _MAX_BODY:
            self.close_connection = True
            self._send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body above {_MAX_BODY} bytes")
            return
        try:
            values: Any = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            self._send_error(HTTPStatus.BAD_REQUEST, "body: invalid, expected a JSON object")
        else:
            self._call(urlsplit(self.path).path, values)

    def _call(self, path: str, parameters: Mapping[str, Any]) -> None:
        route = self.server.routes.get(path.removeprefix("/"))
        if route is None:
            self._send_error(HTTPStatus.NOT_FOUND, f"{path}: not found")
            return
        try:
            self._send_json(HTTPStatus.OK, route(parameters))
        except MopdError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except (LookupError, ValueError) as error:
            self._send_error(HTTPStatus.BAD_REQUEST, f"invalid parameters: {error}")

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self._send_json(status, {"error": message})

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        self._send(status, body, "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Type": kind}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request at level DEBUG."""
        logger.debug(format, *args)
