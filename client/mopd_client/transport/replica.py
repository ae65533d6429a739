"""``Replica``: one of a teacher's addresses, and the choice between several."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from mopd_client.transport.circuit_breaker import CircuitBreaker
from mopd_protocol.errors import ConfigError


@dataclass(eq=False)
class Replica:
    """One address of a teacher. All replicas serve one model with one manifest."""

    url: str
    in_flight: int = 0
    not_before: float = 0.0  # clock seconds, from a Retry-After header
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def available_at(self) -> float:
        """Earliest clock seconds of the next request; infinite while a probe is in flight."""
        return max(self.not_before, self.breaker.available_at)


def replicas_at(teacher: str, urls: Sequence[str]) -> tuple[Replica, ...]:
    """Create one replica per address.

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
        if not _is_address(address):
            raise ConfigError(
                f"teacher {teacher!r}: url {address!r} is invalid (expected http://host:port or "
                "https://…)",
                key="url",
            )
    if len(set(addresses)) != len(addresses):
        raise ConfigError(
            f"teacher {teacher!r}: url has duplicates (found {', '.join(addresses)})", key="url"
        )
    return tuple(Replica(address) for address in addresses)


def _is_address(address: str) -> bool:
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    has_suffix = bool(parsed.query or parsed.fragment)  # paths are appended to the address
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not has_suffix


def least_busy(replicas: Sequence[Replica], *, now: float, failed: Replica | None) -> Replica:
    """Choose the next replica: earliest available, not the last failed, fewest in flight."""
    return min(
        replicas,
        key=lambda replica: (
            max(0.0, replica.available_at - now),
            replica is failed,
            replica.in_flight,
        ),
    )
