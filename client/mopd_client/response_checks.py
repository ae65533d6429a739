"""Check that a teacher's response belongs to the request, and has distributions.

Numpy over whole sequences. A response that was damaged, reordered, truncated or replayed on its
way, or made by a faulty teacher, contradicts the request or itself in at least one of these ways:

* each sequence has its id and the text or token ids of the request
* the tokens spell the text, and control tokens are those of the request
* rows have the requested number of entries, and missing ones only where nothing has probability
* the completion token has one value: that of its entry, or one below the last entry and the tail
* the entries and the tail of a row add up to one
* each token of the tail is at most as likely as the last entry

Equal text does not imply equal tokens: the bytes of each token are compared where the teacher's
tokenizer is at hand, the number of control tokens everywhere.
"""

import unicodedata
from collections.abc import Sequence
from http import HTTPStatus

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.errors import DataError, InvalidResponseError
from mopd_protocol.manifest import Manifest
from mopd_protocol.requests import ControlToken, LogprobsRequest, SequenceRequest
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs

#: Relative difference of one value in two places; float16 rounds entries to 11 bits.
_ROUNDING = {"float32": 1e-5, "float16": 2.0**-10}
#: Largest difference of a row's probability from one. Rounding is 6e-7 with 1 to 1,024 entries of
#: vocabularies up to 152,000, and 1.1e-3 in float16.
_MASS = {"float32": 2e-5, "float16": 1e-2}
#: Lowest finite entry in float16: lower ones are clamped on the wire.
_LOWEST_FLOAT16 = float(np.finfo(np.float16).min)


def check_response(
    teacher: str,
    response: LogprobsResponse,
    request: LogprobsRequest,
    manifest: Manifest,
    table: TokenTable | None = None,
) -> None:
    """Compare a response with its request.

    Args:
        teacher: name in error messages.
        response: the response.
        request: the request, with an id for every sequence.
        manifest: the teacher's manifest.
        table: bytes of the teacher's tokens, if its tokenizer is loaded.

    Raises:
        InvalidResponseError: if they contradict each other, with the field in ``key``.
    """
    expected_ids = tuple(sequence.id for sequence in request.sequences)
    if len(response.scores) != len(expected_ids):
        raise InvalidResponseError(
            f"teacher {teacher!r}: wrong number of scores (found {len(response.scores)}, expected "
            f"{len(expected_ids)})",
            status=HTTPStatus.OK,
            key="scores",
        )
    if response.ids != expected_ids:
        raise InvalidResponseError(
            f"teacher {teacher!r}: wrong sequences (found {list(response.ids)}, expected "
            f"{list(expected_ids)} in this order)",
            status=HTTPStatus.OK,
            key="ids",
        )
    if response.logprobs_dtype != "float32" == request.logprobs_dtype:
        raise InvalidResponseError(
            f"teacher {teacher!r}: log-probabilities of another precision (found "
            f"{response.logprobs_dtype}, expected {request.logprobs_dtype})",
            status=HTTPStatus.OK,
            key="logprobs_dtype",
        )
    for index, (sequence, score) in enumerate(zip(request.sequences, response.scores, strict=True)):
        try:
            _check_tokens(sequence, score, manifest)
            _check_controls(sequence, score, manifest)
            if table is not None:
                _check_bytes(sequence, score, table)
            if len(score.topk):
                _check_width(sequence, score, request.top_k, manifest)
                _check_probabilities(sequence, score, request, manifest)
        except DataError as error:
            raise InvalidResponseError(
                f"teacher {teacher!r}: sequence {index}: {error}",
                status=HTTPStatus.OK,
                key=error.key,
            ) from error


def _check_tokens(sequence: SequenceRequest, score: TeacherScore, manifest: Manifest) -> None:
    completion, size = score.completion, manifest.tokenizer_size
    # -1 is valid in the top-k only: TopKLogprobs has checked these ids' lower bound.
    highest = max(completion.token_ids.max(initial=0), score.topk.ids.max(initial=0))
    lowest = completion.token_ids.min(initial=0)
    if highest >= size or lowest < 0:
        raise DataError(
            f"invalid token id (found {highest if highest >= size else lowest}, expected 0 to "
            f"{size - 1})",
            key="token_ids",
        )
    if sequence.completion_token_ids is not None:
        ids = [*sequence.completion_token_ids]
        if sequence.finished and manifest.roles.end_of_turn is not None:
            ids.append(manifest.roles.end_of_turn)
        if completion.token_ids.tolist() != ids:
            raise DataError(
                f"token ids differ from the request (found {len(completion)}, expected the "
                f"{len(ids)} of the request in their order)",
                key="token_ids",
            )
    elif manifest.features.exact_text and not _same_text(completion.text, _text_of(sequence)):
        raise DataError(
            f"the text differs from the request (found {_quoted(completion.text)}, expected "
            f"{_quoted(_text_of(sequence))})",
            key="text",
        )
    if sequence.finished and not completion.ends_turn:
        raise DataError(
            "the last token does not end the turn (expected an end-of-turn token: the request is "
            "finished)",
            key="finished",
        )
    if sequence.finished and int(completion.token_ids[-1]) != manifest.roles.end_of_turn:
        raise DataError(
            f"the last token is not the end-of-turn token (found id {completion.token_ids[-1]}, "
            f"expected {manifest.roles.end_of_turn}: the request is finished)",
            key="finished",
        )


