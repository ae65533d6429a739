"""Parsing of a scoring request. Invalid bodies cost no more than reading them."""

from collections.abc import Callable
from email.message import Message as MimeHeader
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from mopd_protocol.requests import LogprobsRequest, body_hash
from mopd_server.http.body_parts import InvalidBodyError, parse, parse_in_parts
from mopd_server.http.problems import MalformedBodyError
from mopd_server.http.request_record import current_record
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import CLIENT_CLOSED_REQUEST, ServiceError

Body = TypeVar("Body")

#: Larger bodies are parsed on another thread, in parts: 64 KiB take 5 ms.
LARGE_BYTES = 64 * 1024


async def scoring_request(request: Request, service: TeacherService) -> LogprobsRequest:
    """Return the validated body of ``request``; large ones are parsed off the event loop.

    Raises:
        RequestValidationError: if the body is not a scoring request.
        ServiceError: 499 if the client disconnects before the end of the body.
    """
    return await parsed_body(request, service, LogprobsRequest, parse, parse_in_parts)


async def parsed_body(
    request: Request,
    service: TeacherService,
    model: type[BaseModel],
    parse_small: Callable[[bytes], Body],
    parse_large: Callable[[bytes], Body],
) -> Body:
    """Return the body parsed by one of two functions, ``parse_large`` off the event loop.

    Raises:
        MalformedBodyError: if the body is not JSON, or a function raises InvalidBodyError.
        ServiceError: 499 if the client disconnects before the end of the body.
    """
    if not _is_json(request.headers.get("content-type", "")):
        raise MalformedBodyError([{"type": "not_json", "loc": (), "input": None}], model)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except ClientDisconnect as error:
        raise ServiceError(
            CLIENT_CLOSED_REQUEST, "the client disconnected before the end of the body"
        ) from error

    def parse_large_body() -> Body:
        _record_hash(body)
        return parse_large(bytes(body))

    try:
        if len(body) > LARGE_BYTES:
            return await service.run_in_thread(parse_large_body, large=True)
        _record_hash(body)
        return parse_small(bytes(body))
    except InvalidBodyError as error:
        too_many = {"type": "too_many", "loc": (), "input": None, "ctx": {"found": error.count}}
        raise MalformedBodyError(error.errors or [too_many], model) from error


def _record_hash(body: bytes | bytearray) -> None:
    """Record the hash of the body, by which the client detects a request changed on its way."""
    if record := current_record():
        record.body_hash = body_hash(body)


def _is_json(content_type: str) -> bool:
    header = MimeHeader()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )
