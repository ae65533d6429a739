"""``HttpPools``: several httpx clients with few connections each, used in turn.

httpx checks every connection of a pool when a request begins or ends, and for each idle connection
every one again: with 64 in one pool these checks took most of the client's time.
"""

import itertools
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from mopd_client.transport.bounded_response import ACCEPT_ENCODING, send_bounded
from mopd_protocol.errors import ConfigError

#: Connections per pool when all are in use.
CONNECTIONS_PER_POOL = 8
#: A machine that is lost does not refuse connections.
CONNECT_SECONDS = 10.0


class HttpPools:
    """Clients used in turn, so that ``max_concurrency`` requests are spread evenly.

    The caller limits the seconds of an attempt and the concurrency; pools have no such limits, but
    one for connecting.

    Raises:
        ConfigError: if ``ca_file`` has no certificates.
    """

    def __init__(
        self,
        max_concurrency: int,
        *,
        headers: Mapping[str, str],
        transport: httpx.AsyncBaseTransport | None,
        ca_file: str | Path | None = None,
    ) -> None:
        certificates = _trusted(ca_file)  # loaded from disk once for all pools
        pools = 1 if transport else -(-max_concurrency // CONNECTIONS_PER_POOL)
        self._clients = [
            httpx.AsyncClient(
                headers={"accept-encoding": ACCEPT_ENCODING, **headers},
                transport=transport,
                verify=certificates,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=max_concurrency
                ),
            )
            for _ in range(pools)
        ]
        self._cycle = itertools.cycle(self._clients)

    async def send(
        self,
        method: str,
        url: str,
        *,
        json: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        host: str | None = None,
    ) -> httpx.Response:
        """Send one request with the next client; see ``send_bounded``.

        Args:
            host: name and port of the server, if the URL has its IP address.
        """
        client = self.next()
        extensions = {}
        if host is not None:
            headers = {**(headers or {}), "host": host}
            extensions["sni_hostname"] = httpx.URL(f"https://{host}").host
        request = client.build_request(
            method, url, json=json, content=content, headers=headers, extensions=extensions
        )
        return await send_bounded(client, request)

    def next(self) -> httpx.AsyncClient:
        """Return the next client."""
        return next(self._cycle)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.aclose()


def _trusted(ca_file: str | Path | None) -> ssl.SSLContext:
    """Return the authorities of ``ca_file``, and of no other source; by default the public ones."""
    if ca_file is None:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # includes ssl.SSLError
        problem = error.strerror if not isinstance(error, ssl.SSLError) else None
        raise ConfigError(
            f"ca_file {str(ca_file)!r}: cannot be loaded: {problem or 'not PEM certificates'} "
            "(expected a PEM file of certificate authorities)",
            key="ca_file",
        ) from error
