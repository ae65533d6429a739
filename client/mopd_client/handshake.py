"""``Handshake``: wait for a teacher's replicas, and compare their manifests."""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus

from mopd_client.services.base import Service
from mopd_client.services.expectation import Expectation, changed_teacher, summary
from mopd_client.transport.connection import Connection
from mopd_client.transport.discovery import RENEW_FAILED_SECONDS
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import (
    DataError,
    MopdError,
    TeacherError,
    TeacherMismatchError,
    TeacherUnavailableError,
)
from mopd_protocol.manifest import Manifest
from mopd_protocol.responses import LogprobsResponse

logger = logging.getLogger(__name__)

#: Deadline of a handshake with a replica that is not required.
_OPTIONAL_REPLICA_SECONDS = 5.0


class Handshake:
    """Handshakes with one teacher.

    Args:
        service: kind of server.
        connection: to the teacher.
        require_all: every replica is needed, unless replicas are discovered.
    """

    def __init__(self, service: Service, connection: Connection, *, require_all: bool) -> None:
        self.manifest: Manifest | None = None
        self._service = service
        self._connection = connection
        self._replicas = connection.replicas
        self._teacher, self._clock = connection.teacher, connection.clock
        self._expectation: Expectation | None = None
        only = len(self._replicas.fixed) == 1
        self._requires_all = not self._replicas.renewed and (require_all or only)

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """See ``TeacherClient.wait_until_ready``."""
        replicas, deadline = self._replicas, self._clock.now() + deadline_seconds
        while True:
            remaining = deadline - self._clock.now()
            await replicas.find(remaining)
            # Pods that start meanwhile have other addresses.
            seconds = min(remaining, _OPTIONAL_REPLICA_SECONDS) if replicas.renewed else remaining
            polls = [asyncio.create_task(self._ready(r, seconds)) for r in replicas.known]
            try:
                if self._requires_all:
                    await asyncio.gather(*polls)
                else:
                    await _first_success(polls)
                return
            except TeacherUnavailableError:
                if not replicas.renewed or self._clock.now() + RENEW_FAILED_SECONDS >= deadline:
                    raise
                await self._clock.sleep(RENEW_FAILED_SECONDS)
            finally:
                for poll in polls:
                    poll.cancel()
                await asyncio.gather(*polls, return_exceptions=True)

    async def make(self, expectation: Expectation | None) -> Manifest:
        """See ``TeacherClient.handshake``."""
        replies = await self._manifests(expectation)
        replica, manifest = self._reference(replies, expectation)
        same: dict[Replica, Manifest] = {}
        for other_replica, other in replies.items():
            if other.manifest_id == manifest.manifest_id:
                same[other_replica] = other
                continue
            error = TeacherMismatchError(
                f"teacher {self._teacher!r}: replicas serve different models (found "
                f"{summary(manifest)} at {replica.url}, {summary(other)} at {other_replica.url}; "
                "expected one model, revision, engine and dtype)",
                status=HTTPStatus.OK,
                key="manifest_id",
            )
            if not self._replicas.reject(other_replica, error):
                raise error
        if self.manifest is not None and self.manifest.manifest_id != manifest.manifest_id:
            raise changed_teacher(self._teacher, manifest.manifest_id, self.manifest)
        manifest = _with_lowest_limits(manifest, [*same.values()])
        if expectation is not None:
            expectation.check(self._teacher, manifest)
        self.manifest, self._expectation = manifest, expectation
        self._replicas.admit(same, self._problem_with)
        return manifest

    def reject(self, response: LogprobsResponse, error: DataError) -> bool:
        """Reject the replicas of another teacher in a response; return False if they are fixed."""
        assert self.manifest is not None
        scored = zip(response.scores, response.urls, strict=True)
        changed = {url for score, url in scored if score.manifest_id != self.manifest.manifest_id}
        known = [r for r in self._replicas.known if r.url in changed]
        return bool(known) and all(self._replicas.reject(r, error) for r in known)

    async def _ready(self, replica: Replica, deadline_seconds: float) -> None:
        response = await self._connection.send_to_replica(
            replica, self._service.ready_path, deadline_seconds=deadline_seconds
        )
        self._connection.require_ok(response)

    async def _manifests(self, expectation: Expectation | None) -> dict[Replica, Manifest]:
        """Return the manifests of all replicas, or of the available ones if one is enough."""
        deadline = self._clock.now() + self._connection.deadline_seconds
        while True:
            await self._replicas.find(deadline - self._clock.now())
            manifests, failures = await self._available_manifests(expectation)
            if manifests:
                return manifests
            final = [each for each in failures if not isinstance(each, TeacherUnavailableError)]
            if final or self._clock.now() + RENEW_FAILED_SECONDS >= deadline:
                raise [*final, *failures][0]
            await self._clock.sleep(RENEW_FAILED_SECONDS)

    async def _available_manifests(
        self, expectation: Expectation | None
    ) -> tuple[dict[Replica, Manifest], list[MopdError]]:
        replicas, required = self._replicas, self._requires_all
        known, seconds = replicas.known, None if required else _OPTIONAL_REPLICA_SECONDS
        requests = [
            self._service.manifest(self._connection, replica, expectation, deadline_seconds=seconds)
            for replica in known
        ]
        results = await asyncio.gather(*requests, return_exceptions=not required)
        manifests: dict[Replica, Manifest] = {}
        failures: list[MopdError] = []
        for replica, result in zip(known, results, strict=True):
            if isinstance(result, TeacherUnavailableError):
                logger.warning("continuing without %s: %s", replica.url, result)
                failures.append(result)
            elif isinstance(result, MopdError) and replicas.reject(replica, result):
                failures.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                manifests[replica] = result
        return manifests, failures

    def _reference(
        self, replies: dict[Replica, Manifest], expectation: Expectation | None
    ) -> tuple[Replica, Manifest]:
        """Return the first fixed replica; else one with the expected or the most common id."""
        expected = expectation.manifest_id if expectation is not None else None
        if self.manifest is not None:
            expected = self.manifest.manifest_id
        counts = Counter(manifest.manifest_id for manifest in replies.values())
        return max(
            replies.items(),
            key=lambda reply: (
                reply[0].host is None,
                reply[1].manifest_id == expected,
                counts[reply[1].manifest_id],
            ),
        )

    async def _problem_with(self, replica: Replica) -> MopdError | None:
        """Return why a replica that was discovered later cannot be used."""
        assert self.manifest is not None
        try:
            manifest = await self._service.manifest(
                self._connection,
                replica,
                self._expectation,
                deadline_seconds=_OPTIONAL_REPLICA_SECONDS,
            )
        except MopdError as error:
            return error
        if manifest.manifest_id != self.manifest.manifest_id:
            return changed_teacher(self._teacher, manifest.manifest_id, self.manifest)
        if _with_lowest_limits(self.manifest, [manifest, self.manifest]) != self.manifest:
            return TeacherMismatchError(
                f"teacher {self._teacher!r} at {replica.url}: lower limits than at the handshake "
                f"(found max_top_k {manifest.max_top_k}, max_model_len {manifest.max_model_len}, "
                f"expected {self.manifest.max_top_k}, {self.manifest.max_model_len}). Serve all "
                "replicas with the same options",
                status=HTTPStatus.OK,
                key="limits",
            )
        return None


async def _first_success(polls: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for the first success.

    Raises:
        TeacherError: the last failure, if all failed.
    """
    failure: TeacherError | None = None
    for poll in asyncio.as_completed(polls):
        try:
            await poll
        except TeacherError as error:
            failure = error
        else:
            return
    if failure is not None:
        raise failure


def _with_lowest_limits(manifest: Manifest, replicas: Sequence[Manifest]) -> Manifest:
    """Return the manifest with the lowest limits of all replicas; the id does not cover limits."""
    limits = {
        "max_top_k": min(replica.max_top_k for replica in replicas),
        "max_model_len": min(replica.max_model_len for replica in replicas),
    }
    return manifest.model_copy(update=limits)
