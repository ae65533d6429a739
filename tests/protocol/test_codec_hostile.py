"""Bodies that no teacher writes: bad data, and never another error."""

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from mopd_protocol.codec import decode_binary, decode_json, encode_binary, encode_json
from mopd_protocol.errors import DataError
from tests.protocol.wire_values import responses, two_scores

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["schema_version", "ids", "marks", "timings", "sequences", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
DTYPES = (np.int8, np.int32, np.int64, np.float16, np.float32, np.float64, np.bool_)


def bad_or_fine(decode: Any, body: Any) -> None:
    """Any exception but DataError fails the test that calls this."""
    with contextlib.suppress(DataError):
        decode(body)


def metadata(body: bytes) -> dict[str, str]:
    """The header's metadata of a safetensors body."""
    (length,) = struct.unpack_from("<Q", body)
    return json.loads(body[8 : 8 + length])["__metadata__"]


@settings(deadline=None, max_examples=80)
@given(response=responses(), data=st.data())
def test_a_header_with_any_changed_field_is_bad_data_or_other_scores(response, data) -> None:
    body = encode_binary(response)
    header = json.loads(metadata(body)["mopd"])
    name = data.draw(st.sampled_from(sorted(header)))
    header[name] = data.draw(json_values)
    bad_or_fine(decode_binary, save(load(body), metadata={"mopd": json.dumps(header)}))


@settings(deadline=None, max_examples=80)
@given(response=responses(), data=st.data())
def test_any_tensor_in_the_place_of_another_is_bad_data_or_other_scores(response, data) -> None:
    body = encode_binary(response)
    tensors = dict(load(body))
    name = data.draw(st.sampled_from(sorted(tensors)))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape, dtype=np.int64))
    values = data.draw(st.lists(st.integers(-2, 9), min_size=size, max_size=size))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensors[name] = np.array(values).astype(dtype).reshape(shape)
    bad_or_fine(decode_binary, save(tensors, metadata=metadata(body)))


@settings(deadline=None, max_examples=80)
@given(response=responses(), data=st.data())
def test_a_document_with_any_changed_field_is_bad_data_or_other_scores(response, data) -> None:
    document = json.loads(encode_json(response))
    name = data.draw(st.sampled_from(sorted(document)))
    if name == "sequences" and document[name]:
        sequence = document[name][data.draw(st.integers(0, len(document[name]) - 1))]
        sequence[data.draw(st.sampled_from(sorted(sequence)))] = data.draw(json_values)
    else:
        document[name] = data.draw(json_values)
    bad_or_fine(decode_json, document)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("token_ids", lambda values: [value + 0.9 for value in values]),
        ("token_ids", lambda values: [str(value) for value in values]),
        ("byte_ends", lambda values: [bool(value) for value in values]),
        ("topk_ids", lambda rows: [value for row in rows for value in row]),
        ("topk_ids", lambda rows: [[value + 2**40 for value in row] for row in rows]),
        ("topk_logprobs", lambda rows: [value for row in rows for value in row]),
        ("token_logprobs", lambda values: [str(value) for value in values]),
        ("tail_logprobs", lambda values: [True for _ in values]),
        ("text", lambda text: text + "?"),
    ],
)
def test_fields_of_another_type_or_shape_are_not_converted(name, change) -> None:
    document = json.loads(encode_json(two_scores()))
    sequence = document["sequences"][0]
    sequence[name] = change(sequence[name])
    # The checksum is that of the converted values.
    with pytest.raises(DataError) as caught:
        decode_json(document)
    assert caught.value.code != "invalid_wire_format"


@pytest.mark.parametrize("timings", [[1], {"prefill": "long"}, None])
def test_timings_are_numbers(timings) -> None:
    with pytest.raises(DataError):
        decode_json({**json.loads(encode_json(two_scores())), "timings": timings})


@settings(deadline=None, max_examples=50)
@given(response=responses(), data=st.data())
def test_a_body_cut_off_anywhere_is_bad_data(response, data) -> None:
    body = encode_binary(response)
    with pytest.raises(DataError):
        decode_binary(body[: data.draw(st.integers(0, len(body) - 1))])


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**12, 2**31])
def test_a_header_that_claims_to_be_enormous_takes_no_memory(length: int) -> None:
    with pytest.raises(DataError):
        decode_binary(struct.pack("<Q", length) + b"{}")


def test_a_tensor_that_claims_to_be_enormous_takes_no_memory() -> None:
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    header = json.dumps({"token_ids": tensor, "__metadata__": {"mopd": "{}"}}).encode()
    with pytest.raises(DataError):
        decode_binary(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("depth", [10_000, 100_000])
def test_a_header_nested_without_end_is_bad_data(depth: int) -> None:
    with pytest.raises(DataError):
        decode_binary(save({}, metadata={"mopd": "[" * depth}))
    header = b'{"__metadata__": ' + b"[" * depth
    with pytest.raises(DataError):
        decode_binary(struct.pack("<Q", len(header)) + header)
