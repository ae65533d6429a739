"""Scores cross the wire bit for bit, in both spellings; anything else is refused as bad data."""

import contextlib
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from mopd_protocol import codec
from mopd_protocol.codec import decode_binary, decode_json, encode_binary, encode_json
from mopd_protocol.errors import DataError
from mopd_protocol.responses import LogprobsResponse
from tests.protocol.wire_values import assert_same, responses, two_scores


@settings(deadline=None, max_examples=150)
@given(response=responses())
def test_binary_gives_back_the_same_bits(response):
    assert_same(decode_binary(encode_binary(response)), response)


@settings(deadline=None, max_examples=150)
@given(response=responses())
def test_json_gives_back_the_same_bits(response):
    written = encode_json(response)

    assert_same(decode_json(json.loads(written)), response)


@settings(deadline=None, max_examples=100)
@given(response=responses())
def test_float16_keeps_every_entry_and_rounds_only_the_top_k(response):
    decoded = decode_binary(encode_binary(response, "float16"))

    for actual, expected in zip(decoded.scores, response.scores, strict=True):
        k = expected.topk.k
        assert actual.topk.ids[:, :k].tobytes() == expected.topk.ids.tobytes()
        assert actual.topk.token_logprobs.tobytes() == expected.topk.token_logprobs.tobytes()
        assert actual.topk.tail_logprobs.tobytes() == expected.topk.tail_logprobs.tobytes()
        if not len(expected.topk):
            continue
        present = expected.topk.ids >= 0
        rounded, exact = actual.topk.logprobs[:, :k][present], expected.topk.logprobs[present]
        assert np.isfinite(rounded).all()
        np.testing.assert_allclose(rounded, np.maximum(exact, -65504), rtol=2**-10, atol=1e-7)


def test_float16_halves_the_bytes_of_the_top_k():
    response = two_scores()

    exact, rounded = encode_binary(response), encode_binary(response, "float16")

    assert load(exact)["topk_logprobs"].dtype == np.float32
    assert load(rounded)["topk_logprobs"].dtype == np.float16


def test_the_examples_of_this_file_cross_the_wire():
    assert_same(decode_binary(encode_binary(two_scores())), two_scores())
    assert_same(decode_json(json.loads(encode_json(two_scores()))), two_scores())


def test_a_response_without_scores_crosses_the_wire():
    nothing = LogprobsResponse("m", (), ())

    assert_same(decode_binary(encode_binary(nothing)), nothing)
    assert_same(decode_json(json.loads(encode_json(nothing))), nothing)


def test_json_is_readable_and_carries_bytes_only_where_text_cannot():
    first, second, third = json.loads(encode_json(two_scores()))["sequences"]

    assert first["text"] == "é"
    assert "text_base64" not in first
    assert first["topk_logprobs"][1] == [-0.125, None]
    assert second["token_ids"] == []
    assert third["text_base64"] == "//4="


@pytest.mark.parametrize("decode", [decode_binary, decode_json])
def test_another_schema_version_is_refused_with_a_sentence(decode, monkeypatch):
    monkeypatch.setattr(codec, "SCHEMA_VERSION", 7)
    scores = two_scores()
    binary = decode is decode_binary
    written = encode_binary(scores) if binary else json.loads(encode_json(scores))
    monkeypatch.undo()

    with pytest.raises(DataError, match="schema version 7, expected 2; run the same mopd"):
        decode(written)


def test_a_body_cut_off_anywhere_is_bad_data():
    body = encode_binary(two_scores())

    for length in range(len(body)):
        with pytest.raises(DataError):
            decode_binary(body[:length])


@settings(deadline=None, max_examples=600)
@given(data=st.data())
def test_a_body_with_changed_bytes_is_bad_data_or_other_scores(data):
    body = bytearray(encode_binary(two_scores()))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(body) - 1))
        body[position] ^= 1 << data.draw(st.integers(0, 7))
    _decode_or_refuse(decode_binary, bytes(body))


def test_a_body_with_any_one_bit_changed_is_bad_data_or_other_scores():
    body = encode_binary(two_scores())
    for position in range(len(body)):
        for bit in (0, 1, 7):
            changed = bytearray(body)
            changed[position] ^= 1 << bit
            _decode_or_refuse(decode_binary, bytes(changed))


@settings(deadline=None, max_examples=200)
@given(body=st.binary(max_size=200))
def test_any_bytes_at_all_are_bad_data(body):
    with pytest.raises(DataError):
        decode_binary(body)


