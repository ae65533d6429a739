"""The HTTP routes of a teacher. Each endpoint is a plain function; ``create_app`` joins them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from mopd_protocol.codec import BINARY_MEDIA_TYPE, encode_binary, encode_json
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_server.authentication import RequireApiKey
from mopd_server.body_limit import LimitBody
from mopd_server.client_watch import unless_client_leaves
from mopd_server.metrics import CountRequests
from mopd_server.problems import PROBLEM_MEDIA_TYPE, Problem, install_problem_handlers
from mopd_server.refusal import Refusal
from mopd_server.service import TeacherService
from mopd_server.settings import ListenSettings

router = APIRouter()


class TokenizerFiles(BaseModel):
    """Text files from which ``AutoTokenizer.from_pretrained`` makes the teacher's tokenizer."""

    files: dict[str, str]


class State(BaseModel):
    """Whether a service lives, or is ready."""

    status: str


def create_app(
    service: TeacherService,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = ListenSettings.max_body_bytes,
    request_timeout_seconds: float = ListenSettings.request_timeout_seconds,
) -> FastAPI:
    """The application for ``service``.

    Started as a server (with its lifespan), it warms the service up by itself. Called in process
    without lifespan (``httpx.ASGITransport``), call ``service.warm_up()`` first.
    """
    app = FastAPI(
        title=f"mopd teacher {service.manifest.service}",
        summary="Reads completions and answers with this teacher's next-token distributions.",
        lifespan=_lifespan,
    )
    app.state.service = service
    app.state.request_timeout_seconds = request_timeout_seconds
    app.include_router(router)
    install_problem_handlers(app)
    # The last one added is the first to see a request.
    app.add_middleware(LimitBody, max_bytes=max_body_bytes)
    if api_keys:
        app.add_middleware(RequireApiKey, api_keys=api_keys)
    app.add_middleware(CountRequests, metrics=service.metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    service: TeacherService = app.state.service
    warming_up = asyncio.create_task(asyncio.to_thread(service.warm_up))
    yield
    await warming_up
    service.close()


def service_of(request: Request) -> TeacherService:
    """The service behind a request."""
    return request.app.state.service


Service = Annotated[TeacherService, Depends(service_of)]


def _problems(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """How errors look, for the OpenAPI page."""
    return {
        int(status): {
            "description": status.phrase,
            "content": {PROBLEM_MEDIA_TYPE: {"example": _example(status)}},
        }
        for status in statuses
    }


def _example(status: HTTPStatus) -> dict[str, Any]:
    problem = Problem(title=status.phrase, status=status, detail="found this; expected that")
    return problem.model_dump(exclude_none=True)


@router.post(
    "/v1/logprobs",
    summary="Score completions",
    response_class=Response,
    responses={
        200: {
            "description": "One distribution per completion token, as JSON or as safetensors.",
            "content": {
                "application/json": {},
                BINARY_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        **_problems(
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.UNAUTHORIZED,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            HTTPStatus.SERVICE_UNAVAILABLE,
            HTTPStatus.GATEWAY_TIMEOUT,
        ),
    },
)
async def score_completions(body: LogprobsRequest, request: Request, service: Service) -> Response:
    """Row r of an answer is the teacher's distribution that predicts completion token r.

    With ``Accept: application/vnd.mopd.safetensors`` the answer is one binary body, else JSON.
    """
    seconds: float = request.app.state.request_timeout_seconds
    try:
        async with asyncio.timeout(seconds):
            response = await unless_client_leaves(request, service.score(body))
    except TimeoutError as error:
        raise Refusal(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"no answer within {seconds:g} s; send fewer or shorter sequences at once",
        ) from error
    started = time.monotonic()
    encode = _as_binary if BINARY_MEDIA_TYPE in request.headers.get("accept", "") else _as_json
    answer = await asyncio.to_thread(encode, response, body.logprobs_dtype)
    service.metrics.phase_seconds.labels("encode").observe(time.monotonic() - started)
    return answer


@router.get("/v1/manifest", summary="Who this teacher is")
async def manifest(service: Service) -> Manifest:
    """Model, precision, vocabulary, limits, and a hash of all that affects scores."""
    return service.manifest


@router.get("/v1/tokenizer", summary="The tokenizer's files")
async def tokenizer(service: Service) -> TokenizerFiles:
    """What the student's side needs to know this teacher's tokens, without the hub."""
    return TokenizerFiles(files=dict(service.tokenizer_files))


@router.get("/healthz", summary="Whether the process should live")
async def health(service: Service) -> State:
    """200 unless the warm-up has failed for good."""
    if service.failure:
        service.require_ready()
    return State(status="alive")


@router.get("/readyz", summary="Whether requests are welcome")
async def readiness(service: Service) -> State:
    """503 until a warm-up scoring has passed."""
    service.require_ready()
    return State(status="ready")


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(service: Service) -> Response:
    """Requests, tokens, time by phase and the queue's length."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _as_binary(response: LogprobsResponse, dtype: LogprobsDtype) -> Response:
    return Response(encode_binary(response, dtype), media_type=BINARY_MEDIA_TYPE)


def _as_json(response: LogprobsResponse, dtype: LogprobsDtype) -> Response:
    """JSON writes whole numbers: ``dtype`` is a matter of the binary wire."""
    return JSONResponse(encode_json(response))