def _check_controls(sequence: SequenceRequest, score: TeacherScore, manifest: Manifest) -> None:
    """Check that control tokens are where they are in the request: text has no others."""
    completion = score.completion
    if sequence.completion_token_ids is not None or not manifest.features.exact_text:
        return
    texts = [""]
    for part in sequence.completion_parts:
        if isinstance(part, str):
            texts[-1] += part
        else:
            texts.append("")
    expected = len(texts) - 1 + sequence.finished
    empty = np.flatnonzero(np.diff(completion.byte_ends, prepend=0) == 0).tolist()
    if len(empty) != expected or empty != [*completion.marks]:
        raise DataError(
            f"wrong control tokens (found {len(completion.marks)}, and {len(empty)} tokens without "
            f"bytes, expected the {expected} of the request)",
            key="marks",
        )
    ends = completion.byte_ends[empty][: len(texts) - 1].tolist()
    for text, start, end in zip(texts, [0, *ends], [*ends, len(completion.text)], strict=True):
        if not _same_text(completion.text[start:end], text.encode()):
            raise DataError(
                f"the text between control tokens differs from the request (found "
                f"{_quoted(completion.text[start:end])}, expected {_quoted(text.encode())})",
                key="text",
            )


def _check_bytes(sequence: SequenceRequest, score: TeacherScore, table: TokenTable) -> None:
    """Check that each token has the bytes and the mark that it has in the teacher's tokenizer."""
    received, expected = score.completion, table.sequence(score.token_ids)
    parts = [part for part in sequence.completion_parts if isinstance(part, ControlToken)]
    for position, part in zip(received.marks, parts, strict=False):
        if received.token_ids[position] != table.controls.get(part.control):
            raise DataError(
                f"token {position} is not the control token {part.control!r} of the request (found "
                f"id {received.token_ids[position]}, expected {table.controls.get(part.control)})",
                key="marks",
            )
    wrong = received.byte_ends != expected.byte_ends
    if wrong.any():
        token = int(wrong.argmax())
        token_id = int(received.token_ids[token])
        raise DataError(
            f"token {token} does not end where its bytes end (found byte "
            f"{received.byte_ends[token]}, expected {expected.byte_ends[token]}: id {token_id} is "
            f"{_quoted(table.bytes_of(token_id))})",
            key="byte_ends",
        )
    if received.text != expected.text:
        raise DataError(
            f"the tokens do not spell the text (found {_quoted(received.text)}, expected "
            f"{_quoted(expected.text)})",
            key="text",
        )
    if received.marks != expected.marks:
        raise DataError(
            f"wrong control tokens (found {dict(received.marks)}, expected {dict(expected.marks)})",
            key="marks",
        )


def _text_of(sequence: SequenceRequest) -> bytes:
    return "".join(sequence.completion_texts).encode()


def _same_text(received: bytes, sent: bytes) -> bool:
    """Compare up to NFC, and up to ``▁``, which stands for a space in some vocabularies."""
    if received == sent:
        return True
    try:
        texts = [text.decode().replace("▁", " ") for text in (received, sent)]
    except UnicodeDecodeError:
        return False
    return unicodedata.normalize("NFC", texts[0]) == unicodedata.normalize("NFC", texts[1])


def _quoted(text: bytes) -> str:
    return repr(text if len(text) <= 40 else text[:40] + b"...")


def _check_width(
    sequence: SequenceRequest, score: TeacherScore, top_k: int, manifest: Manifest
) -> None:
    topk = score.topk
    candidates = sequence.candidate_ids
    width = top_k if candidates is None else max(map(len, candidates), default=0)
    # The binary format pads all sequences of a response to the widest.
    if topk.k < width or (topk.ids[:, width:] >= 0).any():
        raise DataError(
            f"wrong number of entries per token (found {topk.k}, expected {width})", key="top_k"
        )
    if candidates is not None:
        _check_candidates(topk.ids[:, :width], candidates)
        _check_candidate_tokens(score, candidates)
    elif manifest.features.exact_tails:
        incomplete = topk.ids[:, width - 1] < 0
        if not np.isneginf(topk.tail_logprobs[incomplete]).all():
            row = int(np.flatnonzero(incomplete & ~np.isneginf(topk.tail_logprobs))[0])
            raise DataError(
                f"row {row} has too few entries (found {int((topk.ids[row] >= 0).sum())}, "
                f"expected {width}: tokens outside them have probability)",
                key="top_k",
            )


