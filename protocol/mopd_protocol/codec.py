"""The two encodings of a response: one safetensors body for programs, JSON for people.

Binary: ragged sequences are concatenated, ``offsets`` is the start of each. Everything that is not
one number per token is in the header's metadata. Both encodings have the same fields, so decoding
either returns the same response, and the same checksum.
"""

import base64
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load

from mopd_protocol.errors import DataError, WireFormatError
from mopd_protocol.json_arrays import json_integers, json_logprobs
from mopd_protocol.manifest import SCHEMA_VERSION
from mopd_protocol.requests import LogprobsDtype
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import TokenSequence
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

BINARY_MEDIA_TYPE = "application/vnd.mopd.safetensors"

Array = NDArray[Any]

#: Numbers that one call of the json module writes: about 2 ms.
_NUMBERS_PER_PART = 4096

#: Of a safetensors header.
_ALIGNMENT = 8
_SAFETENSORS_TYPES = {
    "uint8": "U8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32",
}  # fmt: skip

_TENSOR_TYPES = {
    "offsets": ("int64",),
    "token_ids": ("int32",),
    "byte_ends": ("int32",),
    "text": ("uint8",),
    "text_offsets": ("int64",),
    "topk_ids": ("int32",),
    "topk_logprobs": ("float32", "float16"),
    "token_logprobs": ("float32",),
    "tail_logprobs": ("float32",),
}


def encode_binary(response: LogprobsResponse, dtype: LogprobsDtype = "float32") -> bytes:
    """Return ``encode_binary_buffer`` as ``bytes``."""
    return bytes(encode_binary_buffer(response, dtype))


def encode_binary_buffer(
    response: LogprobsResponse, dtype: LogprobsDtype = "float32"
) -> memoryview:
    """Encode the response as one safetensors body.

    Other threads run meanwhile: numpy copies arrays without the interpreter's lock, safetensors
    copies hundreds of megabytes with it.

    With ``float16`` the top-k logprobs are rounded; a logprob below float16's range (-65504) would
    become -inf, so it is clamped to float16's most negative number.
    """
    tensors = _tensors(response, dtype)
    header = {
        "schema_version": SCHEMA_VERSION,
        "manifest_id": response.manifest_id,
        "ids": list(response.ids),
        "marks": _marks(response),
        "checksum": _checksum(response, tensors),
        "timings": dict(response.timings),
    }
    return _safetensors(tensors, {"mopd": json.dumps(header)})


