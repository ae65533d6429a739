"""Requests alternate between a few pools of connections."""

from collections import Counter

import httpx
import pytest

from mopd_client.transport.http_pools import CONNECTIONS_PER_POOL, HttpPools

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
