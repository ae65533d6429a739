"""Parsing in parts gives what one call gives."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.requests import MOST_SEQUENCES, LogprobsRequest
from mopd_server.http import body_parts
from mopd_server.http.body_parts import InvalidBodyError, parse, parse_in_parts
from mopd_server.service_error import ServiceError

TEXTS = st.text(st.sampled_from('"\\{}[],: a\u00e9\n'), max_size=6)
IDS = st.lists(st.integers(-1, 3) | st.integers(0, 3), max_size=9)
PARTS = st.lists(TEXTS | st.fixed_dictionaries({"control": TEXTS}), max_size=5)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), max_size=4)
SEQUENCES = st.builds(
    lambda *parts: {key: value for part in parts for key, value in part.items()},
    st.fixed_dictionaries({"prompt_token_ids": IDS})
    | st.fixed_dictionaries({"messages": MESSAGES})
    | st.fixed_dictionaries({"prompt": TEXTS}),
    st.fixed_dictionaries({"completion": PARTS})
    | st.fixed_dictionaries({"completion_token_ids": IDS})
    | st.fixed_dictionaries({"completion": TEXTS}),
    st.fixed_dictionaries({}, optional={"candidate_ids": st.lists(IDS, max_size=4)}),
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
    size = data.draw(st.sampled_from([1, 3, 10, 1000]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(body_parts, "_PART_BYTES", size)
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
        "[" * 1000,
        '{"sequences":[{"prompt":"a","completion_token_ids":[1,2,3,],"id":"x"}]}',
        '{"sequences":[{"prompt":"a","completion_token_ids":[1,,2,3]}]}',
        '{"sequences":[{"prompt":"a","completion_token_ids":[1,2],"completion_token_ids":[3,4]}]}',
        '{"sequences":[{"prompt":"a","completion_token_ids":[1,2],"completion_token_\\u0069ds":[3]}]}',
        '{"sequences":[{"prompt":"a","completion_token_\\u0069ds":[3],"completion_token_ids":[1,2]}]}',
        '{"sequences":[{"prompt":"completion","completion":["a", {"control":"b]"}, "c" ]}]}',
        '{"sequences":[{"prompt":"a","completion":"b","candidate_ids":[[1,2],[3],[],[4,5,6]]}]}',
    ],
)
@pytest.mark.parametrize("size", [1, 2, 10**6])
def test_unusual_bodies(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "_PART_BYTES", size)
    assert outcome(parse_in_parts, text.encode()) == outcome(parse, text.encode())


@pytest.mark.parametrize(
    ("field", "values", "place"),
    [
        ("completion_token_ids", [*range(20), -1], (20,)),
        ("candidate_ids", [[1, 2]] * 20 + [[3, -1]], (20, 1)),
        ("completion", ["a"] * 20 + [{"control": "b", "x": 1}], (20,)),
    ],
)
def test_error_of_a_long_list_has_its_index(
    field: str, values: Any, place: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = {"prompt": "a", field: values}
    sequence |= {"completion": "b"} if field == "candidate_ids" else {}
    body = json.dumps({"sequences": [json.loads(S), sequence]}).encode()
    errors: list[Any] = []
    for size in (8, 10**6):
        monkeypatch.setattr(body_parts, "_PART_BYTES", size)
        with pytest.raises(InvalidBodyError) as caught:
            parse_in_parts(body)
        errors.append([(each["type"], each["loc"]) for each in caught.value.errors])
    assert errors[0] == errors[1]
    numbers = [each for each in errors[0][-1][1] if isinstance(each, int)]
    assert numbers[: 1 + len(place)] == [1, *place]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"sequences":[{"prompt":"a","completion":"b","candidate_ids":[[%s]]}]}', "sequences[0]"),
        ('{"sequences":[{"prompt":"a","completion":"b","chat_template_kwargs":{"a":[%s]}}]}',
         "sequences[0]"),
        ('{"sequences":[{"prompt":"a","completion":"b"}],"x":[%s]}', "body"),
        ("[%s]", "body"),
        ('{"sequences":[{"prompt":"a","completion":"b"}],"sequences":[%s]}', "body"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unit", ["1234,", '"a",', "[],", '"", '])
def test_one_call_of_the_parser_has_few_values(
    text: str, key: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter's lock is kept during a call: heavier ones are rejected before."""
    limit = 1000
    monkeypatch.setattr(body_parts, "_MOST_WEIGHT", limit)
    monkeypatch.setattr(body_parts, "_PART_BYTES", 100)
    body = (text % (unit * (5 * limit // len(unit)) + "1")).encode()
    with pytest.raises(ServiceError) as caught:
        parse_in_parts(body)
    assert (caught.value.status, caught.value.key) == (413, key)


@pytest.mark.parametrize(
    ("field", "unit"),
    [
        ("candidate_ids", "[]"),
        ("candidate_ids", "[1]"),
        ("messages", '{"role":"user","content":""}'),
        ("completion", '{"control":""}'),
        ("completion", '"a"'),
    ],
)
def test_numbers_of_lists_and_strings_are_limited(
    field: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 50
    monkeypatch.setattr(body_parts, "MOST_LISTS", limit)
    monkeypatch.setattr(body_parts, "MOST_STRINGS", 4 * limit)
    many = 4 * limit if unit == '"a"' else limit
    for count in (many - 12, many):
        values = ",".join([unit] * count)
        rest = "".join(
            f'"{name}":"",' for name in ("prompt", "completion") if name != field
        ).removeprefix('"prompt":"",' if field == "messages" else "")
        body = f'{{"sequences":[{{{rest}"{field}":[{values}]}}]}}'.encode()
        if count < many:
            assert parse_in_parts(body) == parse(body)
        else:
            with pytest.raises(ServiceError) as caught:
                parse_in_parts(body)
            assert (caught.value.status, caught.value.key) == (413, "body")


def test_text_of_megabytes_is_light() -> None:
    body = json.dumps({"sequences": [{"prompt": "a\n" * 2**20, "completion": "b"}]}).encode()
    assert parse_in_parts(body) == parse(body)


def test_error_has_the_place_in_the_complete_body() -> None:
    bodies = [f'{{"sequences":[{S},{S[:-1]},"top":1}}]}}'.encode()]
    for body in bodies:
        for parser in (parse, parse_in_parts):
            with pytest.raises(InvalidBodyError) as caught:
                parser(body)
            (error,) = caught.value.errors
            assert error["loc"] == ("sequences", 1, "top")
