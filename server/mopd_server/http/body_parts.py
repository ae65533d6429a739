"""``parse_in_parts``: a scoring request parsed in parts, sequences and long lists of one.

One call for a body of megabytes would keep the interpreter's lock, and with it the event loop, for
seconds, on any thread. The same is true of a regular expression, of a collection of millions of
objects as garbage, and of the end of their request: a body of too many values is rejected.
"""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from mopd_protocol.requests import MOST_SEQUENCES, LogprobsRequest, SequenceRequest
from mopd_server.http.json_scan import after_separator, tokens
from mopd_server.service_error import ServiceError

Parsed = TypeVar("Parsed")
Model = TypeVar("Model", bound=BaseModel)

#: Above this number of errors (a body of unknown keys) only the number is reported: a list of
#: millions would exhaust the memory.
MAX_ERRORS = 1000

#: Longer lists are parsed in parts of about this size, 2 to 5 ms each.
_PART_BYTES = 32 * 1024

#: Lists and objects of a body, and strings: four for each message. Their garbage collection and
#: deletion take 50 ms.
MOST_LISTS = 2**17
MOST_STRINGS = 2**19

#: Bytes outside strings, and some for every string, of one call of pydantic: 10 to 40 ms.
_MOST_WEIGHT = 512 * 1024
_STRING_WEIGHT = 4

#: No valid request is nested as deep.
_DEEPEST = 100

#: A valid sequence, to validate the other fields.
_PLACEHOLDER = b'{"prompt": "", "completion": ""}'
_TOO_MANY = b'{"sequences": [%b]}' % b",".join([_PLACEHOLDER] * (MOST_SEQUENCES + 1))
_PLACEHOLDERS = [SequenceRequest(prompt="", completion="")]

#: Field with a list -> a valid sequence around the list.
_LISTS = {
    "messages": b'{"completion": "", "messages": %b}',
    "prompt_token_ids": b'{"completion": "", "prompt_token_ids": %b}',
    "completion": b'{"prompt": "", "completion": %b}',
    "completion_token_ids": b'{"prompt": "", "completion_token_ids": %b}',
    "candidate_ids": b'{"prompt": "", "completion": "", "candidate_ids": %b}',
}
_FIELDS = {f'"{name}"'.encode(): name for name in _LISTS}

