"""Errors as RFC 9457 problem documents (``application/problem+json``)."""

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mopd_protocol.messages import FunctionCall, Message, ToolCall
from mopd_protocol.requests import ControlToken, LogprobsRequest, SequenceRequest
from mopd_server.http.request_record import current_record
from mopd_server.service_error import CLIENT_CLOSED_REQUEST, ServiceError, default_code

PROBLEM_MEDIA_TYPE = "application/problem+json"

#: Limits of quoted input, which may have megabytes.
_MAX_DETAIL = 2000
_MAX_QUOTE = 200
_MAX_FIELDS = 10

_PATH = re.compile(r"(?<![\w.)])(?:~|[A-Za-z]:)?[/\\][^\s'\"<>|,;]+")

#: Messages of the protocol's own validators.
_FOUND_EXPECTED = re.compile(r"\(?found (.*?)[,;] expected (.*?)\)?\.?", re.DOTALL)


class FieldProblem(BaseModel):
    """An invalid field of a request's body."""

    field: str
    found: str
    expected: str


class MalformedBodyError(RequestValidationError):
    """The body of a request does not have the form of ``model``."""

    def __init__(self, errors: Sequence[Any], model: type[BaseModel] = LogprobsRequest) -> None:
        super().__init__(errors)
        self.model = model


class Problem(BaseModel):
    """An error response; ``detail`` is its message."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    """Stable name of the error: ``queue_full``, ``warming_up``, ``malformed``."""
    detail: str
    message: str
    """The detail again, for the exceptions of the ``openai`` client."""
    instance: str | None = None
    """Id of the request, as in the header X-Request-Id and in the teacher's log."""
    errors: list[FieldProblem] | None = None
    """Only for malformed bodies: one entry per field."""


def problem_response(
    status: int,
    detail: str,
    *,
    code: str | None = None,
    errors: Sequence[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the problem document of ``status``; metrics and log get its code."""
    code = code or default_code(status)
    record = current_record()
    if record is not None:
        record.reason = code
    problem = Problem(
        title=_title(status),
        status=status,
        code=code,
        detail=_shorten(detail, _MAX_DETAIL),
        message=_shorten(detail, _MAX_DETAIL),
        instance=record.id if record else None,
        errors=list(errors) if errors else None,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=status,
        headers=dict(headers) if headers else None,
        media_type=PROBLEM_MEDIA_TYPE,
    )


def error_response(error: ServiceError) -> JSONResponse:
    """Return the problem document of an error, with ``Retry-After`` if it has a time."""
    seconds = error.retry_after_seconds
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    detail = str(error)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        detail = _without_paths(detail)
    return problem_response(error.status, detail, code=error.code, headers=headers)


def install_problem_handlers(app: FastAPI) -> None:
    """Respond with a problem document to every error of a route of ``app``."""
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(RequestValidationError, _on_malformed_body)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return error_response(error)


async def _on_malformed_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    model = error.model if isinstance(error, MalformedBodyError) else LogprobsRequest
    problems = [_field_problem(details, model) for details in error.errors()[:_MAX_FIELDS]]
    # The branches of a union may expect the same.
    messages = {f"{p.field}: found {p.found}, expected {p.expected}": p for p in problems}
    errors = list(messages.values())
    return problem_response(HTTPStatus.BAD_REQUEST, ". ".join(messages), errors=errors)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail, path = error.detail, _shorten(request.url.path, _MAX_QUOTE)
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"{path}: not found. See /docs."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{path}: method not allowed (found {request.method}, expected {allowed})"
    return problem_response(error.status_code, detail, headers=error.headers)


def _title(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase


_MODELS: tuple[type[BaseModel], ...] = (
    LogprobsRequest,
    SequenceRequest,
    Message,
    ToolCall,
    FunctionCall,
    ControlToken,
)
_FIELDS = frozenset(name for model in _MODELS for name in model.model_fields)


def _field_problem(error: Mapping[str, Any], model: type[BaseModel]) -> FieldProblem:
    location: tuple[int | str, ...] = tuple(error["loc"])
    value, expected = _found_and_expected(location, error, model)
    inner = location[:-1] if error["type"] == "extra_forbidden" else location
    return FieldProblem(
        field=_path(inner, _FIELDS | set(_fields_of(model))),
        found=_shorten(value, _MAX_QUOTE),
        expected=_shorten(expected, _MAX_QUOTE),
    )


def _found_and_expected(
    location: tuple[int | str, ...], error: Mapping[str, Any], model: type[BaseModel]
) -> tuple[str, str]:
    context: Mapping[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "json_invalid":
            return f"invalid JSON ({context['error']})", "JSON"
        case "not_json":
            return "another content type", "JSON with the header Content-Type: application/json"
        case "too_many":
            return f"{context['found']} errors", "a scoring request as documented at /docs"
        case "extra_forbidden":
            return (
                f"the unknown key {location[-1]!r}",
                f"only {', '.join(_known_keys(location, model))}",
            )
        case "too_long":  # not quoted
            limit = context["max_length"]
            return f"more than {limit}", f"at most {limit}. Split the request"
        case "missing":
            field = model.model_fields.get(str(location[-1]))
            return "nothing", (field and field.description) or "a value"
        case "value_error":
            if message := _FOUND_EXPECTED.fullmatch(str(context["error"])):
                return message[1], message[2]
        case _:
            pass
    return reprlib.repr(error["input"]), str(error["msg"]).removeprefix("Input should be ")


def _without_paths(detail: str) -> str:
    """Return the first line with file paths replaced: engine errors may contain private paths."""
    return _PATH.sub("(a path)", (detail.splitlines() or [""])[0])


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _fields_of(model: type[BaseModel]) -> Iterator[str]:
    """Yield the names of a model's fields, and of the fields of models in them."""
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields_of(field.annotation)


def _known_keys(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Return the valid keys of the object with an unknown key."""
    if "messages" in location:
        inside = {"function": FunctionCall, "tool_calls": ToolCall}
        return list(next((inside[n] for n in inside if n in location), Message).model_fields)
    if model is LogprobsRequest:
        if "completion" in location:
            return list(ControlToken.model_fields)
        return list((SequenceRequest if "sequences" in location else model).model_fields)
    for step in location[:-1]:
        inner = model.model_fields[str(step)].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return list(model.model_fields)


def _path(location: Sequence[int | str], fields: Set[str]) -> str:
    """Return ``sequences[0].completion``, without pydantic's names of the branches of a union."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in fields:
            path += f".{step}" if path else step
    return path or "body"
