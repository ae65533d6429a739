"""HTTP routes of a teacher, joined by ``create_app``."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from mopd_protocol.codec import BINARY_MEDIA_TYPE, encode_binary_buffer, encode_json
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_server.compatible.routes import router as compatible_router
from mopd_server.http.dependencies import Adapter, Life, Service, lifecycle_of
from mopd_server.http.documentation import documentation_page
from mopd_server.http.lifecycle import Lifecycle, LifecycleMiddleware
from mopd_server.http.middleware.adapter_path import AdapterPathMiddleware
from mopd_server.http.middleware.authentication import ApiKeyMiddleware, ApiKeys
from mopd_server.http.middleware.body_limit import BodyLimitMiddleware
from mopd_server.http.middleware.observation import ObservationMiddleware
from mopd_server.http.middleware.quotas import KeyQuota, Quotas
from mopd_server.http.middleware.response_limit import BINARY, JSON, ResponseLimit
from mopd_server.http.parted_response import PartedResponse
from mopd_server.http.problems import install_problem_handlers
from mopd_server.http.request_body import scoring_request
from mopd_server.http.scoring_response import (
    Admit,
    RequestSize,
    encode_response,
    respond_within_limits,
)
from mopd_server.openapi import (
    SCORING_PROBLEMS,
    Scores,
    install_openapi,
    json_body,
    problem_responses,
    reference,
)
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import ListenSettings

router = APIRouter()


class TokenizerFiles(BaseModel):
    """Text files for ``AutoTokenizer.from_pretrained``."""

    files: dict[str, str]


class ModelCard(BaseModel):
    """A teacher in an OpenAI list of models."""

    id: str
    object: str = "model"
    owned_by: str = "mopd"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """An OpenAI list of models."""

    object: str = "list"
    data: list[ModelCard]


class State(BaseModel):
    """Health or readiness of a service."""

    status: str


def create_app(
    teacher: TeacherService | Lifecycle,
    *,
    api_keys: Sequence[str] | ApiKeys = (),
    quota: KeyQuota | None = None,
    max_body_bytes: int = ListenSettings.max_body_bytes,
    body_timeout_seconds: float = ListenSettings.body_timeout_seconds,
    request_timeout_seconds: float = ListenSettings.request_timeout_seconds,
) -> FastAPI:
    """Create the application of a loaded teacher, or of one that is still loading (``Lifecycle``).

    With its lifespan, the application warms up and closes a loaded service. Without (in process,
    ``httpx.ASGITransport``), call ``service.warm_up()`` first. The owner of a ``Lifecycle`` does
    both.
    """
    lifecycle = teacher if isinstance(teacher, Lifecycle) else Lifecycle(teacher)
    keys = api_keys if isinstance(api_keys, ApiKeys) else ApiKeys(api_keys)
    quotas = Quotas(quota or KeyQuota())
    app = FastAPI(
        # Without the name and model of the teacher: this page needs no key.
        title="mopd teacher",
        summary="Scores completions with this teacher's next-token distributions.",
        lifespan=_lifespan if isinstance(teacher, TeacherService) else None,
        docs_url=None,  # FastAPI's pages need the internet
        redoc_url=None,
        redirect_slashes=False,  # most clients do not repeat the body of a redirected POST
    )
    app.state.lifecycle = lifecycle
    app.state.quotas = quotas
    app.state.response_limit = ResponseLimit()
    app.state.request_timeout_seconds = request_timeout_seconds
    app.include_router(router)
    app.include_router(compatible_router)
    install_problem_handlers(app)
    install_openapi(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_bytes=max_body_bytes, seconds=body_timeout_seconds)
    app.add_middleware(LifecycleMiddleware, lifecycle=lifecycle)
    if keys.required:
        app.add_middleware(ApiKeyMiddleware, api_keys=keys, quotas=quotas)
    app.add_middleware(ObservationMiddleware, lifecycle=lifecycle)
    app.add_middleware(AdapterPathMiddleware)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None]:
    service = lifecycle_of(app).require_loaded()
    warming_up = asyncio.create_task(asyncio.to_thread(service.warm_up))
    yield
    await warming_up
    service.close()


@router.post(
    "/v1/logprobs",
    summary="Score completions",
    response_class=Response,
    responses={
        200: {
            "description": "One distribution per completion token, as JSON or as safetensors.",
            "content": {
                "application/json": {"schema": reference(Scores)},
                BINARY_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}},
            },
        },
        **SCORING_PROBLEMS,
    },
    openapi_extra=json_body(LogprobsRequest),
)
async def score_completions(
    request: Request, life: Life, service: Service, adapter: Adapter
) -> Response:
    """Row r of a response is the teacher's distribution that predicts completion token r.

    With ``Accept: application/vnd.mopd.safetensors`` the response is binary, else JSON.
    """
    service.require_ready()
    body = await scoring_request(request, service)
    binary = BINARY_MEDIA_TYPE in request.headers.get("accept", "")

    async def score(admit: Admit, key: str) -> LogprobsResponse:
        candidates = (len(row) for item in body.sequences for row in item.candidate_ids or ())
        width = max(body.top_k, max(candidates, default=0))

        def admit_tokens(prompt_tokens: int, completion_tokens: int) -> None:
            entries, sequences = completion_tokens * width, len(body.sequences)
            admit(RequestSize(sequences, body.top_k, prompt_tokens, completion_tokens, entries))

        return await service.score(body, adapter=adapter, admit=admit_tokens, key=key)

    return await respond_within_limits(
        request,
        life,
        score,
        lambda response: _encode(service, response, body.logprobs_dtype, binary=binary),
        BINARY if binary else JSON,
    )


async def _encode(
    service: TeacherService, response: LogprobsResponse, dtype: LogprobsDtype, *, binary: bool
) -> Response:
    return await encode_response(
        service,
        lambda: _as_binary(response, dtype) if binary else _as_json(response),
        response.timings,
        entries=sum(score.topk.ids.size for score in response.scores),
    )


@router.get("/v1/manifest", summary="Identity of the teacher")
async def manifest(service: Service, adapter: Adapter) -> Manifest:
    """Model, precision, vocabulary, limits, and a hash of everything that affects scores."""
    return service.manifests[adapter]


@router.get("/v1/tokenizer", summary="Files of the tokenizer")
async def tokenizer(service: Service) -> TokenizerFiles:
    """Everything that a client needs to load this teacher's tokenizer without the hub."""
    return TokenizerFiles(files=dict(service.tokenizer_files))


