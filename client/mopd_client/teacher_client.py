"""``TeacherClient``: one teacher, at one address or at several replicas of it."""

import asyncio
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import ValidationError

from mopd_client.answer_checks import check_answer
from mopd_client.clock import Clock
from mopd_client.counters import Counters
from mopd_client.expectation import Expectation
from mopd_client.problem import problem_of
from mopd_client.replica import Replica, replicas_at
from mopd_client.retry import send_with_retries
from mopd_client.teacher_tokenizer import TeacherTokenizer, teacher_tokenizer
from mopd_protocol.codec import BINARY_MEDIA_TYPE, decode_binary
from mopd_protocol.errors import ConfigError, DataError, TeacherError
from mopd_protocol.manifest import SCHEMA_VERSION, Manifest
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore


class TeacherClient:
    """Asks one teacher, and refuses answers that cannot be right.

    ``timeout_seconds`` bounds one attempt, ``deadline_seconds`` a call with all its retries;
    at most ``max_concurrency`` calls are under way at once, others wait their turn (that wait
    counts towards neither). Use it within one event loop, and close it.

    Raises:
        ConfigError: on addresses or limits that cannot work.
    """

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        timeout_seconds: float = 60.0,
        deadline_seconds: float = 300.0,
        max_concurrency: int = 32,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        _require_positive(
            name,
            timeout_seconds=timeout_seconds,
            deadline_seconds=deadline_seconds,
            max_concurrency=max_concurrency,
        )
        if api_key and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ConfigError(
                f"teacher {name!r} has an api_key with characters that no header can carry; "
                "expected printable ASCII without spaces or line ends"
            )
        self.name = name
        self.replicas = replicas_at(name, urls)
        self.counters = Counters()
        self._timeout_seconds = timeout_seconds
        self._deadline_seconds = deadline_seconds
        self._clock = clock or Clock()
        self._turns = asyncio.Semaphore(max_concurrency)
        self._manifest: Manifest | None = None
        self._tokenizer: TeacherTokenizer | None = None
        self._first_contact = asyncio.Lock()
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=transport,
            # ``retry`` limits each attempt as a whole; concurrency is limited here, not by a pool.
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
        )

    async def wait_until_ready(self, deadline_seconds: float) -> None:
        """Returns when every replica is ready to score.

        Raises:
            TeacherError: when one is not within ``deadline_seconds``; it tells why.
        """
        for replica in self.replicas:
            await self._get(replica, "/readyz", deadline_seconds=deadline_seconds)

    async def handshake(self, expectation: Expectation | None = None) -> Manifest:
        """Who this teacher is; later answers are held against it.

        Raises:
            TeacherError: when it does not answer, speaks another schema version, or its replicas
                are not one and the same teacher.
            ConfigError: when it cannot do what ``expectation`` asks.
            DataError: when it is another teacher than ``expectation`` names, or than it was at the
                first handshake.
        """
        manifests = await asyncio.gather(*[self._manifest_of(r) for r in self.replicas])
        manifest = manifests[0]
        for replica, other in zip(self.replicas, manifests, strict=True):
            if other.manifest_id != manifest.manifest_id:
                raise TeacherError(
                    f"teacher {self.name!r} is two teachers: {self.replicas[0].url} serves "
                    f"{_told(manifest)}, {replica.url} serves {_told(other)}; expected replicas of "
                    "one model, revision, engine and dtype"
                )
        if self._manifest is not None and self._manifest.manifest_id != manifest.manifest_id:
            raise self._changed(manifest.manifest_id, self._manifest)
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
            body = _document(self.name, await self._get(self.replicas[0], "/v1/tokenizer"))
            try:
                text = body["files"]["tokenizer.json"]
            except (KeyError, TypeError) as error:
                raise TeacherError(
                    f"teacher {self.name!r} sent no tokenizer.json; expected it under 'files'"
                ) from error
            self._tokenizer = teacher_tokenizer(self.name, manifest, text)
        return self._tokenizer

    async def score(
        self,
        sequences: Sequence[SequenceRequest],
        *,
        top_k: int,
        temperature: float = 1.0,
        logprobs_dtype: LogprobsDtype = "float32",
    ) -> list[TeacherScore]:
        """One score for each sequence, in their order.

        Raises:
            ConfigError: when the request itself is wrong (``top_k`` below 1).
            TeacherError: when the teacher does not answer, refuses, or answers nonsense.
            DataError: when the teacher is not the one of the handshake any more.
        """
        if not sequences:
            return []
        request = _request(sequences, top_k, temperature, logprobs_dtype)
        manifest = await self._known_manifest()
        async with self._turns:
            started = self._clock.now()
            self.counters.requests += 1
            answered = False
            try:
                answer = await self._post_logprobs(request)
                self._check(answer, request, manifest)
                answered = True
            finally:
                self.counters.failures += not answered
        self.counters.seconds.append(self._clock.now() - started)
        self.counters.tokens_scored += sum(len(score.completion) for score in answer.scores)
        return list(answer.scores)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _known_manifest(self) -> Manifest:
        async with self._first_contact:  # many first calls at once shake hands once
            return self._manifest or await self.handshake()

    async def _manifest_of(self, replica: Replica) -> Manifest:
        body = _document(self.name, await self._get(replica, "/v1/manifest"))
        if body.get("schema_version") != SCHEMA_VERSION:
            raise TeacherError(
                f"teacher {self.name!r} at {replica.url} speaks schema version "
                f"{body.get('schema_version')}, expected {SCHEMA_VERSION}; "
                "run the same mopd version on both sides"
            )
        try:
            manifest = Manifest.parse(body)
        except ValidationError as error:
            raise TeacherError(
                f"teacher {self.name!r} at {replica.url} sent no manifest: {error}"
            ) from error
        if body.get("manifest_id") != manifest.manifest_id:
            raise TeacherError(
                f"teacher {self.name!r} at {replica.url} calls its manifest "
                f"{body.get('manifest_id')}, but it hashes to {manifest.manifest_id}; "
                "run the same mopd version on both sides"
            )
        return manifest

    async def _get(
        self, replica: Replica, path: str, *, deadline_seconds: float | None = None
    ) -> httpx.Response:
        response = await send_with_retries(
            [replica],
            lambda replica: self._http.get(replica.url + path),
            teacher=self.name,
            timeout_seconds=self._timeout_seconds,
            deadline_seconds=deadline_seconds or self._deadline_seconds,
            clock=self._clock,
            on_retry=lambda: None,
        )
        return self._answered(response)

    async def _post_logprobs(self, request: LogprobsRequest) -> LogprobsResponse:
        body = request.model_dump_json(exclude_none=True).encode()
        headers = {"content-type": "application/json", "accept": BINARY_MEDIA_TYPE}
        response = await send_with_retries(
            self.replicas,
            lambda replica: self._http.post(
                replica.url + "/v1/logprobs", content=body, headers=headers
            ),
            teacher=self.name,
            timeout_seconds=self._timeout_seconds,
            deadline_seconds=self._deadline_seconds,
            clock=self._clock,
            on_retry=self._count_retry,
        )
        try:
            return decode_binary(self._answered(response).content)
        except DataError as error:
            raise TeacherError(
                f"teacher {self.name!r} answered nonsense: {error}", status=response.status_code
            ) from error

    def _count_retry(self) -> None:
        self.counters.retries += 1

    def _answered(self, response: httpx.Response) -> httpx.Response:
        status = response.status_code
        if status == 200:
            return response
        advice = "; is its api_key right?" if status in (401, 403) else ""
        raise TeacherError(
            f"teacher {self.name!r} answered {status}: {problem_of(response)}{advice}",
            status=status,
        )

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


def _document(teacher: str, response: httpx.Response) -> dict[str, Any]:
    try:
        body: Any = json.loads(response.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise TeacherError(
            f"teacher {teacher!r} answered {response.url.path} with "
            f"{response.headers.get('content-type', 'no content type')}; expected a JSON object; "
            "is this address a mopd teacher?",
            status=response.status_code,
        )
    return body  # pyright: ignore[reportUnknownVariableType]


def _require_positive(teacher: str, **settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ConfigError(f"teacher {teacher!r} has {name} {value}; expected more than 0")
