"""``VllmService``: a teacher served by a stock ``vllm serve``.

Such a server accepts token ids and returns ``prompt_logprobs`` through ``/v1/completions``, and the
log-probabilities of chosen ids where it has the route of ``vllm_candidates``. Tokens, chat template
and manifest are made by this client. It supports no temperature, and its weights are known only by
the model's name and the server's version.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx

from mopd_client.services import vllm_candidates
from mopd_client.services.expectation import Expectation
from mopd_client.services.vllm_handshake import KIND, Handshake, model_card
from mopd_client.services.vllm_logprobs import topk_of_prompt_logprobs
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_client.tokenizers.teacher import rejections_of
from mopd_client.transport.balance import Work, work_of
from mopd_client.transport.concurrency import gather_or_cancel
from mopd_client.transport.connection import Connection
from mopd_client.transport.outcome import problem_of
from mopd_client.transport.replica import Replica
from mopd_protocol.errors import (
    ConfigError,
    DataError,
    InvalidResponseError,
    TeacherError,
    TeacherMismatchError,
)
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.messages import Message
from mopd_protocol.request_tokenizer import (
    RequestTokenizer,
    TeacherTokenizer,
    TokenizedSequence,
)
from mopd_protocol.requests import LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore

logger = logging.getLogger(__name__)

_COMPLETIONS = "/v1/completions"

#: Texts that tokenizers of one family split differently: various scripts, numbers, spaces.
PROBES = (
    "The 12 quick brown foxes cost 1999.50, don't they? ",
    "def add(a, b):\n    return a + b\r\n\n\tx\u00a0y",
    "Grüße, où, привет, γειά, 的漢字かな, 안녕하세요, שלום, नमस्ते, สวัสดี",
    "🙂 👨\u200d👩\u200d👧 ∑≤—…¿ \u0301e\u0301 \x00\x1b\u2028",
)
_MESSAGES = (Message(role="user", content="3 + 4 ="),)


class VllmService:
    """See ``Service``.

    Args:
        tokenizer: folder or hub id of the served model's tokenizer.
        model: name of the model on the server; optional if it serves only one.
        revision: name for the served weights, which the server does not report.
    """

    ready_path = "/health"
    path = _COMPLETIONS

    def __init__(
        self, tokenizer: str, *, model: str | None = None, revision: str | None = None
    ) -> None:
        self._source = tokenizer
        self._model = model
        self._revision = revision
        self._tokenizer: RequestTokenizer | None = None
        self._load_lock = asyncio.Lock()
        self._top_k = 1  # the largest that a server has accepted
        self._manifests: dict[str | None, Manifest] = {}  # by the server's system_fingerprint

    async def manifest(
        self,
        connection: Connection,
        replica: Replica,
        expectation: Expectation | None,
        *,
        deadline_seconds: float | None,
    ) -> Manifest:
        """See ``Service``; made from the server's facts and the tokenizer's files.

        Probes check that the server has this tokenizer, accepts this ``top_k``, and scores chosen
        ids.
        """
        tokenizer = await self._load_tokenizer()
        handshake = Handshake(connection, replica, deadline_seconds)
        card = model_card(connection.teacher, await handshake.get("/v1/models"), self._model)
        version = str((await handshake.get("/version")).get("version", "unknown"))
        top_k = max(self._top_k, 1 if expectation is None else expectation.top_k)
        fingerprint = await self._probe(handshake, card["id"], tokenizer, top_k)
        await self._compare_templates(handshake, card["id"], tokenizer)
        needs_candidates = expectation is not None and expectation.candidate_ids
        width = 1 + top_k if needs_candidates else 1  # 1: the completion's token
        probe = tokenizer.tokenizer.encode(PROBES[0], add_special_tokens=False).ids
        reason = await vllm_candidates.problem_with_candidates(handshake, card["id"], probe, width)
        if reason is not None and needs_candidates:
            raise ConfigError(
                f"{handshake.subject}: candidate_ids are unsupported (found vLLM {version}: "
                f"{reason}; expected vLLM 0.32 or later with --enable-scale-out, --max-logprobs "
                f"{width} or more and its V2 model runner). Start it with these options, use the "
                "teacher's own top-k, or serve the model with mopd-teacher",
                key="candidate_ids",
            )
        self._top_k = top_k
        manifest = Manifest(
            service=connection.teacher,
            model=str(card["id"]),
            revision=self._revision or "unknown",
            engine="vllm serve",
            engine_version=f"{version} {fingerprint}" if fingerprint else version,
            dtype="unknown",
            logit_width=tokenizer.table.size,
            tokenizer_fingerprint=tokenizer.table.fingerprint,
            tokenizer_size=tokenizer.table.size,
            roles=tokenizer.table.roles,
            chat_template_hash=tokenizer.chat_template_hash,
            max_model_len=int(card["max_model_len"]) - 1,  # the server always generates one token
            max_top_k=top_k,
            features=Features(
                candidate_ids=reason is None,
                temperature=False,
                messages=tokenizer.has_chat_template,
                exact_tails=False,
                exact_text=tokenizer.table.exact_text,
            ),
        )
        self._manifests[fingerprint] = manifest
        return manifest

    async def tokenizer(self, connection: Connection, manifest: Manifest) -> TeacherTokenizer:
        """See ``Service``; the tokenizer of ``source``."""
        return await self._load_tokenizer()

    async def score(
        self, connection: Connection, request: LogprobsRequest, manifest: Manifest
    ) -> LogprobsResponse:
        """See ``Service``; one concurrent HTTP request per sequence."""
        teacher = connection.teacher
        _require_supported(teacher, request, manifest)
        tokenizer = await self._load_tokenizer()
        with rejections_of(teacher):
            tokens = [tokenizer.tokenize(sequence) for sequence in request.sequences]
            for sequence in tokens:
                sequence.require_length(manifest.max_model_len)
        results = await gather_or_cancel(
            [
                self._score(connection, tokenizer, each, request.top_k, manifest, work_of([sent]))
                for each, sent in zip(tokens, request.sequences, strict=True)
            ]
        )
        scores, urls = zip(*results, strict=True)
        changed = [s.manifest_id for s in scores if s.manifest_id != manifest.manifest_id]
        return LogprobsResponse(
            manifest_id=changed[0] if changed else manifest.manifest_id,
            ids=tuple(sequence.id for sequence in request.sequences),
            scores=scores,
            urls=urls,
        )

    async def _load_tokenizer(self) -> RequestTokenizer:
        async with self._load_lock:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(
                    load_tokenizer, self._source, self._revision
                )
        return self._tokenizer

    async def _probe(
        self, handshake: Handshake, model: str, tokenizer: RequestTokenizer, top_k: int
    ) -> str | None:
        """Compare the server's tokenization of ``PROBES``; return its ``system_fingerprint``."""
        body = {
            **_completion_request(model, list(PROBES), top_k),
            "add_special_tokens": False,
            "return_token_ids": True,
        }
        response = await handshake.post(_COMPLETIONS, body)
        if response.status_code == HTTPStatus.BAD_REQUEST:
            raise ConfigError(
                f"{handshake.subject} rejects prompt_logprobs of {top_k}: {problem_of(response)}. "
                f"Start it with --max-logprobs {top_k} or more, or lower top_k",
                key="top_k",
            )
        document = handshake.document(response)
        try:
            choices = {choice["index"]: choice for choice in document["choices"]}
            server_ids = [list[int](choices[i]["prompt_token_ids"]) for i in range(len(PROBES))]
        except (KeyError, TypeError) as error:
            raise InvalidResponseError(
                f"{handshake.subject}: prompt_token_ids not found in the response ({error!r}), "
                "needed to compare tokenizers. Use a newer vLLM with return_token_ids",
                status=response.status_code,
                key="prompt_token_ids",
            ) from error
        for text, actual in zip(PROBES, server_ids, strict=True):
            expected = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
            if actual != expected:
                pairs = zip(actual, expected, strict=False)
                start = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                raise TeacherMismatchError(
                    f"{handshake.subject}: tokenizer differs from {self._source!r} on {text!r} "
                    f"(found {actual[start : start + 4]} from token {start} on, expected "
                    f"{expected[start : start + 4]}). Set the tokenizer of the served model",
                    status=response.status_code,
                    key="tokenizer",
                )
        return document.get("system_fingerprint")

    async def _compare_templates(
        self, handshake: Handshake, model: str, tokenizer: RequestTokenizer
    ) -> None:
        """Warn if the server renders messages differently, which may be intended."""
        if not tokenizer.has_chat_template:
            return
        messages = [message.model_dump() for message in _MESSAGES]
        response = await handshake.post("/tokenize", {"model": model, "messages": messages})
        if response.status_code != HTTPStatus.OK:
            return  # an optional route, needed for this comparison only
        rendered = tokenizer.render(_MESSAGES)
        expected = tokenizer.tokenizer.encode(rendered, add_special_tokens=False).ids
        if handshake.document(response).get("tokens") != expected:
            logger.warning(
                "%s: chat template differs from that of %r, which is used; check the server's "
                "--chat-template",
                handshake.subject,
                self._source,
            )

    async def _score(
        self,
        connection: Connection,
        tokenizer: RequestTokenizer,
        tokens: TokenizedSequence,
        top_k: int,
        manifest: Manifest,
        work: Work,
    ) -> tuple[TeacherScore, str]:
        if tokens.candidate_ids:
            return await self._score_candidates(connection, tokenizer, tokens, manifest, work)
        token_ids = tokens.token_ids
        body = _completion_request(manifest.model, token_ids, top_k)
        response, document = await _post(connection, _COMPLETIONS, body, work)
        with _invalid_responses(connection, response, "prompt_logprobs"):
            [choice] = document["choices"]
            topk = await asyncio.to_thread(
                topk_of_prompt_logprobs,
                choice["prompt_logprobs"],
                token_ids,
                first=len(tokens.prompt_ids),
                k=top_k,
                known=tokenizer.table.present,
            )
        known = self._manifests.get(document.get("system_fingerprint"))
        manifest_id = _manifest_id(document, known, manifest)
        return TeacherScore(manifest_id, tokens.completion, topk), response.extensions["url"]

    async def _score_candidates(
        self,
        connection: Connection,
        tokenizer: RequestTokenizer,
        tokens: TokenizedSequence,
        manifest: Manifest,
        work: Work,
    ) -> tuple[TeacherScore, str]:
        """Score the candidates, again without the server's cache if it has the completion."""
        assert tokens.candidate_ids is not None
        ids = vllm_candidates.scored_ids(tokens.completion.token_ids, tokens.candidate_ids)
        for read_cache in (True, False):
            body = vllm_candidates.candidates_request(
                manifest.model, tokens.token_ids, ids, read_cache=read_cache
            )
            response, document = await _post(connection, vllm_candidates.PATH, body, work)
            if document.get(vllm_candidates.MATRIX) is not None:
                break
        with _invalid_responses(connection, response, vllm_candidates.MATRIX):
            topk = vllm_candidates.topk_of_matrix(
                document[vllm_candidates.MATRIX], ids, all_ids=int(tokenizer.table.present.sum())
            )
        # These responses have no fingerprint.
        manifest_id = _manifest_id(document, manifest, manifest)
        return TeacherScore(manifest_id, tokens.completion, topk), response.extensions["url"]


