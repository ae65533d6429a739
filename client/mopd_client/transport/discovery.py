"""``Replicas``: the replicas of a teacher, at fixed addresses and at those of names.

A name ``dns+http://name:port`` (a headless Kubernetes Service) is resolved again while requests are
sent, so that replicas come and go during a run. A new replica is used once its manifest is that of
the teacher; another manifest is logged once, counted, and compared again at later renewals.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

from mopd_client.transport.balance import Balance, Work
from mopd_client.transport.clock import Clock
from mopd_client.transport.counters import Counters
from mopd_client.transport.replica import Replica, ServiceName, replicas_at
from mopd_protocol.errors import MopdError, TeacherUnavailableError

logger = logging.getLogger(__name__)

#: Age of resolved addresses at which they are resolved again, and after a failed request.
RENEW_SECONDS, RENEW_FAILED_SECONDS = 10.0, 1.0

#: Name and port -> IP addresses; raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
#: Return why a replica cannot be used, or None.
Check = Callable[[Replica], Awaitable[MopdError | None]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the A and AAAA records of a name, resolved on a thread.

    Raises:
        OSError: if there is none, or no name server is reachable.
    """
    loop = asyncio.get_running_loop()
    records = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(address[0]) for *_, address in records)]


class Replicas:
    """The replicas of one teacher.

    Raises:
        ConfigError: on an invalid address.
    """

    def __init__(
        self,
        teacher: str,
        urls: Sequence[str],
        *,
        resolve: Resolve = resolve,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self.teacher = teacher
        self.fixed, self._names = replicas_at(teacher, urls)
        self.addresses = [each.rstrip("/") for each in urls]
        self.balance = Balance()
        self._resolve = resolve
        self._clock = clock
        self._counters = counters
        self._check: Check | None = None
        self._discovered: dict[str, Replica] = {}
        self._problems: dict[str, MopdError] = {}  # of rejected replicas and unresolved names
        self._renewed_at = -float("inf")
        self._failed = False
        self._renewal: asyncio.Task[None] | None = None

    @property
    def renewed(self) -> bool:
        """True if replicas come and go."""
        return bool(self._names)

    @property
    def known(self) -> tuple[Replica, ...]:
        """All replicas, those without the teacher's manifest included."""
        return (*self.fixed, *self._discovered.values())

    @property
    def current(self) -> tuple[Replica, ...]:
        """Replicas that may get requests."""
        return tuple(replica for replica in self.known if replica.admitted)

    def choose(self, work: Work, failed: Replica | None) -> Replica | None:
        """Choose the replica of the next attempt; None if there is none."""
        current = self.current
        if not current:
            return None
        return self.balance.choose(current, work, now=self._clock.now(), failed=failed)

    def renew_if_due(self, *, failed: bool = False) -> None:
        """Start to resolve old addresses, or such that a request has failed at, again."""
        self._failed |= failed
        age = self._clock.now() - self._renewed_at
        if self._names and age >= (RENEW_FAILED_SECONDS if self._failed else RENEW_SECONDS):
            self._start_renewal()

    async def renew(self) -> None:
        """Resolve names now; concurrent calls share one renewal."""
        if self._names:
            await asyncio.shield(self._start_renewal())

    async def find(self, deadline_seconds: float) -> None:
        """Resolve names until one has an address.

        Raises:
            TeacherUnavailableError: at the deadline.
        """
        deadline = self._clock.now() + deadline_seconds
        await self.renew()
        while not self.known:
            if self._clock.now() + RENEW_FAILED_SECONDS > deadline:
                raise self.error()
            await self._clock.sleep(RENEW_FAILED_SECONDS)
            await self.renew()

    def admit(self, replicas: Collection[Replica], check: Check) -> None:
        """Use only these of the discovered replicas, and later ones that pass a check."""
        self._check = check
        for replica in self._discovered.values():
            replica.admitted = replica in replicas

    def reject(self, replica: Replica, error: MopdError) -> bool:
        """Stop requests to a discovered replica, and log the reason once.

        Returns:
            False for a replica at a fixed address, which cannot be rejected.
        """
        if replica.host is None:
            return False
        replica.admitted = False
        known = self._problems.get(replica.url)
        self._problems[replica.url] = error
        if known is None or known.key != error.key:
            self._counters.rejected_replicas += 1
            logger.warning(
                "teacher %r: continuing without %s: %s", self.teacher, replica.url, error
            )
        return True

    def error(self) -> MopdError:
        """Return the error of a teacher that has no usable replica."""
        problems = [self._problems[r.url] for r in self.known if r.url in self._problems]
        if problems:
            return problems[0]
        reasons = [str(self._problems.get(name.address, "no address")) for name in self._names]
        return TeacherUnavailableError(
            f"teacher {self.teacher!r} at {', '.join(self.addresses)} has no replica: "
            f"{'; '.join(reasons)}. Check the name of the service and that its pods are ready"
        )

    async def aclose(self) -> None:
        """Stop a renewal in progress."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    def _start_renewal(self) -> "asyncio.Task[None]":
        if self._renewal is not None and self._renewal.done():
            self._renewal.result()  # raises what is a bug
        if self._renewal is None or self._renewal.done():
            self._renewed_at, self._failed = self._clock.now(), False
            self._renewal = asyncio.create_task(self._renew())
        return self._renewal

    async def _renew(self) -> None:
        replicas: dict[str, Replica] = {}
        for each in await asyncio.gather(*map(self._replicas_of, self._names)):
            replicas |= each
        before = {replica.url for replica in self.known}
        self._discovered = {
            url: self._discovered.get(url, replica) for url, replica in replicas.items()
        }
        if before - {each.url for each in self.fixed} != replicas.keys():
            urls = ", ".join(replicas) or "none"
            logger.info("teacher %r: addresses are %s", self.teacher, urls)
        for url in before - replicas.keys():
            self._problems.pop(url, None)
        new = [r for r in self._discovered.values() if r.url not in before or not r.admitted]
        for replica in new:
            replica.admitted = False
        await asyncio.gather(*map(self._admit, new))

    async def _replicas_of(self, name: ServiceName) -> dict[str, Replica]:
        """Return the replicas of a name by URL; the last ones while it cannot be resolved."""
        try:
            replicas = [name.replica(ip) for ip in await self._resolve(name.url.host, name.port)]
        except OSError as error:
            problem = TeacherUnavailableError(f"{name.address} cannot be resolved: {error}")
            if name.address not in self._problems:
                logger.warning("teacher %r: %s", self.teacher, problem)
            self._problems[name.address] = problem
            host = name.url.netloc.decode()
            return {url: each for url, each in self._discovered.items() if each.host == host}
        self._problems.pop(name.address, None)
        return {replica.url: replica for replica in replicas}

    async def _admit(self, replica: Replica) -> None:
        """Use a replica if it passes the check."""
        error = None if self._check is None else await self._check(replica)
        if isinstance(error, TeacherUnavailableError):
            self._problems.setdefault(replica.url, error)
            return  # compared at the next renewal
        if error is not None:
            self.reject(replica, error)
            return
        self._problems.pop(replica.url, None)
        self.balance.add(replica, self.current)
        replica.admitted = True
