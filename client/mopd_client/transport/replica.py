"""``Replica``: one of a teacher's addresses; and the names of services with several."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from mopd_client.transport.circuit_breaker import CircuitBreaker
from mopd_protocol.errors import ConfigError

#: Prefix of an address whose name has one replica per A and AAAA record.
DNS_PREFIX = "dns+"
#: Beginnings of all addresses.
ADDRESS_PREFIXES = ("http://", "https://", "dns+http://", "dns+https://")
_PORTS = {"http": 80, "https": 443}


@dataclass(eq=False)
class Replica:
    """One address of a teacher. All replicas serve one model with one manifest."""

    url: str
    host: str | None = None
    """Name and port of the service whose name was resolved, for the Host header and TLS."""
    in_flight: int = 0  # tokens of the requests without a response
    sent: int = 0  # tokens of all requests
    not_before: float = 0.0  # clock seconds, from a Retry-After header
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    admitted: bool = True  # its manifest is the teacher's, or no manifest is known yet

    @property
    def available_at(self) -> float:
        """Earliest clock seconds of the next request; infinite while a probe is in flight."""
        return max(self.not_before, self.breaker.available_at)


@dataclass(frozen=True)
class ServiceName:
    """An address ``dns+http://name:port``."""

    address: str
    url: httpx.URL

    @property
    def port(self) -> int:
        """TCP port."""
        return self.url.port or _PORTS[self.url.scheme]

    def replica(self, ip: str) -> Replica:
        """Create the replica at an IP address of the service."""
        url = self.url.copy_with(host=ip, port=self.port)
        return Replica(str(url).rstrip("/"), host=self.url.netloc.decode())


def replicas_at(
    teacher: str, urls: Sequence[str]
) -> tuple[tuple[Replica, ...], tuple[ServiceName, ...]]:
    """Create one replica per address, and one name per address that begins with ``dns+``.

    Raises:
        ConfigError: if there is no address, a duplicate, or one that is not an http address.
    """
    addresses = [] if isinstance(urls, str) else [url.rstrip("/") for url in urls]
    if not addresses:
        raise ConfigError(
            f"teacher {teacher!r}: url is empty or not a list (found {urls!r}, expected a list of "
            "at least one address)",
            key="url",
        )
    for address in addresses:
        if not _is_address(address.removeprefix(DNS_PREFIX)):
            raise ConfigError(
                f"teacher {teacher!r}: url {address!r} is invalid (expected http://host:port, "
                "https://… or dns+http://name:port)",
                key="url",
            )
    if len(set(addresses)) != len(addresses):
        raise ConfigError(
            f"teacher {teacher!r}: url has duplicates (found {', '.join(addresses)})", key="url"
        )
    return (
        tuple(Replica(each) for each in addresses if not each.startswith(DNS_PREFIX)),
        tuple(
            ServiceName(each, httpx.URL(each.removeprefix(DNS_PREFIX)))
            for each in addresses
            if each.startswith(DNS_PREFIX)
        ),
    )


def _is_address(address: str) -> bool:
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    has_suffix = bool(parsed.query or parsed.fragment)  # paths are appended to the address
    return parsed.scheme in _PORTS and bool(parsed.host) and not has_suffix
