"""``TeacherClient``: one teacher, at one address or at several replicas."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import Self, TypedDict, Unpack

import httpx
from pydantic import ValidationError

from mopd_client.handshake import Handshake
from mopd_client.request_parts import Part, divide
from mopd_client.response_checks import check_response
from mopd_client.score_store import ScoreKey, ScoreStore
from mopd_client.services.base import Service
from mopd_client.services.expectation import Expectation, changed_teacher
from mopd_client.services.mopd import MopdService
from mopd_client.spot_checks import SpotChecks
from mopd_client.transport.addresses import names_addresses
from mopd_client.transport.balance import Work
from mopd_client.transport.clock import Clock
from mopd_client.transport.concurrency import gather_or_cancel
from mopd_client.transport.connection import Connection
from mopd_client.transport.counters import Counters
from mopd_client.transport.discovery import Resolve, resolve
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import (
    ConfigError,
)
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable

#: Default share of the tokens that is scored again.
DEFAULT_VERIFY = 0.001


class ClientOptions(TypedDict, total=False):
    """Options of a ``TeacherClient``.

    ``service`` is the kind of server, a mopd teacher service by default. ``ca_file`` has the
    authorities of https addresses (PEM), instead of the public ones. ``timeout_seconds`` limits
    one attempt, ``deadline_seconds`` a request with all its retries; at most ``max_concurrency``
    requests are in flight, and waiting for a free slot counts towards neither limit. One available
    replica is enough for a handshake; with ``require_all_replicas``, all are needed that have no
    ``dns+`` address. ``cache`` stores scores on disk. ``verify`` is the share of completion tokens
    that is scored again to verify a response (0: none, see ``SpotChecks``), chosen by ``seed``.
    ``transport``, ``clock`` and ``resolve`` replace the network, the time and the name servers in
    tests.
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
    resolve: Resolve


class TeacherClient:
    """Client of one teacher at one address or several; invalid responses raise.

    Use it within one event loop, and close it.

    Args:
        name: name of the teacher in error messages.
        urls: addresses of the teacher's replicas; ``dns+http://name:port`` is a replica at each
            address of the name, resolved again during use.
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
            resolve=options.get("resolve", resolve),
        )
        self._handshake = Handshake(
            self._service,
            self._connection,
            require_all=options.get("require_all_replicas", False),
        )
        self._cache = options.get("cache")
        self._spot_checks = SpotChecks(
            name, share=options.get("verify", DEFAULT_VERIFY), seed=options.get("seed", 0)
        )
        self._tokenizer: TeacherTokenizer | None = None
        self._handshake_lock = asyncio.Lock()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas that may get requests."""
        return self._connection.replicas.current

    @property
    def addresses(self) -> list[str]:
        """The teacher's addresses, names included."""
        return self._connection.replicas.addresses

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
        """Wait until a replica is ready to score; every one, with ``require_all_replicas``.

        Raises:
            TeacherError: if the teacher is not ready within ``deadline_seconds``.
        """
        await self._handshake.wait_until_ready(deadline_seconds)

    @names_addresses
    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Return the teacher's manifest, with the lowest limits of its replicas.

        Later responses must have the same manifest id. Of discovered replicas those are used that
        have the known or expected manifest, or that of most replicas.

        Raises:
            TeacherMismatchError: on another schema version, on fixed replicas of different
                teachers, or if the teacher is not the one that ``expectation`` names.
            TeacherError: if the teacher is unavailable or its response invalid.
            ConfigError: if the teacher does not support what ``expectation`` needs.
            DataError: if the teacher has changed since the first handshake.
        """
        return await self._handshake.make(expectation)

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
        _request(sequences[:1], top_k, temperature, logprobs_dtype)  # raises before the handshake
        manifest = await self._get_manifest()
        balance, usable = self._connection.replicas.balance, self.replicas
        count = sum(replica.breaker.closed for replica in usable)

        def cached_at(work: Work) -> str:
            replica = balance.cached_at(work, usable)
            return "" if replica is None else replica.url

        async def score(part: Part) -> dict[int, TeacherScore]:
            request = _request(
                [sequences[index] for index in part.indices], top_k, temperature, logprobs_dtype
            )
            scores = await self._score_part(request, manifest, part)
            return dict(zip(part.indices, scores, strict=True))

        parts = divide(sequences, top_k, replicas=count, cached_at=cached_at)
        scores: dict[int, TeacherScore] = {}
        for each in await gather_or_cancel([score(part) for part in parts]):
            scores |= each
        return [scores[index] for index in range(len(sequences))]

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

    async def _get_manifest(self) -> Manifest:
        async with self._handshake_lock:  # concurrent first calls share one handshake
            return self._handshake.manifest or await self.handshake()

    async def _score_part(
        self, request: LogprobsRequest, manifest: Manifest, part: Part
    ) -> list[TeacherScore]:
        """Return stored scores, and request and store the others."""
        if self._cache is None:
            return await self._request_scores(request, manifest, part)
        sequences = request.sequences
        keys = [ScoreKey.of(manifest.manifest_id, request, sequence) for sequence in sequences]
        stored = await self._cache.read(keys, self.counters)
        missing = [index for index, score in enumerate(stored) if score is None]
        scores: Iterator[TeacherScore] = iter(())
        if missing:
            rest = request.model_copy(update={"sequences": [sequences[i] for i in missing]})
            new_scores = await self._request_scores(rest, manifest, part)
            await self._cache.write(
                dict(zip((keys[i] for i in missing), new_scores, strict=True)),
                request.logprobs_dtype,
                self.counters,
            )
            scores = iter(new_scores)
        return [next(scores) if score is None else score for score in stored]

    async def _request_scores(
        self, request: LogprobsRequest, manifest: Manifest, part: Part
    ) -> list[TeacherScore]:
        """Request, check, verify and count the scores."""

        async def score_again(request: LogprobsRequest, avoided_url: str) -> LogprobsResponse:
            connection = self._connection.for_spot_checks(avoided_url)
            response = await self._checked_response(connection, request, manifest)
            self.counters.spot_checks += connection.counters.requests
            self.counters.spot_check_tokens += sum(len(s.completion) for s in response.scores)
            return response

        connection = self._connection
        if part.of_prompts:
            connection = connection.for_parts_of_prompts()
        succeeded = False
        try:
            response = await self._checked_response(connection, request, manifest)
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
        while response.manifest_id != manifest.manifest_id:
            error = changed_teacher(self.name, response.manifest_id, manifest)
            if not self._handshake.reject(response, error):
                raise error
            response = await self._service.score(connection, request, manifest)
        check_response(self.name, response, request, manifest, self._table)
        return response


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
