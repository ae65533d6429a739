"""Tiny teachers in process, and HTTP requests to their applications."""

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_server.app import create_app
from mopd_server.engines.base import ScoringTask
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.http.problems import PROBLEM_MEDIA_TYPE
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenizer_loading import ServedTokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models

FAMILIES = {
    "qwen": (tiny_models.qwen, tiny_models.digit_tokenizer),
    "llama": (tiny_models.llama, tiny_models.sentencepiece_tokenizer),
    "gpt_neox": (tiny_models.gpt_neox, tiny_models.whole_number_tokenizer),
}

#: Small, so that ordinary test batches need several forward passes.
MAX_BATCH_TOKENS = 64

#: A minimal scoring request.
SMALL = {"sequences": [{"prompt_token_ids": [1, 2], "completion_token_ids": [3]}], "top_k": 1}


@dataclass(frozen=True)
class TinyTeacher:
    """A loaded teacher and its parts."""

    model: PreTrainedModel
    tokenizer: RequestTokenizer
    engine: TransformersEngine
    service: TeacherService

    @property
    def app(self) -> FastAPI:
        """A new application around the service."""
        return create_app(self.service)

    @property
    def real_ids(self) -> list[int]:
        """The ids that have a token."""
        return self.tokenizer.table.present.nonzero()[0].tolist()


def teacher_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    warm: bool = True,
    max_model_len: int = 256,
    **settings: Any,
) -> TinyTeacher:
    """Return a teacher around a model in memory, ready unless ``warm`` is false."""
    served = ServedTokenizer.of(tokenizer)
    engine = TransformersEngine(
        model,
        served.requests.table,
        name="tiny",
        revision="none",
        max_model_len=max_model_len,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    service = TeacherService(served, engine, TeacherSettings(model="tiny", name="math", **settings))
    if warm:
        # A warm-up runs an event loop; some tests create teachers inside a running one.
        thread = threading.Thread(target=service.warm_up)
        thread.start()
        thread.join()
    return TinyTeacher(model, served.requests, engine, service)


def teacher_of_family(family: str, *, warm: bool = True, **settings: Any) -> TinyTeacher:
    """Return a new teacher of one of ``FAMILIES``."""
    make_model, make_tokenizer = FAMILIES[family]
    tokenizer = make_tokenizer()
    return teacher_of(make_model(tokenizer), tokenizer, warm=warm, **settings)


def short_task(name: int, tokens: int = 10) -> ScoringTask:
    """Return a task of ``tokens`` tokens whose prompt and completion consist of ``name``."""
    return ScoringTask(np.full(tokens - 1, name, dtype=np.int32), np.array([name], dtype=np.int32))


async def request_async(
    app: FastAPI,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """Send one request; a body other than str or bytes is encoded as JSON."""
    content = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        return await client.request(method, path, content=content, headers=all_headers)


async def post_async(
    app: FastAPI, body: Any, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """Send a scoring request."""
    return await request_async(app, "POST", "/v1/logprobs", body, headers)


async def send_raw(
    app: Any,
    body: bytes,
    sent: asyncio.Event,
    disconnect: asyncio.Event,
    *,
    more_body: bool = False,
    key: str = "",
) -> None:
    """Send a scoring request (or a part), set ``sent``, and disconnect on ``disconnect``."""
    messages = [{"type": "http.request", "body": body, "more_body": more_body}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        sent.set()
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        """Ignore the response."""

    headers = [
        (b"content-type", b"application/json"),
        (b"authorization", f"Bearer {key}".encode()),
    ]
    scope = {"type": "http", "method": "POST", "path": "/v1/logprobs", "query_string": b""}
    await app({**scope, "raw_path": b"/v1/logprobs", "headers": headers}, receive, send)


def get(app: FastAPI, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Send a GET request."""
    return asyncio.run(request_async(app, "GET", path, headers=headers))


def post(app: FastAPI, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Send a scoring request, outside an event loop."""
    return asyncio.run(post_async(app, body, headers))


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem document of a response with this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM_MEDIA_TYPE
    document = response.json()
    assert (document["status"], document["code"]) == (status, code), response.text
    assert document["title"]
    return document


def scores_of(app: FastAPI, *sequences: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the scored sequences of a request that must succeed, as JSON."""
    response = post(app, {"sequences": list(sequences), **options})
    assert response.status_code == 200, response.text
    return response.json()["sequences"]
