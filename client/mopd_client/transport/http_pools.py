"""``HttpPools``: the same HTTP client several times over, each with few connections.

httpx looks at every connection of a pool whenever a request begins or ends, and for each idle one
at every other again: at 64 in one pool that took more of the client's time than all answers.
"""

import itertools
from collections.abc import Mapping

import httpx

#: Connections that one pool has where all are in use.
CONNECTIONS_PER_POOL = 8


class HttpPools:
    """Clients that take turns, so that ``max_concurrency`` requests are spread evenly over them.

    Each attempt is limited as a whole and concurrency is limited by the caller: no pool has limits
    of its own on either.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        certificates = httpx.create_ssl_context()  # read from disk, once for all
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
        self._turns = itertools.cycle(self._clients)

    def next(self) -> httpx.AsyncClient:
        """The client whose turn it is."""
        return next(self._turns)

    async def aclose(self) -> None:
        """Closes all connections."""
        for client in self._clients:
            await client.aclose()
