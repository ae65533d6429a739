"""Real tiny teachers in process, and a plain way to ask them over HTTP."""

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mopd_server.app import create_app
from mopd_server.engines.transformers import TransformersEngine
from mopd_server.scoring.service import TeacherService
from mopd_server.scoring.tokenization import RequestTokenizer
from mopd_server.settings import TeacherSettings
from tests import tiny_models

FAMILIES = {
    "qwen": (tiny_models.qwen, tiny_models.digit_tokenizer),
    "llama": (tiny_models.llama, tiny_models.sentencepiece_tokenizer),
    "gpt_neox": (tiny_models.gpt_neox, tiny_models.whole_number_tokenizer),
}

#: Small, so that ordinary test batches are split over several forward passes.
MAX_BATCH_TOKENS = 64


@dataclass(frozen=True)
class TinyTeacher:
    """A loaded teacher and its parts, for tests that look behind the HTTP."""

    model: PreTrainedModel
    tokenizer: RequestTokenizer
    engine: TransformersEngine
    service: TeacherService

    @property
    def app(self) -> FastAPI:
        """An application around the service, which is ready."""
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
    **settings: Any,
) -> TinyTeacher:
    """A teacher around a model in memory, ready unless ``warm`` is false."""
    teacher_tokenizer = RequestTokenizer(tokenizer)
    engine = TransformersEngine(
        model,
        teacher_tokenizer.table,
        name="tiny",
        revision="none",
        max_model_len=256,
        max_batch_tokens=MAX_BATCH_TOKENS,
    )
    service = TeacherService(
        teacher_tokenizer, engine, TeacherSettings(model="tiny", name="math", **settings)
    )
    if warm:
        # Runs an event loop of its own; some tests make teachers inside theirs.
        thread = threading.Thread(target=service.warm_up)
        thread.start()
        thread.join()
    return TinyTeacher(model, teacher_tokenizer, engine, service)


def teacher_of_family(family: str, *, warm: bool = True, **settings: Any) -> TinyTeacher:
    """A teacher of one of ``FAMILIES``."""
    make_model, make_tokenizer = FAMILIES[family]
    tokenizer = make_tokenizer()
    return teacher_of(make_model(tokenizer), tokenizer, warm=warm, **settings)


async def request_async(
    app: FastAPI,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> httpx.Response:
    """One request; a body that is no string or bytes is sent as JSON."""
    content = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
    sent = {"Content-Type": "application/json", **(headers or {})}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher") as client:
        return await client.request(method, path, content=content, headers=sent)


def get(app: FastAPI, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """The answer to a GET."""
    return asyncio.run(request_async(app, "GET", path, headers=headers))


def post(app: FastAPI, body: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """The answer to a scoring request."""
    return asyncio.run(request_async(app, "POST", "/v1/logprobs", body, headers))


def scores_of(app: FastAPI, *sequences: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The scored sequences of a request that must be answered, as JSON."""
    answer = post(app, {"sequences": list(sequences), **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["sequences"]
