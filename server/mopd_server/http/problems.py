"""Every error as an RFC 9457 problem document (``application/problem+json``)."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mopd_protocol.requests import ControlToken, LogprobsRequest, SequenceRequest
from mopd_protocol.samples import Message
from mopd_server.http.request_record import current_record
from mopd_server.service_error import ServiceError

PROBLEM_MEDIA_TYPE = "application/problem+json"

#: nginx's number for a client that closed the connection; the standard has none.
CLIENT_CLOSED_REQUEST = 499

#: A problem quotes what it found, and what it found may be a megabyte.
_LONGEST_DETAIL = 2000
_LONGEST_QUOTE = 200
_MOST_FIELDS = 10

_PATH = re.compile(r"(?<![\w.)])(?:~|[A-Za-z]:)?[/\\][^\s'\"<>|,;]+")


class FieldProblem(BaseModel):
    """What is wrong with one field of a request's body."""

    field: str
    found: str
    expected: str


class Problem(BaseModel):
    """An error, told in one sentence (``detail``)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str | None = None
    """Id of the request, as in the answer's header X-Request-Id and in the teacher's log."""
    errors: list[FieldProblem] | None = None
    """Only for bodies that are not well-formed requests: one entry a field."""


def problem_response(
    status: int,
    detail: str,
    *,
    errors: Sequence[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
    reason: str | None = None,
) -> JSONResponse:
    """The problem document for ``status``; ``reason`` is how the refusal is counted."""
    record = current_record()
    if record is not None:
        record.reason = reason
    problem = Problem(
        title=_title(status),
        status=status,
        detail=_shortened(detail, _LONGEST_DETAIL),
        instance=record.id if record else None,
        errors=list(errors) if errors else None,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=status,
        headers=dict(headers) if headers else None,
        media_type=PROBLEM_MEDIA_TYPE,
    )


def refusal_response(refusal: ServiceError) -> JSONResponse:
    """The problem document of a refusal, with ``Retry-After`` where it names a time."""
    seconds = refusal.retry_after_seconds
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    detail = str(refusal)
    if refusal.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        detail = _without_paths(detail)
    return problem_response(refusal.http_status, detail, headers=headers, reason=refusal.reason)


def install_problem_handlers(app: FastAPI) -> None:
    """Makes every error that leaves a route of ``app`` a problem document."""
    app.add_exception_handler(ServiceError, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_malformed_body)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return refusal_response(error)


async def _on_malformed_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [_field_problem(found) for found in error.errors()[:_MOST_FIELDS]]
    sentences = [f"{p.field}: found {p.found}; expected {p.expected}" for p in problems]
    return problem_response(HTTPStatus.BAD_REQUEST, ". ".join(sentences), errors=problems)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is no {_quoted(request)} here; /docs lists what there is"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{_quoted(request)} does not take {request.method}; expected {allowed}"
    return problem_response(error.status_code, detail, headers=error.headers)


def _title(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase


_MODELS: tuple[type[BaseModel], ...] = (LogprobsRequest, SequenceRequest, Message, ControlToken)
_FIELDS = frozenset(name for model in _MODELS for name in model.model_fields)


def _field_problem(error: Mapping[str, Any]) -> FieldProblem:
    location: tuple[int | str, ...] = tuple(error["loc"])
    found, expected = _found_and_expected(location, error)
    field = _path(location[:-1] if error["type"] == "extra_forbidden" else location)
    return FieldProblem(
        field=field,
        found=_shortened(found, _LONGEST_QUOTE),
        expected=_shortened(expected, _LONGEST_QUOTE),
    )


def _found_and_expected(
    location: tuple[int | str, ...], error: Mapping[str, Any]
) -> tuple[str, str]:
    context: Mapping[str, Any] = error.get("ctx", {})
    if error["type"] == "json_invalid":
        return f"invalid JSON ({context['error']})", "JSON"
    if error["type"] == "not_json":
        return "another type of content", "JSON with the header Content-Type: application/json"
    if error["type"] == "too_many":
        return f"{context['found']} mistakes", "a scoring request as /docs explains it"
    if error["type"] == "extra_forbidden":
        return f"an unknown key {location[-1]!r}", f"only {', '.join(_keys_beside(location))}"
    if error["type"] == "too_long":  # not quoted: it is long
        most = context["max_length"]
        return f"more than {most}", f"at most {most}; send fewer at once"
    if error["type"] == "missing":
        return "nothing", "a value"
    if error["type"] == "value_error":  # our own validators already say found and expected
        found, _, expected = str(context["error"]).partition("; expected ")
        return found.removeprefix("found "), expected
    return reprlib.repr(error["input"]), str(error["msg"]).removeprefix("Input should be ")


def _without_paths(detail: str) -> str:
    """The first line, without what names a file: an engine's failure may tell where it lives."""
    return _PATH.sub("(a path)", (detail.splitlines() or [""])[0])


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _quoted(request: Request) -> str:
    return _shortened(request.url.path, _LONGEST_QUOTE)


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """The keys that are known where an unknown one was found."""
    if "messages" in location:
        return list(Message.model_fields)
    if "completion" in location:
        return list(ControlToken.model_fields)
    return list((SequenceRequest if "sequences" in location else LogprobsRequest).model_fields)


def _path(location: Sequence[int | str]) -> str:
    """``sequences[0].completion``; pydantic's names for the branches of a union are left out."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in _FIELDS:
            path += f".{step}" if path else step
    return path or "body"
