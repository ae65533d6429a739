"""``HttpPools``: several httpx clients with few connections each, used in turn.

httpx checks every connection of a pool when a request begins or ends, and for each idle connection
every one again: with 64 in one pool these checks took most of the client's time.
"""

import itertools
from collections.abc import Mapping

import httpx

#: Connections per pool when all are in use.
CONNECTIONS_PER_POOL = 8


class HttpPools:
    """Clients used in turn, so that ``max_concurrency`` requests are spread evenly.

    The caller limits the seconds of an attempt and the concurrency; pools have no such limits.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        certificates = httpx.create_ssl_context()  # loaded from disk once for all pools
        pools = 1 if transport else -(-max_concurrency // CONNECTIONS_PER_POOL)
        self._clients = [
            httpx.AsyncClient(
                headers=headers,
                transport=transport,
                verify=certificates,
                timeout=None,
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=max_concurrency
                ),
            )
            for _ in range(pools)
        ]
        self._cycle = itertools.cycle(self._clients)

    def next(self) -> httpx.AsyncClient:
        """Return the next client."""
        return next(self._cycle)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()
