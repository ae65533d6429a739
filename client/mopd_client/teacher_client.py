"""``TeacherClient``: one teacher, at one address or at several replicas."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Self, TypedDict, Unpack

import httpx
from pydantic import ValidationError

from mopd_client.request_parts import parts_of
from mopd_client.response_checks import check_response
from mopd_client.score_store import ScoreKey, ScoreStore
from mopd_client.services.base import Service
from mopd_client.services.expectation import Expectation, changed_teacher, summary
from mopd_client.services.mopd import MopdService
from mopd_client.spot_checks import SpotChecks
from mopd_client.transport.addresses import names_addresses
from mopd_client.transport.clock import Clock
from mopd_client.transport.concurrency import gather_or_cancel
from mopd_client.transport.connection import Connection
from mopd_client.transport.counters import Counters
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import (
    ConfigError,
    TeacherError,
    TeacherMismatchError,
    TeacherUnavailableError,
)
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable

logger = logging.getLogger(__name__)

#: Deadline of a handshake with a replica that is not required.
_OPTIONAL_REPLICA_SECONDS = 5.0
#: Default share of the tokens that is scored again.
DEFAULT_VERIFY = 0.001


class ClientOptions(TypedDict, total=False):
    """Options of a ``TeacherClient``.

    ``service`` is the kind of server, a mopd teacher service by default. ``ca_file`` has the
    authorities of https addresses (PEM), instead of the public ones. ``timeout_seconds`` limits
    one attempt, ``deadline_seconds`` a request with all its retries; at most ``max_concurrency``
    requests are in flight, and waiting for a free slot counts towards neither limit. With
    ``require_all_replicas=False`` one available replica is enough for a handshake. ``cache`` stores
    scores on disk. ``verify`` is the share of completion tokens that is scored again to verify a
    response (0: none, see ``SpotChecks``), chosen by ``seed``. ``transport`` and ``clock`` replace
    the network and the time in tests.
    """

    service: Service | None
    api_key: str | None
    ca_file: str | Path | None
    timeout_seconds: float
    deadline_seconds: float
    max_concurrency: int
    require_all_replicas: bool
    cache: ScoreStore | None
    verify: float
    seed: int
    transport: httpx.AsyncBaseTransport | None
    clock: Clock | None


class TeacherClient:
    """Client of one teacher at one address or several; invalid responses raise.

    Use it within one event loop, and close it.

    Args:
        name: name of the teacher in error messages.
        urls: addresses of the teacher's replicas.
        options: see ``ClientOptions``.

    Raises:
        ConfigError: on an invalid address or limit.
    """

    def __init__(self, name: str, urls: Sequence[str], **options: Unpack[ClientOptions]) -> None:
        self.name = name
        self._service = options.get("service") or MopdService()
        self._connection = Connection(
            name,
            urls,
            api_key=options.get("api_key"),
            ca_file=options.get("ca_file"),
            timeout_seconds=options.get("timeout_seconds", 60.0),
            deadline_seconds=options.get("deadline_seconds", 300.0),
            max_concurrency=options.get("max_concurrency", 32),
            transport=options.get("transport"),
            clock=options.get("clock") or Clock(),
        )
        self._require_all_replicas = options.get("require_all_replicas", True)
        self._cache = options.get("cache")
        self._spot_checks = SpotChecks(
            name, share=options.get("verify", DEFAULT_VERIFY), seed=options.get("seed", 0)
        )
        self._manifest: Manifest | None = None
        self._tokenizer: TeacherTokenizer | None = None
        self._handshake_lock = asyncio.Lock()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The teacher's addresses."""
        return self._connection.replicas

    @property
    def path(self) -> str:
        """Path of scoring requests."""
        return self._service.path

    @property
    def counters(self) -> Counters:
        """Cost of this teacher's requests so far."""
        return self._connection.counters

    @names_addresses
    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Wait until every replica is ready to score; one, with ``require_all_replicas=False``.

        Raises:
            TeacherError: if the teacher is not ready within ``deadline_seconds``.
        """
        polls = [asyncio.create_task(self._ready(r, deadline_seconds)) for r in self.replicas]
        try:
            if self._require_all_replicas:
                await asyncio.gather(*polls)
            else:
                await _first_success(polls)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    @names_addresses
    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Return the teacher's manifest, with the lowest limits of its replicas.

        Later responses must have the same manifest id.

        Raises:
            TeacherMismatchError: on another schema version, on replicas of different teachers, or
                if the teacher is not the one that ``expectation`` names.
            TeacherError: if the teacher is unavailable or its response invalid.
            ConfigError: if the teacher does not support what ``expectation`` needs.
            DataError: if the teacher has changed since the first handshake.
        """
        replies = await self._manifests(expectation)
        first, manifest = replies[0]
        for replica, other in replies:
            if other.manifest_id != manifest.manifest_id:
                raise TeacherMismatchError(
                    f"teacher {self.name!r}: replicas serve different models (found "
                    f"{summary(manifest)} at {first.url}, {summary(other)} at {replica.url}; "
                    "expected one model, revision, engine and dtype)",
                    status=HTTPStatus.OK,
                    key="manifest_id",
                )
        if self._manifest is not None and self._manifest.manifest_id != manifest.manifest_id:
            raise changed_teacher(self.name, manifest.manifest_id, self._manifest)
        manifest = _with_lowest_limits(manifest, [other for _, other in replies])
        if expectation is not None:
            expectation.check(self.name, manifest)
        self._manifest = manifest
        return manifest

    @names_addresses
    async def tokenizer(self) -> TeacherTokenizer:
        """Return the teacher's tokenizer, fetched once.

        Raises:
            TeacherError: if the teacher is unavailable, or the tokenizer is not the manifest's.
        """
        manifest = await self._get_manifest()
        if self._tokenizer is None:
            self._tokenizer = await self._service.tokenizer(self._connection, manifest)
        return self._tokenizer

    @names_addresses
    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """Return one score per sequence, in order; stored scores are not requested again.

        A large call is sent as several requests, of which a failing one fails the call.
        The bytes of the tokens are checked, too, if ``tokenizer`` was called before.

        Raises:
            ConfigError: if the request is invalid (``top_k`` below 1).
            TeacherError: if the teacher is unavailable, rejects the request, or returns an invalid
                response.
            DataError: if the teacher has changed since the handshake.
            VerificationError: if a second score contradicts the first.
        """
        if not sequences:
            return []
        requests = [
            _request(sequences[part], top_k, temperature, logprobs_dtype)
            for part in parts_of(sequences, top_k)
        ]
        manifest = await self._get_manifest()
        parts = await gather_or_cancel([self._score_part(each, manifest) for each in requests])
        return [score for part in parts for score in part]

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def _table(self) -> TokenTable | None:
        return None if self._tokenizer is None else self._tokenizer.table

    async def _ready(self, replica: Replica, deadline_seconds: float) -> None:
        response = await self._connection.send_to_replica(
            replica, self._service.ready_path, deadline_seconds=deadline_seconds
        )
        self._connection.require_ok(response)

    async def _get_manifest(self) -> Manifest:
        async with self._handshake_lock:  # concurrent first calls share one handshake
            return self._manifest or await self.handshake()

    async def _manifests(self, expectation: Expectation | None) -> list[tuple[Replica, Manifest]]:
        """Return the manifests of all replicas, or of the available ones if one is enough."""
        required = self._require_all_replicas or len(self.replicas) == 1
        requests = [
            self._service.manifest(
                self._connection,
                replica,
                expectation,
                deadline_seconds=None if required else _OPTIONAL_REPLICA_SECONDS,
            )
            for replica in self.replicas
        ]
        results = await asyncio.gather(*requests, return_exceptions=not required)
        manifests: list[tuple[Replica, Manifest]] = []
        failures: list[TeacherUnavailableError] = []
        for replica, result in zip(self.replicas, results, strict=True):
            if isinstance(result, TeacherUnavailableError):
                logger.warning("continuing without %s: %s", replica.url, result)
                failures.append(result)
            elif isinstance(result, BaseException):
                raise result
            else:
                manifests.append((replica, result))
        if not manifests:
            raise failures[0]
        return manifests

    async def _score_part(self, request: LogprobsRequest, manifest: Manifest) -> list[TeacherScore]:
        """Return stored scores, and request and store the others."""
        if self._cache is None:
            return await self._request_scores(request, manifest)
        sequences = request.sequences
        keys = [ScoreKey.of(manifest.manifest_id, request, sequence) for sequence in sequences]
        stored = await self._cache.read(keys, self.counters)
        missing = [index for index, score in enumerate(stored) if score is None]
        scores: Iterator[TeacherScore] = iter(())
        if missing:
            rest = request.model_copy(update={"sequences": [sequences[i] for i in missing]})
            new_scores = await self._request_scores(rest, manifest)
            await self._cache.write(
                dict(zip((keys[i] for i in missing), new_scores, strict=True)),
                request.logprobs_dtype,
                self.counters,
            )
            scores = iter(new_scores)
        return [next(scores) if score is None else score for score in stored]

    async def _request_scores(
        self, request: LogprobsRequest, manifest: Manifest
    ) -> list[TeacherScore]:
        """Request, check, verify and count the scores."""

        async def score_again(request: LogprobsRequest, avoided_url: str) -> LogprobsResponse:
            connection = self._connection.for_spot_checks(avoided_url)
            response = await self._checked_response(connection, request, manifest)
            self.counters.spot_checks += connection.counters.requests
            self.counters.spot_check_tokens += sum(len(s.completion) for s in response.scores)
            return response

        succeeded = False
        try:
            response = await self._checked_response(self._connection, request, manifest)
            await self._spot_checks.verify(request, response, manifest, self._table, score_again)
            succeeded = True
        finally:
            self.counters.failures += not succeeded
        self.counters.tokens_scored += sum(len(score.completion) for score in response.scores)
        return list(response.scores)

    async def _checked_response(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """Send a request and check the response.

        Every sequence is sent with a random id, so that the response to another request is
        rejected.
        """
        numbered = [s.model_copy(update={"id": token_hex(8)}) for s in request.sequences]
        request = request.model_copy(update={"sequences": numbered})
        response = await self._service.score(connection, request, manifest)
        if response.manifest_id != manifest.manifest_id:
            raise changed_teacher(self.name, response.manifest_id, manifest)
        check_response(self.name, response, request, manifest, self._table)
        return response


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


def _request(
    sequences: Sequence[SequenceRequest],
    top_k: int,
    temperature: float,
    logprobs_dtype: LogprobsDtype,
) -> LogprobsRequest:
    try:
        return LogprobsRequest(
            sequences=list(sequences),
            top_k=top_k,
            temperature=temperature,
            logprobs_dtype=logprobs_dtype,
        )
    except ValidationError as error:
        raise ConfigError(f"invalid scoring request: {error}") from error
