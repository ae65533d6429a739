"""Routes of vLLM's and SGLang's servers that return the log-probabilities of prompts."""

import uuid
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from mopd_protocol.arrays import IntArray
from mopd_protocol.requests import LOSS_HEADER
from mopd_server.compatible.body import Body, parse_large
from mopd_server.compatible.completions_request import CompletionsRequest
from mopd_server.compatible.completions_response import encode_completions
from mopd_server.compatible.generate_request import GenerateRequest
from mopd_server.compatible.generate_response import encode_generate, require_start
from mopd_server.compatible.models import require_model
from mopd_server.compatible.prompt_scorer import (
    Prompts,
    PromptScorer,
    PromptScores,
    PromptsToScore,
    is_batch,
    is_large,
    prompts_of,
)
from mopd_server.compatible.translated_scorer import scorer_of
from mopd_server.http.body_parts import parse_with
from mopd_server.http.dependencies import Adapter, Life, Service
from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware.response_limit import JSON_ONLY
from mopd_server.http.parted_response import PartedResponse
from mopd_server.http.request_body import parsed_body
from mopd_server.http.request_record import current_record
from mopd_server.http.scoring_response import (
    Admit,
    RequestSize,
    encode_response,
    respond_within_limits,
)
from mopd_server.openapi import SCORING_PROBLEMS, json_body
from mopd_server.scoring.service import TeacherService

router = APIRouter()


@router.post(
    "/v1/completions",
    summary="Score prompts, as vLLM does",
    response_class=Response,
    responses=SCORING_PROBLEMS,
    openapi_extra=json_body(CompletionsRequest),
)
async def completions(request: Request, life: Life, service: Service, adapter: Adapter) -> Response:
    """Entry i of ``prompt_logprobs`` is the teacher's distribution that predicts token i."""
    service.require_ready()
    body = await _body(request, service, CompletionsRequest, "prompt")
    adapter = require_model(service, adapter, body.model)
    # verl's own client sends detokenize, and no header.
    sender = None if body.detokenize is None else "forward_kl_topk"
    loss = request.headers.get(LOSS_HEADER, sender)

    def encode(prompts: Sequence[IntArray], scores: PromptScores) -> bytearray:
        name, ids = service.manifests[adapter].service, bool(body.return_token_ids)
        return encode_completions(name, _request_id(), prompts, scores, token_ids=ids)

    return await _respond(
        request,
        life,
        service,
        scorer_of(service, adapter, "prompt", body.messages, loss),
        PromptsToScore(
            "prompt", body.prompt, "prompt_logprobs", body.prompt_logprobs, body.temperature or 1.0
        ),
        encode,
    )


@router.post(
    "/generate",
    summary="Score prompts, as SGLang does",
    response_class=Response,
    responses=SCORING_PROBLEMS,
    openapi_extra=json_body(GenerateRequest),
)
async def generate(request: Request, life: Life, service: Service, adapter: Adapter) -> Response:
    """``input_token_logprobs`` has the log-probability of every token of the prompt."""
    service.require_ready()
    body = await _body(request, service, GenerateRequest, "input_ids")
    adapter = require_model(service, adapter, body.lora_path, field="lora_path")
    loss = request.headers.get(LOSS_HEADER)
    field = "text" if body.input_ids is None else "input_ids"
    prompts: Prompts = body.text if body.input_ids is None else body.input_ids  # pyright: ignore[reportAssignmentType]

    def encode(ids: Sequence[IntArray], scores: PromptScores) -> bytearray:
        return encode_generate(
            body.rid or _request_id(),
            ids,
            scores,
            start=body.logprob_start_len,
            top_k=body.top_k,
            batch=is_batch(prompts),
        )

    return await _respond(
        request,
        life,
        service,
        scorer_of(service, adapter, field, body.messages, loss),
        PromptsToScore(field, prompts, "top_logprobs_num", max(body.top_k, 1), 1.0),
        encode,
        lambda ids: require_start(body.logprob_start_len, ids),
    )


async def _body(request: Request, service: TeacherService, model: type[Body], field: str) -> Body:
    """Return the body, whose ``field`` may be a long list."""
    return await parsed_body(
        request,
        service,
        model,
        partial(parse_with, model.model_validate_json),
        partial(parse_large, model, field),
    )


async def _respond(
    request: Request,
    life: Lifecycle,
    service: TeacherService,
    scorer: PromptScorer,
    settings: PromptsToScore,
    encode: Callable[[Sequence[IntArray], PromptScores], bytearray],
    validate: Callable[[Sequence[IntArray]], None] = lambda prompts: None,
) -> Response:
    """Score and encode within the limits of the scorer and of the service."""
    prompts = await service.run_in_thread(
        lambda: prompts_of(settings, scorer), large=is_large(settings.prompts)
    )
    validate(prompts)
    entries = settings.top_k + 1  # the realised token

    async def score(admit: Admit, key: str) -> PromptScores:
        def admit_tokens(prompt_tokens: int, completion_tokens: int) -> None:
            size = RequestSize(
                len(prompts),
                settings.top_k,
                prompt_tokens,
                completion_tokens,
                completion_tokens * entries,
            )
            admit(size)

        return await scorer.score(
            prompts,
            top_k=settings.top_k,
            temperature=settings.temperature,
            admit=admit_tokens,
            key=key,
        )

    async def respond(scores: PromptScores) -> Response:
        return await encode_response(
            service,
            lambda: PartedResponse(
                memoryview(encode(prompts, scores)), media_type="application/json"
            ),
            scores.timings,
            entries=sum(map(len, scores.topk)) * entries,
        )

    return await respond_within_limits(request, life, score, respond, JSON_ONLY)


def _request_id() -> str:
    record = current_record()
    return record.id if record else uuid.uuid4().hex
