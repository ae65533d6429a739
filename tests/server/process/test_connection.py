"""Tests of the timeouts of connections, with sockets to the HTTP server."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from mopd_server.http.parted_response import PartedResponse
from mopd_server.process import connection
from mopd_server.process.http_server import HttpServer
from mopd_server.process.listening import bound_socket
from mopd_server.settings import ListenSettings

#: Limit of a failed test.
TIMEOUT_SECONDS = 300.0
LARGE = 64 * 2**20


@pytest.fixture
def shorten(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Shorten one timeout; the others stay long for slow machines."""
    return lambda name: monkeypatch.setattr(connection, name, 0.1)


@contextmanager
def connected() -> Iterator[tuple[HttpServer, socket.socket]]:
    """Yield a server with four routes, and a connection."""
    app = FastAPI()

    @app.post("/early")
    async def early() -> Response:
        return Response("early", 413)

    @app.post("/reads")
    async def reads(request: Request) -> Response:
        return Response(str(len(await request.body())))

    @app.get("/large")
    async def large() -> Response:
        return Response(b" " * LARGE)

    @app.get("/parts")
    async def parts() -> Response:
        return PartedResponse(b" " * LARGE)

    listen = ListenSettings(port=0)
    server = HttpServer(app, listen, on_stopped=lambda: None)
    with bound_socket(listen.host, listen.port) as bound:
        server.start(bound)
        try:
            with socket.create_connection(bound.getsockname(), timeout=TIMEOUT_SECONDS) as client:
                yield server, client
        finally:
            server.stop()


def receive_all(client: socket.socket) -> bytes:
    """Receive until the server closes the connection."""
    received = bytearray()
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return bytes(received)


def request(path: str, *lines: str) -> bytes:
    """Return the headers of a request."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: t", *lines, "", ""]).encode()


@pytest.mark.parametrize("start", [b"", b"POST /early HT", request("/early")[:-2]])
def test_incomplete_headers_are_a_408(start: bytes, shorten: Callable[[str], None]) -> None:
    shorten("HEADER_SECONDS")
    with connected() as (_, client):
        client.sendall(start)
        response = receive_all(client)
    assert response.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in response
    assert b'"code":"slow_headers"' in response


def test_incomplete_headers_of_a_second_request_are_a_408(
    shorten: Callable[[str], None],
) -> None:
    with connected() as (_, client):
        client.sendall(request("/reads", "Content-Length: 2") + b"ab")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        shorten("HEADER_SECONDS")
        client.sendall(b"POST /ear")
        assert b"HTTP/1.1 408 " in receive_all(client)


def test_request_may_arrive_byte_by_byte() -> None:
    with connected() as (_, client):
        for byte in request("/reads", "Content-Length: 2", "Connection: close") + b"ab":
            client.sendall(bytes([byte]))
        assert receive_all(client).endswith(b"\r\n\r\n2")


def test_rest_of_a_body_after_an_early_response_has_a_timeout(
    shorten: Callable[[str], None],
) -> None:
    shorten("DISCARD_SECONDS")
    with connected() as (_, client):
        client.sendall(request("/early", "Content-Length: 99999") + b"a")
        assert receive_all(client).endswith(b"early")


def test_connection_is_reused_if_the_rest_of_a_body_arrives_in_time() -> None:
    with connected() as (_, client):
        client.sendall(request("/early", "Content-Length: 4") + b"a")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        client.sendall(b"bcd" + request("/reads", "Content-Length: 1", "Connection: close") + b"e")
        assert receive_all(client).endswith(b"\r\n\r\n1")


@pytest.mark.parametrize("path", ["/large", "/parts"])
def test_response_that_is_not_read_is_dropped(shorten: Callable[[str], None], path: str) -> None:
    shorten("STALLED_RESPONSE_SECONDS")
    with connected() as (server, client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        assert client.recv(16, socket.MSG_PEEK)
        while server._server.server_state.connections:
            threading.Event().wait(0.01)  # for the server's thread


def test_response_that_is_read_slowly_is_complete() -> None:
    """Read some bytes before each check of the timer; the test triggers the checks."""
    with connected() as (server, client):
        # The kernel's buffer is a small part of the response.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(b"GET /large HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        received = len(client.recv(16))
        (protocol,) = server._server.server_state.connections
        assert isinstance(protocol, connection.BoundedConnection)
        while protocol._response_timer is None:
            threading.Event().wait(0.01)  # for the server's thread
        checks: list[bool] = []
        for _ in range(3):
            size = protocol.transport.get_write_buffer_size()
            while size and protocol.transport.get_write_buffer_size() == size:
                received += len(client.recv(65536))
            check = asyncio.run_coroutine_threadsafe(check_response(protocol), protocol.loop)
            checks.append(check.result())
        assert checks[0]
        assert received + len(receive_all(client)) > LARGE


async def check_response(protocol: connection.BoundedConnection) -> bool:
    """Run the timer in the server's event loop; False if no bytes are left in its buffer."""
    if protocol._response_timer is None:
        return False
    protocol._response_timer._run()
    return True


def test_clients_close_idle_connections_before_the_server() -> None:
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    with connected() as (server, _):
        assert server._server.config.timeout_keep_alive > 2 * expiry
