"""Sockets whose other end does not do its part, against the HTTP server itself."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from mopd_server.process import connection
from mopd_server.process.http_server import HttpServer
from mopd_server.process.serving import bound_socket
from mopd_server.settings import ListenSettings

#: Far longer than any time under test; reached only when the server waits for ever.
PATIENCE_SECONDS = 300.0
LARGE = 64 * 2**20


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes one of the connection's times short, for what begins afterwards. The others stay as
    long as they are: a machine may be slow."""
    return lambda name: monkeypatch.setattr(connection, name, 0.1)


@contextmanager
def served() -> Iterator[tuple[HttpServer, socket.socket]]:
    """A server with a quick route, one that reads, one that answers at length; a connection."""
    app = FastAPI()

    @app.post("/early")
    async def early() -> Response:
        return Response("too early", 413)

    @app.post("/reads")
    async def reads(request: Request) -> Response:
        return Response(str(len(await request.body())))

    @app.get("/large")
    async def large() -> Response:
        return Response(b" " * LARGE)

    listen = ListenSettings(port=0)
    server = HttpServer(app, listen, on_end=lambda: None)
    with bound_socket(listen.host, listen.port) as bound:
        server.start(bound)
        try:
            with socket.create_connection(bound.getsockname(), timeout=PATIENCE_SECONDS) as client:
                yield server, client
        finally:
            server.stop()


def all_that_comes(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = bytearray()
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return bytes(received)


def request(path: str, *lines: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: t", *lines, "", ""]).encode()


@pytest.mark.parametrize("begun", [b"", b"POST /early HT", request("/early")[:-2]])
def test_a_head_that_does_not_end_is_refused(begun: bytes, soon: Callable[[str], None]) -> None:
    soon("HEAD_SECONDS")
    with served() as (_, client):
        client.sendall(begun)
        answer = all_that_comes(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in answer
    assert b"head was not whole" in answer


def test_a_second_head_that_does_not_end_is_refused_too(soon: Callable[[str], None]) -> None:
    with served() as (_, client):
        client.sendall(request("/reads", "Content-Length: 2") + b"ab")
        first = client.recv(65536)
        assert first.startswith(b"HTTP/1.1 200 ")
        soon("HEAD_SECONDS")
        client.sendall(b"POST /ear")
        assert b"HTTP/1.1 408 " in all_that_comes(client)


def test_a_head_in_pieces_is_a_head() -> None:
    with served() as (_, client):
        for byte in request("/reads", "Content-Length: 2", "Connection: close") + b"ab":
            client.sendall(bytes([byte]))
        assert all_that_comes(client).endswith(b"\r\n\r\n2")


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever(soon: Callable[[str], None]) -> None:
    soon("REST_OF_BODY_SECONDS")
    with served() as (_, client):
        client.sendall(request("/early", "Content-Length: 99999") + b"a")
        assert all_that_comes(client).endswith(b"too early")


def test_a_refused_body_that_is_sent_in_time_leaves_a_connection_that_works() -> None:
    with served() as (_, client):
        client.sendall(request("/early", "Content-Length: 4") + b"a")
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        client.sendall(b"bcd" + request("/reads", "Content-Length: 1", "Connection: close") + b"e")
        assert all_that_comes(client).endswith(b"\r\n\r\n1")


def test_an_answer_that_nobody_takes_is_thrown_away(soon: Callable[[str], None]) -> None:
    soon("STUCK_ANSWER_SECONDS")
    with served() as (server, client):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /large HTTP/1.1\r\nHost: t\r\n\r\n")
        assert client.recv(16, socket.MSG_PEEK)
        while server._server.server_state.connections:
            threading.Event().wait(0.01)  # the server's thread is at work


def test_an_answer_that_is_taken_slowly_arrives_whole() -> None:
    """Some of it is taken before each look at what is left; the looks come when they are told."""
    with served() as (server, client):
        # What the kernel holds for the client is a small part of the answer.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(b"GET /large HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
        taken = len(client.recv(16))
        (watched,) = server._server.server_state.connections
        assert isinstance(watched, connection.BoundedConnection)
        while watched._stuck is None:
            threading.Event().wait(0.01)  # the server's thread is at work
        looks: list[bool] = []
        for _ in range(3):
            left = watched.transport.get_write_buffer_size()
            while left and watched.transport.get_write_buffer_size() == left:
                taken += len(client.recv(65536))
            looking = asyncio.run_coroutine_threadsafe(look_now(watched), watched.loop)
            looks.append(looking.result())
        assert looks[0]
        assert taken + len(all_that_comes(client)) > LARGE


async def look_now(watched: connection.BoundedConnection) -> bool:
    """What is due after STUCK_ANSWER_SECONDS; in the server's event loop. False when all of the
    answer is on its way."""
    if watched._stuck is None:
        return False
    watched._stuck._run()
    return True


def test_an_idle_connection_is_closed_by_the_client_and_not_under_its_next_request() -> None:
    kept = httpx.Limits().keepalive_expiry
    assert kept is not None
    with served() as (server, _):
        assert server._server.config.timeout_keep_alive > 2 * kept
