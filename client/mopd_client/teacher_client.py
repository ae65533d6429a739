"""``TeacherClient``: one teacher, at one address or at several replicas of it."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Self

import httpx
from pydantic import ValidationError

from mopd_client.response_checks import check_answer
from mopd_client.score_cache import ScoreCache, ScoreKey
from mopd_client.services.base import Service
from mopd_client.services.expectation import Expectation
from mopd_client.services.mopd import MopdService
from mopd_client.tokenizers.teacher import TeacherTokenizer
from mopd_client.transport.attempt import RETRIED_STATUSES
from mopd_client.transport.clock import Clock
from mopd_client.transport.connection import Connection
from mopd_client.transport.counters import Counters
from mopd_client.transport.hedging import Hedging
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore

logger = logging.getLogger(__name__)

#: How long a replica that need not be there is asked who it is.
_ABSENT_SECONDS = 5.0


class TeacherClient:
    """Asks one teacher, and refuses answers that cannot be right.

    ``timeout_seconds`` bounds one attempt, ``deadline_seconds`` a question with all its retries;
    at most ``max_concurrency`` questions are under way at once, others wait their turn (that wait
    counts towards neither). Use it within one event loop, and close it.

    Args:
        service: the kind of server; a mopd teacher service unless given.
        require_all_replicas: whether a handshake needs all of them. Without it one is enough, and
            the others are asked once they answer; every answer is held against the manifest.
        cache: where scores are kept and looked up.

    Raises:
        ConfigError: on addresses or limits that cannot work.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        service: Service | None = None,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        deadline_seconds: float = 300.0,
        max_concurrency: int = 32,
        hedging: Hedging | None = None,
        require_all_replicas: bool = True,
        cache: ScoreCache | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._service = service or MopdService()
        self._connection = Connection(
            name,
            urls,
            api_key=api_key,
            timeout_seconds=timeout_seconds,
            deadline_seconds=deadline_seconds,
            max_concurrency=max_concurrency,
            hedging=hedging or Hedging(),
            transport=transport,
            clock=clock or Clock(),
        )
        self._require_all_replicas = require_all_replicas
        self._cache = cache
        self._manifest: Manifest | None = None
        self._tokenizer: TeacherTokenizer | None = None
        self._first_contact = asyncio.Lock()

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The teacher's addresses."""
        return self._connection.replicas

    @property
    def path(self) -> str:
        """Where the teacher's servers are asked for scores, as the handshake found."""
        return self._service.path

    @property
    def counters(self) -> Counters:
        """What asking this teacher cost so far."""
        return self._connection.counters

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Returns when every replica is ready to score, or one, where one is enough.

        Raises:
            TeacherError: when that is not so within ``deadline_seconds``; it tells why.
        """
        polls = [asyncio.create_task(self._ready(r, deadline_seconds)) for r in self.replicas]
        try:
            if self._require_all_replicas:
                await asyncio.gather(*polls)
            else:
                await _any(polls)
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Who this teacher is; later answers are held against it. Of replicas that were started
        with other limits, the least counts: any of them may be asked.

        Raises:
            TeacherError: when it does not answer, speaks another schema version, or its replicas
                are not one and the same teacher.
            ConfigError: when it cannot do what ``expectation`` asks.
            DataError: when it is another teacher than ``expectation`` names, or than it was at the
                first handshake.
        """
        found = await self._manifests(expectation)
        first, manifest = found[0]
        for replica, other in found:
            if other.manifest_id != manifest.manifest_id:
                raise TeacherError(
                    f"teacher {self.name!r} is two teachers: {first.url} serves "
                    f"{_told(manifest)}, {replica.url} serves {_told(other)}; expected replicas of "
                    "one model, revision, engine and dtype",
                    status=HTTPStatus.OK,
                )
        if self._manifest is not None and self._manifest.manifest_id != manifest.manifest_id:
            raise self._changed(manifest.manifest_id, self._manifest)
        manifest = _within_all_limits(manifest, [other for _, other in found])
        if expectation is not None:
            expectation.check(self.name, manifest)
        self._manifest = manifest
        return manifest

    async def tokenizer(self) -> TeacherTokenizer:
        """The teacher's tokenizer, fetched once.

        Raises:
            TeacherError: when it does not answer, or answers another tokenizer than its manifest's.
        """
        manifest = await self._known_manifest()
        if self._tokenizer is None:
            self._tokenizer = await self._service.tokenizer(self._connection, manifest)
        return self._tokenizer

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """One score for each sequence, in their order; what the cache has is not asked for.

        Raises:
            ConfigError: when the request itself is wrong (``top_k`` below 1).
            TeacherError: when the teacher does not answer, refuses, or answers nonsense.
            DataError: when the teacher is not the one of the handshake any more.
        """
        if not sequences:
            return []
        request = _request(sequences, top_k, temperature, logprobs_dtype)
        manifest = await self._known_manifest()
        if self._cache is None:
            return await self._asked(request, manifest)
        keys = [ScoreKey.of(manifest.manifest_id, request, sequence) for sequence in sequences]
        found = await self._cache.load(keys, self.counters)
        missing = [at for at, score in enumerate(found) if score is None]
        if missing:
            rest = request.model_copy(update={"sequences": [sequences[at] for at in missing]})
            scores = await self._asked(rest, manifest)
            await self._cache.store(
                dict(zip((keys[at] for at in missing), scores, strict=True)),
                logprobs_dtype,
                self.counters,
            )
            found = _filled(found, scores)
        return [score for score in found if score is not None]

    async def aclose(self) -> None:
        """Closes the connections."""
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

    async def _ready(self, replica: Replica, deadline_seconds: float) -> None:
        response = await self._connection.ask_replica(
            replica, self._service.ready_path, deadline_seconds=deadline_seconds
        )
        self._connection.answered(response)

    async def _known_manifest(self) -> Manifest:
        async with self._first_contact:  # many first calls at once shake hands once
            return self._manifest or await self.handshake()

    async def _manifests(self, expectation: Expectation | None) -> list[tuple[Replica, Manifest]]:
        """The manifest of every replica that is there."""
        needed = self._require_all_replicas or len(self.replicas) == 1
        asked = [
            self._service.manifest(
                self._connection,
                replica,
                expectation,
                deadline_seconds=None if needed else _ABSENT_SECONDS,
            )
            for replica in self.replicas
        ]
        answers = await asyncio.gather(*asked, return_exceptions=not needed)
        found: list[tuple[Replica, Manifest]] = []
        absent: list[TeacherError] = []
        for replica, answer in zip(self.replicas, answers, strict=True):
            if isinstance(answer, TeacherError) and unavailable(answer):
                logger.warning("going on without %s: %s", replica.url, answer)
                absent.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append((replica, answer))
        if not found:
            raise absent[0]
        return found

    async def _asked(self, request: LogprobsRequest, manifest: Manifest) -> list[TeacherScore]:
        """The teacher's answer, checked and counted."""
        answered = False
        try:
            answer = await self._service.answer(self._connection, request, manifest)
            self._check(answer, request, manifest)
            answered = True
        finally:
            self.counters.failures += not answered
        self.counters.tokens_scored += sum(len(score.completion) for score in answer.scores)
        return list(answer.scores)

    def _check(
        self, answer: LogprobsResponse, request: LogprobsRequest, manifest: Manifest
    ) -> None:
        if answer.manifest_id != manifest.manifest_id:
            raise self._changed(answer.manifest_id, manifest)
        check_answer(self.name, answer, request, manifest)

    def _changed(self, found: str, manifest: Manifest) -> DataError:
        # Not a TeacherError: a run that drops what a failing teacher cannot score must not go on
        # with another teacher in its place.
        return DataError(
            f"teacher {self.name!r} has changed: its manifest is {found[:12]}, expected "
            f"{_told(manifest)} as at the handshake; serve the same again, or begin another run"
        )


