"""Reads a scoring request from a body. What is wrong with it costs no more to find than to read."""

from email.message import Message as MimeHeader

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from mopd_protocol.requests import LogprobsRequest
from mopd_server.http.problems import CLIENT_CLOSED_REQUEST
from mopd_server.service_error import ServiceError

#: Beyond this many mistakes (a body of nothing but unknown keys) they are only counted: a list of
#: millions would fill the memory.
_MOST_MISTAKES = 1000


async def scoring_request(request: Request) -> LogprobsRequest:
    """The body of ``request``, checked.

    Raises:
        RequestValidationError: when it is no scoring request.
        ServiceError: 499, which nobody will read, when the client leaves before it is whole.
    """
    if not _is_json(request.headers.get("content-type", "")):
        raise RequestValidationError([{"type": "not_json", "loc": (), "input": None}])
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect as error:
        raise ServiceError(
            CLIENT_CLOSED_REQUEST, "the client left before its body was whole"
        ) from error
    try:
        return LogprobsRequest.model_validate_json(bytes(body))
    except ValidationError as error:
        found = error.error_count()
        if found > _MOST_MISTAKES:
            mistakes = [{"type": "too_many", "loc": (), "input": None, "ctx": {"found": found}}]
        else:
            mistakes = error.errors(include_url=False)
        raise RequestValidationError(mistakes) from error


def _is_json(content_type: str) -> bool:
    header = MimeHeader()
    header["content-type"] = content_type
    kind = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (
        kind == "json" or kind.endswith("+json")
    )
