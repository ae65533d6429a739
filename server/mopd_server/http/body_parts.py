"""``parse_in_parts``: a scoring request parsed one sequence at a time.

One call for a body of megabytes would keep the interpreter's lock, and with it the event loop, for
seconds, on any thread.
"""

import re
from typing import Any

from pydantic import ValidationError

from mopd_protocol.requests import MOST_SEQUENCES, LogprobsRequest, SequenceRequest

#: Above this number of errors (a body of unknown keys) only the number is reported: a list of
#: millions would exhaust the memory.
MAX_ERRORS = 1000

#: A string, which may contain brackets and may lack its end, or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[][{}]', re.DOTALL)

_LIST = re.compile(rb'"sequences"\s*:\s*\[\s*')
_SEPARATOR = re.compile(rb"\s*,\s*")
_END = re.compile(rb"\s*\]")

#: A valid sequence, to validate the other fields.
_PLACEHOLDER = b'{"prompt": "", "completion": ""}'
_PLACEHOLDERS = [SequenceRequest(prompt="", completion="")]


class InvalidBodyError(Exception):
    """``errors`` is ``ValidationError.errors()``; empty above ``MAX_ERRORS``."""

    def __init__(self, errors: list[Any], count: int) -> None:
        super().__init__(f"{count} errors")
        self.errors = errors
        self.count = count


def parse(body: bytes) -> LogprobsRequest:
    """Parse a scoring request in one call.

    Raises:
        InvalidBodyError: if the body is not a scoring request.
    """
    return _parse(LogprobsRequest, body)


def parse_in_parts(body: bytes) -> LogprobsRequest:
    """Parse a scoring request; errors of sequences are reported if there are no others.

    Raises:
        InvalidBodyError: if the body is not a scoring request.
    """
    parts = _split(body)
    if parts is None or len(parts[0]) > MOST_SEQUENCES:
        return parse(body)
    sequences, rest = parts
    request = _parse(LogprobsRequest, rest)
    if request.sequences != _PLACEHOLDERS:  # a second list, whose name has escaped letters
        return parse(body)
    parsed = [
        _parse(SequenceRequest, body[part], "sequences", index)
        for index, part in enumerate(sequences)
    ]
    return request.model_copy(update={"sequences": parsed})


def _parse(model: Any, body: bytes, *location: str | int) -> Any:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        count = error.error_count()
        errors = error.errors(include_url=False) if count <= MAX_ERRORS else []
        located = [{**each, "loc": (*location, *each["loc"])} for each in errors]
        raise InvalidBodyError(located, count) from error


def _split(body: bytes) -> tuple[list[slice], bytes] | None:
    """Return the position of each sequence, and the body with a placeholder for all of them.

    ``None`` without exactly one list of sequences. Where the parts and the rest are valid, the
    body is.
    """
    start = _list_start(body)
    if start is None:
        return None
    sequences: list[slice] = []
    position = start
    while (end := _object_end(body, position)) is not None:
        sequences.append(slice(position, end))
        if separator := _SEPARATOR.match(body, end):
            position = separator.end()
            continue
        closing = _END.match(body, end)
        if closing is None or b'"sequences"' in body[closing.end() :]:
            return None
        return sequences, body[:start] + _PLACEHOLDER + body[closing.start() :]
    return None


def _list_start(body: bytes) -> int | None:
    """Return the position after the opening bracket of the list in the outer object."""
    depth = 0
    for token in _TOKEN.finditer(body):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
        elif depth == 1 and (opening := _LIST.match(body, token.start())):
            return opening.end()
    return None


def _object_end(body: bytes, start: int) -> int | None:
    """Return the position after the object at ``start``; None if there is none."""
    if body[start : start + 1] != b"{":
        return None
    depth = 0
    for token in _TOKEN.finditer(body, start):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
            if not depth:
                return token.end()
    return None
