"""``Replica``: one of the addresses at which a teacher answers, and the choice between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from mopd_client.transport.circuit_breaker import CircuitBreaker
from mopd_protocol.errors import ConfigError


@dataclass(eq=False)
class Replica:
    """One address of a teacher. All replicas of a teacher are one model with one manifest."""

    url: str
    in_flight: int = 0
    not_before: float = 0.0  # clock seconds; until then it asked to be left alone (Retry-After)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

    @property
    def free_at(self) -> float:
        """Clock seconds from which it may be asked; infinite while a probe is under way."""
        return max(self.not_before, self.breaker.free_at)


def replicas_at(teacher: str, urls: Sequence[str]) -> tuple[Replica, ...]:
    """One replica an address.

    Raises:
        ConfigError: when there is none, one is given twice, or one is not an http address.
    """
    addresses = [] if isinstance(urls, str) else [url.rstrip("/") for url in urls]
    if not addresses:
        raise ConfigError(f"teacher {teacher!r} has urls {urls!r}; expected a list of at least one")
    for address in addresses:
        if not _is_address(address):
            raise ConfigError(
                f"teacher {teacher!r} has url {address!r}; expected http://host:port or https://…"
            )
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"teacher {teacher!r} has one url twice: {', '.join(addresses)}")
    return tuple(Replica(address) for address in addresses)


def _is_address(address: str) -> bool:
    try:
        parsed = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    plain = not (parsed.query or parsed.fragment)  # a path is to follow
    return parsed.scheme in ("http", "https") and bool(parsed.host) and plain


def least_busy(replicas: Sequence[Replica], *, now: float, failed: Replica | None) -> Replica:
    """The replica to ask next: free at once, not the one that just failed, least in flight."""
    return min(
        replicas,
        key=lambda replica: (
            max(0.0, replica.free_at - now),
            replica is failed,
            replica.in_flight,
        ),
    )


def spare(replicas: Sequence[Replica], *, now: float, asked: Replica) -> Replica | None:
    """Another replica that answers, for a second request; None where there is none."""
    others = [r for r in replicas if r is not asked and r.breaker.closed and r.free_at <= now]
    return least_busy(others, now=now, failed=None) if others else None