def _safetensors(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> memoryview:
    """Return a safetensors file: the length of the header, the header as JSON, the tensors."""
    ordered = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # aligned
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in ordered:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        kind = _SAFETENSORS_TYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    text = struct.pack("<Q", len(text)) + text
    body = np.empty(len(text) + end, dtype=np.uint8)
    body[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    position = len(text)
    for name in ordered:
        flat = np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8)
        body[position : position + len(flat)] = flat
        position += len(flat)
    return body.data


def _tensors(response: LogprobsResponse, dtype: LogprobsDtype) -> dict[str, Array]:
    scores = response.scores
    # JSON does not represent the width of empty sequences, so that others decide if there are any.
    k = max((score.topk.k for score in scores if len(score.topk)), default=None)
    k = max((score.topk.k for score in scores), default=0) if k is None else k
    logprobs = _stack([_widen(s.topk.logprobs, k, -np.inf) for s in scores], (0, k))
    if dtype == "float16":
        lowest = np.finfo(np.float16).min
        logprobs = np.where(np.isneginf(logprobs), -np.inf, np.maximum(logprobs, lowest))
    return {
        "offsets": _offsets([len(score.completion) for score in scores]),
        "token_ids": _stack([score.completion.token_ids for score in scores]).astype(np.int32),
        "byte_ends": _stack([score.completion.byte_ends for score in scores]).astype(np.int32),
        "text": np.frombuffer(b"".join(s.completion.text for s in scores), dtype=np.uint8),
        "text_offsets": _offsets([len(score.completion.text) for score in scores]),
        "topk_ids": _stack([_widen(s.topk.ids, k, ABSENT_ID) for s in scores], (0, k)).astype(
            np.int32, copy=False
        ),
        "topk_logprobs": logprobs.astype(dtype, copy=False),
        "token_logprobs": _floats([score.topk.token_logprobs for score in scores]),
        "tail_logprobs": _floats([score.topk.tail_logprobs for score in scores]),
    }


def _marks(response: LogprobsResponse) -> list[list[tuple[int, str]]]:
    return [list(score.completion.marks.items()) for score in response.scores]


def _checksum(response: LogprobsResponse, tensors: Mapping[str, Array]) -> str:
    """Return 32 hex digits over everything but the timings; detects damage, not forgery."""
    names = [response.manifest_id, list(response.ids), _marks(response)]
    digest = hashlib.sha256(json.dumps(names).encode())
    for name in _TENSOR_TYPES:
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {tensor.dtype} {tensor.shape if tensor.size else 0}".encode())
        digest.update(tensor.data)
    return digest.hexdigest()[:32]


def _verified(
    response: LogprobsResponse, tensors: Mapping[str, Array], checksum: object
) -> LogprobsResponse:
    expected = _checksum(response, tensors)
    if checksum != expected:
        raise WireFormatError(
            f"checksum: the scores were damaged in transit (found {expected}, expected {checksum})",
            key="checksum",
        )
    return response


#: Errors raised by reading an invalid field: missing, of another type, empty, too large, nested
#: without end.
_FIELD_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def decode_binary(body: bytes) -> LogprobsResponse:
    """The response in a safetensors body.

    Raises:
        DataError: when the body is not one, is of another schema version, or contradicts itself.
        WireFormatError: when the checksum differs.
    """
    try:
        header = _header(body)
        tensors = load(body)
        offsets = _bounds(tensors, "offsets", "token_ids")
        text_offsets = _bounds(tensors, "text_offsets", "text")
        text = _tensor(tensors, "text").tobytes()
        scores = [
            TeacherScore(
                manifest_id=header.manifest_id,
                completion=TokenSequence(
                    token_ids=_tensor(tensors, "token_ids")[start:end],
                    byte_ends=_tensor(tensors, "byte_ends")[start:end],
                    text=text[text_start:text_end],
                    marks=dict(marks),
                ),
                topk=TopKLogprobs(
                    ids=_tensor(tensors, "topk_ids")[start:end],
                    logprobs=_tensor(tensors, "topk_logprobs")[start:end],
                    token_logprobs=_tensor(tensors, "token_logprobs")[start:end],
                    tail_logprobs=_tensor(tensors, "tail_logprobs")[start:end],
                ),
            )
            for (start, end), (text_start, text_end), marks in zip(
                pairwise(offsets), pairwise(text_offsets), header.marks, strict=True
            )
        ]
        response = LogprobsResponse(
            manifest_id=header.manifest_id,
            ids=tuple(header.ids),
            scores=tuple(scores),
            timings=header.timings,
            logprobs_dtype=_tensor(tensors, "topk_logprobs").dtype.name,  # pyright: ignore
        )
        return _verified(response, tensors, header.checksum)
    except DataError:
        raise
    except (SafetensorError, struct.error, *_FIELD_ERRORS) as error:
        raise DataError(f"not a scores body: {error!r}; expected {BINARY_MEDIA_TYPE}") from error


def encode_json(response: LogprobsResponse) -> bytes:
    """Encode the response as JSON; -inf is written as ``null``.

    ``text`` is for reading; where it is not valid UTF-8, ``text_base64`` has the bytes. Numbers are
    written a few thousand at a time: one call for megabytes would keep the interpreter's lock, and
    every other thread, for seconds.
    """
    return b"".join(part.encode() for part in _json_parts(response))


def _json_parts(response: LogprobsResponse) -> Iterator[str]:
    header = {
        "schema_version": SCHEMA_VERSION,
        "manifest_id": response.manifest_id,
        "checksum": _checksum(response, _tensors(response, "float32")),
        "timings": dict(response.timings),
    }
    yield f'{_dump(header)[:-1]},"sequences":['
    for index, (sequence_id, score) in enumerate(zip(response.ids, response.scores, strict=True)):
        completion, topk = score.completion, score.topk
        readable = completion.text.decode("utf-8", "replace")
        fields: dict[str, Any] = {
            "id": sequence_id,
            "text": readable,
            "marks": [list(mark) for mark in completion.marks.items()],
        }
        if readable.encode() != completion.text:
            fields["text_base64"] = base64.b64encode(completion.text).decode()
        yield f"{',' if index else ''}{_dump(fields)[:-1]}"
        for name, numbers in (
            ("token_ids", completion.token_ids),
            ("byte_ends", completion.byte_ends),
            ("topk_ids", topk.ids),
            ("topk_logprobs", topk.logprobs),
            ("token_logprobs", topk.token_logprobs),
            ("tail_logprobs", topk.tail_logprobs),
        ):
            yield f',"{name}":['
            rows = max(1, _NUMBERS_PER_PART * len(numbers) // max(1, numbers.size))
            for start in range(0, len(numbers), rows):
                text = _dump(numbers[start : start + rows].tolist())[1:-1]
                yield f"{',' if start else ''}{text.replace('-Infinity', 'null')}"
            yield "]"
        yield "}"
    yield "]}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def decode_json(body: dict[str, Any]) -> LogprobsResponse:
    """The response in JSON data.

    Raises:
        DataError: when a field is missing, of another schema version, or contradicts another.
        WireFormatError: when the checksum differs.
    """
    try:
        _check_schema(body)
        scores = [_score_from_json(body["manifest_id"], item) for item in body["sequences"]]
        response = LogprobsResponse(
            manifest_id=body["manifest_id"],
            ids=tuple(item["id"] for item in body["sequences"]),
            scores=tuple(scores),
            timings=_TIMINGS.validate_python(body["timings"]),
        )
        return _verified(response, _tensors(response, "float32"), body["checksum"])
    except DataError:
        raise
    except _FIELD_ERRORS as error:
        raise DataError(f"not a scores document: {error!r}") from error


def _score_from_json(manifest_id: str, item: dict[str, Any]) -> TeacherScore:
    encoded = item.get("text_base64")
    text = base64.b64decode(encoded, validate=True) if encoded else item["text"].encode()
    if text.decode("utf-8", "replace") != item["text"]:
        raise DataError("text and text_base64 of a scores document differ", key="text")
    rows = len(item["token_ids"])
    return TeacherScore(
        manifest_id=manifest_id,
        completion=TokenSequence(
            token_ids=json_integers(item, "token_ids"),
            byte_ends=json_integers(item, "byte_ends"),
            text=text,
            marks={int(position): name for position, name in item["marks"]},
        ),
        topk=TopKLogprobs(
            ids=_rows(json_integers(item, "topk_ids"), rows),
            logprobs=_rows(json_logprobs(item, "topk_logprobs"), rows),
            token_logprobs=json_logprobs(item, "token_logprobs"),
            tail_logprobs=json_logprobs(item, "tail_logprobs"),
        ),
    )


def _rows(values: Array, rows: int) -> Array:
    """Return ``values``; of no rows, with a width of 0."""
    return values if rows else values.reshape(0, 0)


def _check_schema(header: dict[str, Any]) -> None:
    if header["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"scores of schema version {header['schema_version']}, expected {SCHEMA_VERSION}; "
            "run the same mopd version on both sides"
        )


_TIMINGS = TypeAdapter(dict[str, float])


class _Header(BaseModel):
    """Metadata of a scores body."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int
    manifest_id: str
    ids: list[str | None]
    marks: list[list[tuple[int, str]]]
    checksum: str
    timings: dict[str, float]


def _header(body: bytes) -> _Header:
    (length,) = struct.unpack_from("<Q", body)
    fields = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["mopd"])
    _check_schema(fields)
    return _Header.model_validate(fields)


def _tensor(tensors: Mapping[str, Array], name: str) -> Array:
    """One tensor of a scores body; its values must not be reinterpreted on the way in."""
    expected = _TENSOR_TYPES[name]
    if tensors[name].dtype.name not in expected:
        raise DataError(
            f"tensor {name} of a scores body is {tensors[name].dtype.name}, "
            f"expected {' or '.join(expected)}"
        )
    return tensors[name]


def _bounds(tensors: Mapping[str, Array], name: str, of: str) -> list[int]:
    """Return the start of each sequence in the tensor ``of``, and the end of the last."""
    offsets = _tensor(tensors, name)
    rows = len(_tensor(tensors, of))
    if offsets.ndim != 1 or not len(offsets) or (np.diff(offsets) < 0).any():
        raise DataError(f"{name} of a scores body are not a running total")
    if offsets[0] != 0 or offsets[-1] != rows:
        raise DataError(
            f"{name} of a scores body run from {offsets[0]} to {offsets[-1]}, "
            f"expected 0 to {rows}: all of {of}"
        )
    return offsets.tolist()


def _offsets(lengths: Sequence[int]) -> Array:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _stack(parts: Sequence[Array], empty_shape: tuple[int, ...] = (0,)) -> Array:
    return np.concatenate(parts) if parts else np.zeros(empty_shape)


def _floats(parts: Sequence[Array]) -> Array:
    return _stack(parts).astype(np.float32)


def _widen(rows: Array, k: int, fill: float) -> Array:
    missing = k - rows.shape[1]
    if not len(rows):
        return np.zeros((0, k), dtype=rows.dtype)
    return rows if not missing else np.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