def _with_tensor(name: str, values: np.ndarray) -> bytes:
    body = encode_binary(two_scores())
    return save({**load(body), name: values}, metadata=_metadata(body))


def _with_header(**changes: Any) -> bytes:
    body = encode_binary(two_scores())
    header = json.loads(_metadata(body)["mopd"])
    return save(load(body), metadata={"mopd": json.dumps({**header, **changes})})


def _metadata(body: bytes) -> dict[str, str]:
    (length,) = struct.unpack_from("<Q", body)
    return json.loads(body[8 : 8 + length])["__metadata__"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_with_tensor("offsets", np.array([0, 3, 2, 4])), "offsets .* are not a running total"),
        (_with_tensor("offsets", np.array([1, 3, 3, 4])), "offsets .* run from 1 to 4"),
        (_with_tensor("offsets", np.array([0, 3, 3, 3])), "run from 0 to 3, expected 0 to 4"),
        (_with_tensor("offsets", np.array([0, 3, 3, 4, 4])), "not a scores body"),
        (_with_tensor("offsets", np.zeros(0, np.int64)), "not a running total"),
        (_with_tensor("text_offsets", np.array([0, 2, 2, 5])), "text_offsets .* run from 0 to 5"),
        (
            _with_tensor("token_ids", np.zeros(4, np.float32)),
            "token_ids .* is float32",
        ),
        (_with_tensor("topk_ids", np.zeros((4, 3), np.int64)), "topk_ids .* is int64"),
        (_with_tensor("topk_logprobs", np.zeros((4, 3), np.int32)), "expected float32 or float16"),
        (_with_tensor("tail_logprobs", np.zeros(9, np.float16)), "tail_logprobs .* is float16"),
        (_with_tensor("tail_logprobs", np.zeros(2, np.float32)), "tail_logprobs has shape"),
        (_with_header(marks=[]), "not a scores body"),
        (_with_header(marks=[[], [], [["x", "y"]]]), "not a scores body"),
        (_with_header(ids=["a"]), "1 ids for 3 scores"),
        (_with_header(ids="abc"), "not a scores body"),
        (_with_header(manifest_id=None), "not a scores body"),
        (_with_header(timings={"engine": "soon"}), "not a scores body"),
        (_with_header(surprise=1), "not a scores body"),
        (save({}, metadata={"mopd": "[]"}), "not a scores body"),
        (save({}, metadata={"other": "{}"}), "not a scores body"),
        (save({}), "not a scores body"),
    ],
)
def test_a_body_that_contradicts_itself_is_bad_data(body, message):
    with pytest.raises(DataError, match=message):
        decode_binary(body)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no sequences": lambda body: body.pop("sequences"),
    "no timings": lambda body: body.pop("timings"),
    "sequences are a number": lambda body: body.update(sequences=3),
    "a sequence is text": lambda body: body.update(sequences=["x"]),
    "no token ids": lambda body: body["sequences"][0].pop("token_ids"),
    "a token id too large": lambda body: body["sequences"][0].update(token_ids=[2**40, 8, 0]),
    "token ids are words": lambda body: body["sequences"][0].update(token_ids=["a", "b", "c"]),
    "rows of two widths": lambda body: body["sequences"][0]["topk_ids"][0].pop(),
    "a row too few": lambda body: body["sequences"][0]["topk_logprobs"].pop(),
    "another text": lambda body: body["sequences"][0].update(text="abcd"),
    "half a character pair": lambda body: body["sequences"][0].update(text="\ud800"),
    "broken base64": lambda body: body["sequences"][2].update(text_base64="/"),
    "a mark that is no pair": lambda body: body["sequences"][0].update(marks=[1]),
    "a mark on a word": lambda body: body["sequences"][0].update(marks=[["x", "y"]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_json_document_that_contradicts_itself_is_bad_data(change):
    document = json.loads(encode_json(two_scores()))
    CHANGES[change](document)

    with pytest.raises(DataError):
        decode_json(document)


@pytest.mark.parametrize("document", [None, [], 3, "text", {}])
def test_json_that_is_no_document_is_bad_data(document):
    with pytest.raises(DataError):
        decode_json(document)


def test_decoded_arrays_cannot_be_written_to():
    score = decode_binary(encode_binary(two_scores())).scores[0]

    with pytest.raises(ValueError, match="read-only"):
        score.topk.logprobs[0, 0] = 0.0


def _decode_or_refuse(decode: Callable[[bytes], LogprobsResponse], body: bytes) -> None:
    """Any exception but DataError fails the test that calls this."""
    with contextlib.suppress(DataError):
        decode(body)
