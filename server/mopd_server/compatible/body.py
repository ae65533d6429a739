"""``parse_large``: a body with long lists of ids, parsed in parts.

One call for a body of megabytes would keep the interpreter's lock, and with it the event loop, for
longer than other requests may wait.
"""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

from mopd_protocol.requests import MOST_SEQUENCES, TokenIds
from mopd_server.http.body_parts import number_parts, parse_with
from mopd_server.http.json_scan import tokens

Body = TypeVar("Body", bound=BaseModel)

_IDS: TypeAdapter[list[int]] = TypeAdapter(TokenIds, config=ConfigDict(strict=True))


def parse_large(model: type[Body], field: str, body: bytes) -> Body:
    """Parse ``body`` as ``model``, whose ``field`` is a list of ids, or a list of such lists.

    Raises:
        InvalidBodyError: if the body does not have the form of ``model``.
        ServiceError: 413 if it has too many values for the event loop to continue meanwhile.
    """
    lists = _lists(body, f'"{field}"'.encode())
    if lists is None:
        return parse_with(model.model_validate_json, body)
    whole, inner = lists
    rest = parse_with(model.model_validate_json, body[: whole.start] + b"[1]" + body[whole.stop :])
    if getattr(rest, field) != [1]:  # a second list, whose name has escaped letters
        return parse_with(model.model_validate_json, body)
    if not inner:
        ids: Any = _parse_ids(body, slice(whole.start + 1, whole.stop - 1), field)
    else:
        ids = [_parse_ids(body, part, field, index) for index, part in enumerate(inner)]
    return rest.model_copy(update={field: ids})


def _parse_ids(body: bytes, part: slice, *location: str | int) -> list[int]:
    ids: list[int] = []
    for numbers in number_parts(body, part.start, part.stop, plain=True):
        text = body[numbers] if body[numbers].strip() or not ids else b","
        ids += parse_with(_IDS.validate_json, b"[" + text + b"]", *location, offset=len(ids))
    return ids


def _lists(body: bytes, name: bytes) -> tuple[slice, list[slice]] | None:
    """Return the position of the list, and those of the numbers in each list inside.

    None for a field that is no list, a list of other values, or a field that occurs twice.
    """
    depth, named, whole_start, last = 0, False, None, 0
    whole: slice | None = None
    inner: list[slice] = []
    for position, end in tokens(body):
        kind = body[position]
        inside = whole_start is not None and whole is None
        if kind in b"[{":
            depth += 1
            if inside:
                between = body[last:position].strip()
                if depth != 3 or kind != b"["[0] or between != (b"," if inner else b""):
                    return None
                inner.append(slice(end, end))
                if len(inner) > MOST_SEQUENCES:
                    return None
            elif named and depth == 2 and kind == b"["[0]:
                if whole is not None:
                    return None
                whole_start = position
            last = end
        elif kind in b"]}":
            depth -= 1
            if inside and depth == 2:
                inner[-1] = slice(inner[-1].start, position)
            elif inside and whole_start is not None:
                if inner and body[last:position].strip():
                    return None
                whole = slice(whole_start, end)
            last = end
        elif inside:
            return None
        if depth == 1 and kind == b'"'[0]:
            following = body[end : end + 32].lstrip()[:1]
            named = following == b":" and body[position:end] == name
            if named and whole is not None:
                return None
    return None if whole is None else (whole, inner)
