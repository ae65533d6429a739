"""Parts of the OpenAPI page unknown to FastAPI: the body is parsed without its models."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from mopd_server.http.problems import PROBLEM_MEDIA_TYPE, Problem

_REFERENCE = "#/components/schemas/{model}"


class ScoredSequence(BaseModel):
    """One scored completion; every row is a completion token, in order."""

    model_config = ConfigDict(extra="forbid")

    id: str | None
    text: str
    text_base64: str | None = None
    """The bytes, if they are not valid UTF-8."""
    token_ids: list[int]
    byte_ends: list[int]
    marks: list[tuple[int, str]]
    topk_ids: list[list[int]]
    topk_logprobs: list[list[float | None]]
    """Nats; ``null`` is minus infinity."""
    token_logprobs: list[float | None]
    tail_logprobs: list[float | None]


class Scores(BaseModel):
    """The JSON form of a response."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int
    manifest_id: str
    checksum: str
    """Over everything but the timings, as in the binary form."""
    sequences: list[ScoredSequence]
    timings: dict[str, float]
    """Seconds by phase."""


def reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a reference to the schema of a model on the page."""
    return {"$ref": _REFERENCE.format(model=model.__name__)}


def install_openapi(app: FastAPI) -> None:
    """Add the schemas of the request, the response and the problem document to the page."""
    generate = app.openapi

    def with_schemas() -> dict[str, Any]:
        page = generate()
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        for model in (*DOCUMENTED_BODIES.values(), Scores, Problem):
            schema = model.model_json_schema(ref_template=_REFERENCE)
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        return page

    app.openapi = with_schemas


#: Models of the bodies of routes, by name.
DOCUMENTED_BODIES: dict[str, type[BaseModel]] = {}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the part of the page about a route's body, whose schema is added to the page."""
    DOCUMENTED_BODIES[model.__name__] = model
    content = {"application/json": {"schema": reference(model)}}
    return {"requestBody": {"required": True, "content": content}}


PROBLEM_CONTENT: dict[str, Any] = {PROBLEM_MEDIA_TYPE: {"schema": reference(Problem)}}


def problem_responses(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a route for the OpenAPI page."""
    return {
        int(status): {"description": status.phrase, "content": PROBLEM_CONTENT}
        for status in statuses
    }


#: Error responses of routes that score.
SCORING_PROBLEMS = problem_responses(
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
