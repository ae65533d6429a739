"""Requests alternate between a few pools of connections."""

import gzip
import socket
from collections import Counter
from contextlib import ExitStack

import httpx
import pytest

from mopd_client.transport import bounded_response, http_pools
from mopd_client.transport.http_pools import CONNECTIONS_PER_POOL, HttpPools
from mopd_protocol.errors import ConfigError, InvalidResponseError

pytestmark = pytest.mark.anyio


def used(pools: HttpPools, times: int) -> Counter[httpx.AsyncClient]:
    return Counter(pools.next() for _ in range(times))


async def test_no_pool_gets_more_connections_than_it_handles_well():
    for concurrency in (1, 7, 8, 9, 64, 250):
        pools = HttpPools(concurrency, headers={}, transport=None)
        assert max(used(pools, concurrency).values()) <= CONNECTIONS_PER_POOL
        await pools.aclose()


async def test_every_pool_sends_the_headers_and_is_closed():
    pools = HttpPools(20, headers={"authorization": "Bearer x"}, transport=None)
    clients = used(pools, 40)
    assert len(clients) == 3
    assert {client.headers["authorization"] for client in clients} == {"Bearer x"}
    await pools.aclose()
    assert all(client.is_closed for client in clients)


BODIES = {
    "plain": (b"x" * 1001, {}),
    "gzip": (gzip.compress(b"x" * 1001), {"content-encoding": "gzip"}),
    "another encoding": (b"x", {"content-encoding": "br"}),
}


@pytest.mark.parametrize("body", BODIES)
async def test_a_response_above_the_limit_is_not_read(body, monkeypatch):
    content, headers = BODIES[body]

    async def stream():
        for index in range(len(content)):
            sent.append(index)
            yield content[index : index + 1]

    async def respond(request):
        return httpx.Response(200, headers=headers, content=stream())

    pools = HttpPools(1, headers={}, transport=httpx.MockTransport(respond))
    for limit in (1001, 1000):
        sent: list[int] = []
        monkeypatch.setattr(bounded_response, "MAX_RESPONSE_BYTES", limit)
        if limit == 1001 and body != "another encoding":
            response = await pools.send("GET", "http://teacher")
            assert response.content == b"x" * 1001
            continue
        with pytest.raises(InvalidResponseError) as caught:
            await pools.send("GET", "http://teacher")
        assert caught.value.key == ("content-encoding" if not sent else "body")


async def test_connecting_to_a_lost_machine_ends(monkeypatch):
    monkeypatch.setattr(http_pools, "CONNECT_SECONDS", 0.05)
    with socket.socket() as lost, ExitStack() as waiting:
        lost.bind(("127.0.0.1", 0))
        lost.listen(0)  # accepts one connection, and drops packets of others
        address = lost.getsockname()
        for _ in range(3):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        pools = HttpPools(1, headers={}, transport=None)
        with pytest.raises(httpx.ConnectTimeout):
            await pools.send("GET", f"http://127.0.0.1:{address[1]}")
        await pools.aclose()


async def test_a_missing_ca_file_is_reported(tmp_path):
    with pytest.raises(ConfigError) as caught:
        HttpPools(1, headers={}, transport=None, ca_file=tmp_path / "none.pem")
    assert caught.value.key == "ca_file"