async def _post(
    connection: Connection, path: str, body: dict[str, Any], work: Work
) -> tuple[httpx.Response, dict[str, Any]]:
    response = await connection.post(path, json.dumps(body).encode(), work=work)
    # In a thread, because the JSON has megabytes and would block other requests.
    return response, await asyncio.to_thread(connection.json_object, response, kind=KIND)


@contextmanager
def _invalid_responses(
    connection: Connection, response: httpx.Response, key: str
) -> Generator[None]:
    try:
        yield
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise InvalidResponseError(
            f"teacher {connection.teacher!r} at {response.url}: invalid response: {error}",
            status=response.status_code,
            key=key,
        ) from error


def _manifest_id(document: dict[str, Any], known: Manifest | None, expected: Manifest) -> str:
    """Return the manifest id of the responding server, by its model and fingerprint."""
    model = document.get("model")
    if known is not None and model == known.model:
        return known.manifest_id
    fingerprint = document.get("system_fingerprint")
    changes = {"model": str(model), "engine_version": str(fingerprint)}
    return expected.model_copy(update=changes).manifest_id


def _completion_request(model: str, prompt: Sequence[int | str], top_k: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top_k,
    }


def _require_supported(teacher: str, request: LogprobsRequest, manifest: Manifest) -> None:
    """Raise TeacherError on a temperature other than 1, or on unsupported ``candidate_ids``."""
    candidates = any(sequence.candidate_ids is not None for sequence in request.sequences)
    unsupported = candidates and not manifest.features.candidate_ids
    if request.temperature != 1.0 or unsupported:
        feature = "candidate_ids" if unsupported else f"temperature {request.temperature:g}"
        raise TeacherError(
            f"teacher {teacher!r}: unsupported {feature} on this {KIND}. Serve the model with "
            "mopd-teacher",
            status=HTTPStatus.BAD_REQUEST,
            key=feature.partition(" ")[0],
        )
