"""Parsing in parts gives what one call gives."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.requests import MOST_SEQUENCES, LogprobsRequest
from mopd_server.http.body_parts import InvalidBodyError, parse, parse_in_parts

TEXTS = st.text(st.sampled_from('"\\{}[],: a\u00e9\n'), max_size=6)
SEQUENCES = st.fixed_dictionaries(
    {"completion_token_ids": st.lists(st.integers(-1, 3), max_size=3), "prompt": TEXTS},
    optional={"candidate_ids": st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2)},
)
BODIES = st.fixed_dictionaries(
    {"sequences": st.lists(SEQUENCES, max_size=3)},
    optional={"top_k": st.integers(0, 3), "sequences ": st.just([]), "id": TEXTS},
)
S = '{"prompt":"a","completion":"b"}'


def outcome(parser: Any, body: bytes) -> LogprobsRequest | None:
    try:
        return parser(body)
    except InvalidBodyError:
        return None


@given(document=BODIES, indent=st.sampled_from([None, 1]), data=st.data())
def test_parts_give_the_request_of_one_call(
    document: Any, indent: Any, data: st.DataObject
) -> None:
    body = json.dumps(document, indent=indent).encode()
    if data.draw(st.booleans()):  # damaged anywhere
        at = data.draw(st.integers(0, len(body) - 1))
        body = (
            body[:at] + data.draw(st.sampled_from([b"", b'"', b"]", b",", b"\\"])) + body[at + 1 :]
        )
    assert outcome(parse_in_parts, body) == outcome(parse, body)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"sequences":[{S}],"sequences":[{S},{S}]}}',
        f'{{"sequences":[{S}],"\\u0073equences":[{S},{S}]}}',
        f'{{"\\u0073equences":[{S},{S}],"sequences":[{S}]}}',
        f'{{"top_k":"sequences","sequences":[{S}]}}',
        f'[{{"sequences":[{S}]}}]',
        f'{{"sequences":[{S},]}}',
        f'{{"sequences":[{S}]',
        f'{{"sequences":[{S}}}',
        f'{{"sequences":[{",".join([S] * (MOST_SEQUENCES + 1))}]}}',
        '{"sequences":["' + '\\"' * 10**6,
        '{"sequences":["' + '\\"' * 10**6 + "\\",
        "",
    ],
)
def test_unusual_bodies(text: str) -> None:
    assert outcome(parse_in_parts, text.encode()) == outcome(parse, text.encode())


def test_error_has_the_place_in_the_complete_body() -> None:
    bodies = [f'{{"sequences":[{S},{S[:-1]},"top":1}}]}}'.encode()]
    for body in bodies:
        for parser in (parse, parse_in_parts):
            with pytest.raises(InvalidBodyError) as caught:
                parser(body)
            (error,) = caught.value.errors
            assert error["loc"] == ("sequences", 1, "top")