#: A list of each field in place of the long one.
_SHORT = dict.fromkeys(_LISTS, b"[]") | {"messages": b'[{"role": "", "content": ""}]'}


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
        ServiceError: 413 if it has too many values for the event loop to continue meanwhile.
    """
    parts = _split(body)
    if parts is None:
        return parse(body)
    sequences, rest = parts
    request = _parse(LogprobsRequest, rest)
    if request.sequences != _PLACEHOLDERS:  # a second list, whose name has escaped letters
        return parse(body)
    parsed = [_parse_sequence(body[part], index) for index, part in enumerate(sequences)]
    return request.model_copy(update={"sequences": parsed})


def _parse(model: type[Model], body: bytes, *location: str | int, offset: int = 0) -> Model:
    return parse_with(model.model_validate_json, body, *location, offset=offset)


def parse_with(
    validate: Callable[[bytes], Parsed], body: bytes, *location: str | int, offset: int = 0
) -> Parsed:
    """Parse with a function of pydantic; ``offset`` is added to the first index in the location.

    Raises:
        InvalidBodyError: if the body is invalid.
        ServiceError: 413 if the call would take too long.
    """
    _require_light(body, location)
    try:
        return validate(body)
    except ValidationError as error:
        count = error.error_count()
        errors = error.errors(include_url=False) if count <= MAX_ERRORS else []
        located = [{**each, "loc": (*location, *_shifted(each["loc"], offset))} for each in errors]
        raise InvalidBodyError(located, count) from error


def _require_light(body: bytes, location: tuple[str | int, ...]) -> None:
    """Raise ServiceError 413 if one call of pydantic would take too long."""
    if len(body) <= _MOST_WEIGHT:
        return
    weight = last = 0
    for start, end in chain(tokens(body), [(len(body), len(body))]):
        weight += start - last + (_STRING_WEIGHT if body[start : start + 1] == b'"' else 1)
        last = end
        if weight > _MOST_WEIGHT:
            field = f"sequences[{location[1]}]" if location else "body"
            raise _too_large(field, "bytes of one value, texts excluded", weight, _MOST_WEIGHT)


def _too_large(field: str, kind: str, count: int, limit: int) -> ServiceError:
    return ServiceError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"{field}: too many {kind} (found {count} or more, expected at most {limit}). Split the "
        "request.",
        key=field,
    )


def _shifted(location: tuple[str | int, ...], offset: int) -> tuple[str | int, ...]:
    first = next((at for at, each in enumerate(location) if isinstance(each, int)), None)
    if first is None or not offset:
        return location
    return (*location[:first], int(location[first]) + offset, *location[first + 1 :])


def _parse_sequence(body: bytes, index: int) -> SequenceRequest:
    location = ("sequences", index)
    lists = _long_lists(body) if len(body) > _PART_BYTES else {}
    if not lists:
        return _parse(SequenceRequest, body, *location)
    rest, position = b"", 0
    for name, parts in lists.items():
        rest += body[position : parts[0].start] + _SHORT[name][1:-1]
        position = parts[-1].stop
    sequence = _parse(SequenceRequest, rest + body[position:], *location)
    values: dict[str, list[Any]] = {}
    for name, parts in lists.items():
        short = getattr(_parse(SequenceRequest, _LISTS[name] % _SHORT[name]), name)
        if getattr(sequence, name) != short:  # a second list, whose name has escaped letters
            return _parse(SequenceRequest, body, *location)
        values[name] = []
        for part in parts:
            text = body[part] if body[part].strip() else b","  # a comma at the end of the list
            around = _LISTS[name] % (b"[" + text + b"]")
            parsed = _parse(SequenceRequest, around, *location, offset=len(values[name]))
            values[name] += getattr(parsed, name)
    return sequence.model_copy(update=values)


def _long_lists(body: bytes) -> dict[str, list[slice]]:
    """Return the parts of every long list in a valid sequence, by field.

    Empty if a field occurs twice.
    """
    lists: dict[str, list[slice]] = {}
    depth, name, start, last = 0, None, 0, 0  # start: of the part; last: end of the last token
    parts: list[slice] | None = None  # of the open list
    for position, end in tokens(body):
        kind = body[position]
        if kind in b"[{":
            depth += 1
            if depth == 2 and kind == b"["[0] and name is not None:
                start, parts = end, []
        elif kind in b"]}":
            depth -= 1
            if depth == 1 and parts is not None and name is not None:
                parts += number_parts(body, start, position, plain=last <= start)
                if len(parts) > 1:
                    if name in lists:
                        return {}
                    lists[name] = parts
                name = parts = None
        elif depth == 1:
            field = _FIELDS.get(body[position:end]) if end - position < 32 else None
            name = field if body[end : end + 32].lstrip()[:1] == b":" else None
        last = end
        if depth == 2 and parts is not None and end - start >= _PART_BYTES:
            following = after_separator(body, end)
            if following is not None:
                parts.append(slice(start, end))
                start = following
    return lists


def number_parts(body: bytes, start: int, end: int, *, plain: bool) -> Iterator[slice]:
    """Yield the rest of a list, in parts if it is ``plain``: without strings and brackets."""
    while plain and end - start > _PART_BYTES:
        comma = body.find(b",", start + _PART_BYTES, end)
        if comma < 0:
            break
        yield slice(start, comma)
        start = comma + 1
    yield slice(start, end)


def _split(body: bytes) -> tuple[list[slice], bytes] | None:
    """Return the position of each sequence, and the body with a placeholder for all of them.

    ``None`` without exactly one list of sequences. Where the parts and the rest are valid, the
    body is.

    Raises:
        InvalidBodyError: if there are more than ``MOST_SEQUENCES``.
        ServiceError: 413 if the body has too many lists, objects or strings.
    """
    sequences: list[slice] = []
    depth, begin, stop, start = 0, None, None, 0  # the list is body[begin:stop]
    named = False
    lists = strings = 0
    for position, end in tokens(body):
        kind = body[position]
        if kind in b"[{":
            lists += 1
            depth += 1
            if lists > MOST_LISTS:
                raise _too_large("body", "lists and objects", lists, MOST_LISTS)
            if depth > _DEEPEST:
                return None
            if named and depth == 2 and kind == b"["[0]:
                begin = end
            elif depth == 3 and begin is not None and stop is None:
                if kind != b"{"[0]:
                    return None
                start = position
        elif kind in b"]}":
            depth -= 1
            if depth == 2 and begin is not None and stop is None:
                sequences.append(slice(start, end))
                if len(sequences) > MOST_SEQUENCES:
                    _parse(LogprobsRequest, _TOO_MANY)
            elif depth == 1 and begin is not None and stop is None:
                stop = position
        else:
            strings += 1
            if strings > MOST_STRINGS:
                raise _too_large("body", "strings", strings, MOST_STRINGS)
        if depth == 1 and kind == b'"'[0]:
            named = end - position == 11 and body[position:end] == b'"sequences"'
            if named and begin is not None:
                return None
    if begin is None or stop is None or not sequences:
        return None
    between = [begin, *(edge for part in sequences for edge in (part.start, part.stop)), stop]
    for at in range(0, len(between), 2):
        gap = body[between[at] : between[at + 1]].strip()
        if gap != (b"" if at in (0, len(between) - 2) else b","):
            return None
    return sequences, body[:begin] + _PLACEHOLDER + body[stop:]