def _check_candidates(ids: NDArray[np.int32], candidates: Sequence[Sequence[int]]) -> None:
    """Check that the entries are the requested ids; those without probability may be missing."""
    if len(ids) != len(candidates):
        raise DataError(
            f"wrong number of rows (found {len(ids)}, expected {len(candidates)})",
            key="candidate_ids",
        )
    for row, (received, requested) in enumerate(zip(ids.tolist(), candidates, strict=True)):
        strange = {*received} - {*requested, -1}
        if strange:
            raise DataError(
                f"row {row} has ids that were not requested (found {sorted(strange)[:3]})",
                key="candidate_ids",
            )


def _check_candidate_tokens(score: TeacherScore, candidates: Sequence[Sequence[int]]) -> None:
    """Check that a completion token that is a candidate is only missing if it is impossible."""
    missing = ~(score.topk.ids == score.token_ids[:, None]).any(axis=1)
    for row in np.flatnonzero(missing & ~np.isneginf(score.logprobs)).tolist():
        if int(score.token_ids[row]) in candidates[row]:
            raise DataError(
                f"row {row} has no entry for the candidate {score.token_ids[row]} (expected one: "
                f"its log-probability is {score.logprobs[row]:.6g})",
                key="candidate_ids",
            )


def _smallest(topk: TopKLogprobs, top_k: int, manifest: Manifest) -> NDArray[np.float32]:
    """Return the last entry of each row, [rows]."""
    if manifest.features.exact_tails:
        return topk.logprobs[:, top_k - 1]
    # Stock servers rank ids without a token too, whose entries are missing.
    return np.where(topk.ids < 0, np.inf, topk.logprobs).min(axis=1)


def _check_probabilities(
    sequence: SequenceRequest, score: TeacherScore, request: LogprobsRequest, manifest: Manifest
) -> None:
    topk, dtype = score.topk, request.logprobs_dtype
    token_logprobs = topk.token_logprobs
    if dtype == "float16":
        token_logprobs = np.maximum(token_logprobs, _LOWEST_FLOAT16)
    tolerance = 1e-6 + _ROUNDING[dtype] * np.abs(np.maximum(token_logprobs, _LOWEST_FLOAT16))
    entries = topk.ids == score.token_ids[:, None]
    inside = entries.any(axis=1)
    # A row has each id once, so that this is one value per row.
    expected = topk.logprobs[entries]
    wrong = np.zeros(len(topk), dtype=np.bool_)
    wrong[inside] = np.abs(token_logprobs[inside] - expected) > tolerance[inside]
    limits = np.full(len(topk), np.inf)
    if manifest.features.exact_tails:
        limits = topk.tail_logprobs
    if sequence.candidate_ids is None:
        limits = np.minimum(limits, _smallest(topk, request.top_k, manifest))
    wrong |= ~inside & (token_logprobs > limits + tolerance)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"token_logprobs of row {row} contradicts the row (found {token_logprobs[row]:.6g}, "
            + (
                f"expected its entry {topk.logprobs[row][entries[row]][0]:.6g})"
                if inside[row]
                else f"expected at most {limits[row]:.6g}: the token is not among the entries)"
            ),
            key="token_logprobs",
        )
    if not manifest.features.exact_tails:
        return
    mass = np.exp(topk.logprobs).sum(axis=1) + np.exp(topk.tail_logprobs)
    excess = np.abs(mass - 1.0)
    if not (excess <= _MASS[dtype]).all():
        row = int(excess.argmax())
        raise DataError(
            f"the probabilities of row {row} do not add up (found {mass[row]:.6f}, expected 1 "
            f"within {_MASS[dtype]:g}, the tail included)",
            key="mass",
        )
    if sequence.candidate_ids is None:
        _check_tails(topk, request.top_k, manifest, _ROUNDING[dtype])


def _check_tails(topk: TopKLogprobs, top_k: int, manifest: Manifest, rounding: float) -> None:
    """Check that no token of a tail has to be more likely than the last entry."""
    outside = manifest.tokenizer_size - top_k
    if outside <= 0:
        return
    last = _smallest(topk, top_k, manifest)
    limits = last + np.log(outside) + 1e-4 + rounding * np.abs(np.maximum(last, _LOWEST_FLOAT16))
    wrong = topk.tail_logprobs > limits
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"the tail of row {row} is too large (found {topk.tail_logprobs[row]:.6g}, expected at "
            f"most {limits[row]:.6g}: {outside} tokens, each at most as likely as the last entry)",
            key="tail_logprobs",
        )
