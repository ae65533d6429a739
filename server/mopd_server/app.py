"""HTTP routes of a teacher, joined by ``create_app``."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from mopd_protocol.codec import BINARY_MEDIA_TYPE, encode_binary_buffer, encode_json
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import LogprobsDtype, LogprobsRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_server.http.documentation import documentation_page
from mopd_server.http.lifecycle import Lifecycle, LifecycleMiddleware
from mopd_server.http.middleware.adapter_path import AdapterPathMiddleware, adapter_of
from mopd_server.http.middleware.authentication import ApiKeyMiddleware, ApiKeys
from mopd_server.http.middleware.body_limit import BodyLimitMiddleware
from mopd_server.http.middleware.disconnects import cancel_on_disconnect
from mopd_server.http.middleware.observation import ObservationMiddleware
from mopd_server.http.middleware.quotas import KeyQuota, Quotas
from mopd_server.http.middleware.response_limit import ResponseLimit
from mopd_server.http.parted_response import PartedResponse
from mopd_server.http.problems import install_problem_handlers
from mopd_server.http.request_body import scoring_request
from mopd_server.http.request_record import current_record
from mopd_server.openapi import PROBLEM_CONTENT, REQUEST_BODY, Scores, install_openapi, reference
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError
from mopd_server.settings import ListenSettings

router = APIRouter()

#: Entries (id and logprob) above which responses are encoded one at a time: half a MiB in binary.
LARGE_RESPONSE_ENTRIES = 64 * 1024


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


def lifecycle_of(app: FastAPI) -> Lifecycle:
    """Return the state of the teacher behind ``app``."""
    return app.state.lifecycle


# Coroutines: FastAPI calls other functions in a thread.


async def _lifecycle(request: Request) -> Lifecycle:
    return lifecycle_of(request.app)


async def _service(request: Request) -> TeacherService:
    return lifecycle_of(request.app).require_loaded()


async def _adapter(request: Request) -> str | None:
    service = lifecycle_of(request.app).require_loaded()
    name, known = adapter_of(request.scope), service.manifests
    if name not in known:
        names = ", ".join(str(each) for each in known if each) or "none"
        raise ServiceError(
            HTTPStatus.NOT_FOUND, f"adapter not found (found {name!r}, expected one of {names})"
        )
    return name


Service = Annotated[TeacherService, Depends(_service)]
Adapter = Annotated[str | None, Depends(_adapter)]
Life = Annotated[Lifecycle, Depends(_lifecycle)]


def _problems(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for the OpenAPI page."""
    return {
        int(status): {"description": status.phrase, "content": PROBLEM_CONTENT}
        for status in statuses
    }


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
        **_problems(
            HTTPStatus.BAD_REQUEST,
            HTTPStatus.UNAUTHORIZED,
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            HTTPStatus.UNPROCESSABLE_ENTITY,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.INTERNAL_SERVER_ERROR,
            HTTPStatus.SERVICE_UNAVAILABLE,
            HTTPStatus.GATEWAY_TIMEOUT,
        ),
    },
    openapi_extra=REQUEST_BODY,
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
    state = request.app.state
    try:
        with (
            state.response_limit.reservation(binary=binary) as reserve,
            life.abort_signal() as abort,
        ):
            async with asyncio.timeout(state.request_timeout_seconds):
                scoring = _score(service, adapter, body, state.quotas, reserve)
                response = await cancel_on_disconnect(request, scoring, abort)
            return await _encode(service, response, body.logprobs_dtype, binary=binary)
    except TimeoutError as error:
        raise ServiceError(
            HTTPStatus.GATEWAY_TIMEOUT,
            f"no response within {state.request_timeout_seconds:g} s. Send fewer or shorter "
            "sequences per request.",
        ) from error


async def _score(
    service: TeacherService,
    adapter: str | None,
    body: LogprobsRequest,
    quotas: Quotas,
    reserve: Callable[[int], None],
) -> LogprobsResponse:
    """Score within the quota of the API key and the memory limit of responses."""
    record = current_record()

    def admit(prompt_tokens: int, completion_tokens: int) -> None:
        candidates = (len(row) for item in body.sequences for row in item.candidate_ids or ())
        reserve(completion_tokens * max(body.top_k, max(candidates, default=0)))
        if record is not None:
            if record.key_name is not None:
                quotas.charge(record.key_name, prompt_tokens + completion_tokens)
            record.sequences, record.top_k = len(body.sequences), body.top_k
            record.prompt_tokens, record.completion_tokens = prompt_tokens, completion_tokens

    try:
        key = record.key_name if record is not None else None
        return await service.score(body, adapter=adapter, admit=admit, key=key or "")
    except BaseException:  # a client that disconnects or times out cancels this task
        if record is not None and record.key_name is not None:
            quotas.refund(record.key_name, record.prompt_tokens + record.completion_tokens)
        raise


async def _encode(
    service: TeacherService, response: LogprobsResponse, dtype: LogprobsDtype, *, binary: bool
) -> Response:
    started = time.monotonic()
    entries = sum(score.topk.ids.size for score in response.scores)
    encoded = await service.run_in_thread(
        lambda: _as_binary(response, dtype) if binary else _as_json(response),
        large=entries > LARGE_RESPONSE_ENTRIES,
    )
    seconds = time.monotonic() - started
    service.metrics.phase_seconds.labels("encode").observe(seconds)
    if record := current_record():
        record.phase_seconds = {**response.timings, "encode": seconds}
    return encoded


@router.get("/v1/manifest", summary="Identity of the teacher")
async def manifest(service: Service, adapter: Adapter) -> Manifest:
    """Model, precision, vocabulary, limits, and a hash of everything that affects scores."""
    return service.manifests[adapter]


@router.get("/v1/tokenizer", summary="Files of the tokenizer")
async def tokenizer(service: Service) -> TokenizerFiles:
    """Everything that a client needs to load this teacher's tokenizer without the hub."""
    return TokenizerFiles(files=dict(service.tokenizer_files))


@router.get("/v1/models", summary="Name of the teacher, as in an OpenAI list of models")
async def models(service: Service) -> ModelList:
    """The teacher's name, its model and the maximum length; then those of its adapters."""
    return ModelList(
        data=[
            ModelCard(id=each.service, root=each.model, max_model_len=each.max_model_len)
            for each in service.manifests.values()
        ]
    )


@router.head("/health", include_in_schema=False)
@router.get("/health", include_in_schema=False)  # the name in other servers
@router.head("/healthz", include_in_schema=False)
@router.get(
    "/healthz",
    summary="Liveness probe",
    responses=_problems(HTTPStatus.SERVICE_UNAVAILABLE),
)
async def health(life: Life) -> State:
    """503 after a permanent failure or a long hang of the engine; 200 while the model loads."""
    life.require_alive()
    return State(status="alive")


@router.head("/readyz", include_in_schema=False)
@router.get(
    "/readyz",
    summary="Readiness probe",
    responses=_problems(HTTPStatus.SERVICE_UNAVAILABLE),
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
