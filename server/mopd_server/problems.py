"""Every error as an RFC 9457 problem document (``application/problem+json``)."""

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
from mopd_server.refusal import Refusal

PROBLEM_MEDIA_TYPE = "application/problem+json"

#: nginx's number for a client that closed the connection; the standard has none.
CLIENT_CLOSED_REQUEST = 499


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
    errors: list[FieldProblem] | None = None
    """Only for bodies that are not well-formed requests: one entry a field."""


def problem_response(
    status: int,
    detail: str,
    *,
    errors: Sequence[FieldProblem] | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The problem document for ``status``."""
    problem = Problem(
        title=_title(status), status=status, detail=detail, errors=list(errors) if errors else None
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status_code=status,
        headers=dict(headers) if headers else None,
        media_type=PROBLEM_MEDIA_TYPE,
    )


def refusal_response(refusal: Refusal) -> JSONResponse:
    """The problem document of a refusal, with ``Retry-After`` where it names a time."""
    seconds = refusal.retry_after_seconds
    headers = None if seconds is None else {"Retry-After": str(seconds)}
    return problem_response(refusal.http_status, str(refusal), headers=headers)


def install_problem_handlers(app: FastAPI) -> None:
    """Makes every error that leaves ``app`` a problem document."""
    app.add_exception_handler(Refusal, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_malformed_body)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return refusal_response(error)


async def _on_malformed_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [_field_problem(found) for found in error.errors()]
    sentences = [f"{p.field}: found {p.found}; expected {p.expected}" for p in problems]
    return problem_response(HTTPStatus.BAD_REQUEST, ". ".join(sentences), errors=problems)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        detail = f"there is no {request.url.path} here; /docs lists what there is"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        detail = f"{request.url.path} does not take {request.method}; expected {allowed}"
    return problem_response(error.status_code, detail, headers=error.headers)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # Logged by the server, to which starlette raises it again after this answer.
    return problem_response(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        f"the teacher failed with {type(error).__name__}; its log says more",
    )


def _title(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase


_MODELS: tuple[type[BaseModel], ...] = (LogprobsRequest, SequenceRequest, Message, ControlToken)
_FIELDS = frozenset(name for model in _MODELS for name in model.model_fields)


def _field_problem(error: Mapping[str, Any]) -> FieldProblem:
    location: tuple[int | str, ...] = tuple(error["loc"])
    if error["type"] == "json_invalid":
        return FieldProblem(
            field="body", found=f"invalid JSON ({error['ctx']['error']})", expected="JSON"
        )
    if location == ("body",) and isinstance(error["input"], bytes):
        return FieldProblem(
            field="body",
            found="another type of content",
            expected="JSON with the header Content-Type: application/json",
        )
    if error["type"] == "extra_forbidden":
        return FieldProblem(
            field=_path(location[:-1]),
            found=f"an unknown key {location[-1]!r}",
            expected=f"only {', '.join(_keys_beside(location))}",
        )
    if error["type"] == "missing":
        return FieldProblem(field=_path(location), found="nothing", expected="a value")
    if error["type"] == "value_error":  # our own validators already say found and expected
        found, _, expected = str(error["ctx"]["error"]).partition("; expected ")
        return FieldProblem(
            field=_path(location), found=found.removeprefix("found "), expected=expected
        )
    return FieldProblem(
        field=_path(location),
        found=reprlib.repr(error["input"]),
        expected=str(error["msg"]).removeprefix("Input should be "),
    )


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