@router.get("/v1/models", summary="Name of the teacher, as in an OpenAI list of models")
async def models(service: Service, adapter: Adapter) -> ModelList:
    """The teacher's name, its model and the maximum length; then those of its adapters.

    Below the path of an adapter, only the adapter: many clients use the first one.
    """
    addressed = None if adapter is None else {adapter: service.manifests[adapter]}
    return ModelList(
        data=[
            ModelCard(id=each.service, root=each.model, max_model_len=each.max_model_len)
            for each in (addressed or service.manifests).values()
        ]
    )


@router.head("/health", include_in_schema=False)
@router.get("/health", include_in_schema=False)
async def started(life: Life) -> State:
    """503 as ``/healthz``, and until the warm-up: other servers open their port only after it."""
    life.require_started()
    return State(status="alive")


@router.head("/healthz", include_in_schema=False)
@router.get(
    "/healthz",
    summary="Liveness probe",
    responses=problem_responses(HTTPStatus.SERVICE_UNAVAILABLE),
)
async def health(life: Life) -> State:
    """503 after a permanent failure or a long hang of the engine; 200 while the model loads."""
    life.require_alive()
    return State(status="alive")


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    summary="Readiness probe",
    responses=problem_responses(HTTPStatus.SERVICE_UNAVAILABLE),
)
async def readiness(life: Life) -> State:
    """503 before the warm-up has succeeded, and while the teacher is shutting down."""
    life.require_ready()
    return State(status="ready")


@router.get("/docs", include_in_schema=False)
async def documentation(request: Request) -> HTMLResponse:
    """Routes and schemas, from the OpenAPI document."""
    return HTMLResponse(documentation_page(request.app.openapi()))


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(life: Life) -> Response:
    """Requests, errors, tokens, time by phase, length of the queue, memory of the process."""
    parts = [life.metrics.exposition()]
    if life.service is not None:
        parts.append(life.service.metrics.exposition())
    return Response(b"".join(parts), media_type=CONTENT_TYPE_LATEST)


def _as_binary(response: LogprobsResponse, dtype: LogprobsDtype) -> Response:
    return PartedResponse(encode_binary_buffer(response, dtype), media_type=BINARY_MEDIA_TYPE)


def _as_json(response: LogprobsResponse) -> Response:
    return PartedResponse(encode_json(response), media_type="application/json")
