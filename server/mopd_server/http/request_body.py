"""Parsing of a scoring request. Invalid bodies cost no more than reading them."""

from email.message import Message as MimeHeader

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect

from mopd_protocol.requests import LogprobsRequest, body_hash
from mopd_server.http.body_parts import InvalidBodyError, parse, parse_in_parts
from mopd_server.http.request_record import current_record
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import CLIENT_CLOSED_REQUEST, ServiceError

#: Larger bodies are parsed on another thread, in parts: 64 KiB take 5 ms.
LARGE_BYTES = 64 * 1024


async def scoring_request(request: Request, service: TeacherService) -> LogprobsRequest:
    """Return the validated body of ``request``; large ones are parsed off the event loop.

    Raises:
        RequestValidationError: if the body is not a scoring request.
        ServiceError: 499 if the client disconnects before the end of the body.
    """
    if not _is_json(request.headers.get("content-type", "")):
        raise RequestValidationError([{"type": "not_json", "loc": (), "input": None}])
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except ClientDisconnect as error:
        raise ServiceError(
            CLIENT_CLOSED_REQUEST, "the client disconnected before the end of the body"
        ) from error
    try:
        if len(body) > LARGE_BYTES:
            return await service.run_in_thread(lambda: _parse_large(bytes(body)), large=True)
        _record_hash(body)
        return parse(bytes(body))
    except InvalidBodyError as error:
        too_many = {"type": "too_many", "loc": (), "input": None, "ctx": {"found": error.count}}
        raise RequestValidationError(error.errors or [too_many]) from error


def _parse_large(body: bytes) -> LogprobsRequest:
    _record_hash(body)
    return parse_in_parts(body)


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
