"""Parsing of a scoring request. Invalid bodies cost no more than reading them."""

from email.message import Message as MimeHeader

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from mopd_protocol.requests import LogprobsRequest
from mopd_server.service_error import CLIENT_CLOSED_REQUEST, ServiceError

#: Above this number of errors (a body of unknown keys) only the number is reported: a list of
#: millions would exhaust the memory.
_MAX_ERRORS = 1000


async def scoring_request(request: Request) -> LogprobsRequest:
    """Return the validated body of ``request``.

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
        return LogprobsRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        count = error.error_count()
        if count > _MAX_ERRORS:
            errors = [{"type": "too_many", "loc": (), "input": None, "ctx": {"found": count}}]
        else:
            errors = error.errors(include_url=False)
        raise RequestValidationError(errors) from error


def _is_json(content_type: str) -> bool:
    header = MimeHeader()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )
