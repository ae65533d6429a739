"""Teacher service without a model, which records requests and fails as scripted."""

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from mopd_protocol.codec import BINARY_MEDIA_TYPE, encode_binary
from mopd_protocol.manifest import MANIFEST_HEADER, Features, Manifest
from mopd_protocol.requests import REQUEST_HEADER, LogprobsRequest, body_hash
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenRoles, TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.protocol import known_tokenizers

TOKENIZER_JSON = known_tokenizers.description("digit")
ROLES = TokenRoles(eos=0, end_of_turn=0, pad=1)
TABLE = TokenTable.from_json(json.loads(TOKENIZER_JSON), ROLES)
ENCODER = TextEncoder(Tokenizer.from_str(TOKENIZER_JSON), TABLE)

Scripted = httpx.Response | Exception


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of the scripted teacher."""
    fields: dict[str, Any] = {
        "service": "scripted",
        "model": "org/scripted",
        "revision": "r1",
        "engine": "script",
        "engine_version": "1",
        "dtype": "float32",
        "logit_width": 448,
        "tokenizer_fingerprint": TABLE.fingerprint,
        "tokenizer_size": TABLE.size,
        "roles": ROLES,
        "chat_template_hash": None,
        "max_model_len": 256,
        "max_top_k": 64,
        "features": Features(
            candidate_ids=True, temperature=True, messages=True, exact_tails=True, exact_text=True
        ),
    }
    return Manifest(**{**fields, **changes})


def problem(status: int, detail: str, **headers: str) -> httpx.Response:
    """Return an RFC 9457 response, like the service."""
    document = {"type": "about:blank", "title": "Problem", "status": status, "detail": detail}
    media_type = "application/problem+json"
    return httpx.Response(status, json=document, headers={"content-type": media_type, **headers})


@dataclass(frozen=True)
class RecordedRequest:
    """One request, as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any  # parsed JSON, or None


@dataclass
class ScriptedTeacher:
    """Follows the contract; scripted responses for a path come first, once each."""

    manifest: Manifest = field(default_factory=manifest)
    scripts: dict[str, deque[Scripted]] = field(default_factory=dict[str, deque[Scripted]])
    requests: list[RecordedRequest] = field(default_factory=list[RecordedRequest])
    in_flight: int = 0
    most_in_flight: int = 0
    pause: Callable[[], Awaitable[object]] | None = None  # awaited in the middle of each scoring

    def script(self, path: str, *responses: Scripted) -> None:
        """Queue the next responses to requests for ``path``."""
        self.scripts.setdefault(path, deque()).extend(responses)

    def requests_to(self, path: str) -> list[RecordedRequest]:
        """Requests for ``path``, in order."""
        return [request for request in self.requests if request.path == path]

    async def respond(self, request: httpx.Request) -> httpx.Response:
        """Return the next response."""
        body = json.loads(request.content) if request.content else None
        path = request.url.path
        self.requests.append(RecordedRequest(request.method, path, dict(request.headers), body))
        if self.scripts.get(path):
            scripted = self.scripts[path].popleft()
            if isinstance(scripted, Exception):
                raise scripted
            if path == "/v1/logprobs":
                scripted.headers.setdefault(MANIFEST_HEADER, self.manifest.manifest_id)
                scripted.headers.setdefault(REQUEST_HEADER, body_hash(request.content))
            return scripted
        return await self._honest(path, body, request.content)

    async def _honest(self, path: str, body: Any, content: bytes) -> httpx.Response:
        if path == "/readyz":
            return httpx.Response(200, json={"status": "ready"})
        if path == "/v1/manifest":
            return httpx.Response(200, json=self.manifest.model_dump(mode="json"))
        if path == "/v1/tokenizer":
            return httpx.Response(200, json={"files": {"tokenizer.json": TOKENIZER_JSON}})
        if path == "/v1/logprobs":
            return await self._score(LogprobsRequest.model_validate(body), body_hash(content))
        return problem(404, f"there is no {path} here")

    async def _score(self, request: LogprobsRequest, digest: str) -> httpx.Response:
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        try:
            if self.pause is not None:
                await self.pause()
        finally:
            self.in_flight -= 1
        response = scores_for(request, self.manifest)
        return httpx.Response(
            200,
            content=encode_binary(response, request.logprobs_dtype),
            headers={
                "content-type": BINARY_MEDIA_TYPE,
                MANIFEST_HEADER: self.manifest.manifest_id,
                REQUEST_HEADER: digest,
            },
        )


def scores_for(request: LogprobsRequest, manifest: Manifest) -> LogprobsResponse:
    """Every completion token has half of the probability, all other ids share the rest."""
    scores: list[TeacherScore] = []
    for sequence in request.sequences:
        sent = sequence.completion
        token_ids = sequence.completion_token_ids or (
            ENCODER.encode(sent) if isinstance(sent, str) else []
        )
        completion = TABLE.sequence([*token_ids, 0] if sequence.finished else token_ids)
        rows, size = len(completion), TABLE.size
        half, other = np.full(rows, np.log(0.5)), np.log(0.5 / (size - 1))
        tail = np.full(rows, other + np.log(size - request.top_k))
        ids = (completion.token_ids[:, None] + np.arange(request.top_k)) % TABLE.size
        logprobs = np.where(np.arange(request.top_k), other, half[:, None])
        topk = TopKLogprobs(ids, logprobs, half, tail)
        scores.append(TeacherScore(manifest.manifest_id, completion, topk))
    ids = tuple(sequence.id for sequence in request.sequences)
    return LogprobsResponse(manifest.manifest_id, ids, tuple(scores))


def network(**teachers: ScriptedTeacher) -> httpx.MockTransport:
    """Return a transport of host name -> teacher; other hosts are unreachable."""

    async def deliver(request: httpx.Request) -> httpx.Response:
        if request.url.host not in teachers:
            raise httpx.ConnectError(f"no host {request.url.host}", request=request)
        return await teachers[request.url.host].respond(request)

    return httpx.MockTransport(deliver)