async def _any(polls: Sequence["asyncio.Task[None]"]) -> None:
    """Returns when one has succeeded.

    Raises:
        TeacherError: the last failure, when all have failed.
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


def unavailable(error: TeacherError) -> bool:
    """Whether the teacher was not there, rather than that it refused or answered nonsense."""
    return error.status is None or error.status in RETRIED_STATUSES


def _within_all_limits(manifest: Manifest, replicas: Sequence[Manifest]) -> Manifest:
    """The manifest of a teacher of which any replica may be asked; limits are no part of its id."""
    limits = {
        "max_top_k": min(replica.max_top_k for replica in replicas),
        "max_model_len": min(replica.max_model_len for replica in replicas),
    }
    return manifest.model_copy(update=limits)


def _filled(
    found: Sequence[TeacherScore | None], scores: Sequence[TeacherScore]
) -> list[TeacherScore | None]:
    """``found`` with its gaps filled by ``scores``, in order."""
    rest = iter(scores)
    return [score if score is not None else next(rest) for score in found]


def _told(manifest: Manifest) -> str:
    return (
        f"{manifest.manifest_id[:12]} ({manifest.model} {manifest.revision[:12]}, "
        f"{manifest.engine} {manifest.engine_version}, {manifest.dtype})"
    )


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
        raise ConfigError(f"a request that no teacher can answer: {error}") from error
