"""vLLM's ``/inference/v1/generate``: log-probabilities of chosen ids at the completion's tokens.

A request contains the ids to score at each token, from ``prompt_logprob_start`` on, and the
response one float32 matrix, a base64-encoded ``.npy``. vLLM 0.32 and later have the fields, if
started with ``--enable-scale-out``; other versions ignore unknown fields and return no matrix.
"""

import base64
from collections.abc import Sequence
from http import HTTPStatus
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic
from numpy.typing import NDArray

from mopd_client.services.vllm_handshake import Handshake
from mopd_client.services.vllm_logprobs import tail_logprobs
from mopd_client.transport.outcome import problem_of
from mopd_protocol.arrays import IntArray
from mopd_protocol.errors import DataError
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

PATH = "/inference/v1/generate"
#: Field of the response with the matrix; null if vLLM has not computed all of its rows.
MATRIX = "prompt_token_id_logprobs"
#: Responses of servers without the route for chosen ids, or that it is disabled on.
_UNSUPPORTED = frozenset(
    (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.NOT_IMPLEMENTED,
    )
)


async def problem_with_candidates(
    handshake: Handshake, model: str, token_ids: Sequence[int], width: int
) -> str | None:
    """Score ``width`` ids at the last token; return why the server does not, None if it does.

    Raises:
        TeacherError: if the server is unavailable.
    """
    ids = np.full((1, width), token_ids[-1], dtype=np.int32)
    response = await handshake.post(
        PATH, candidates_request(model, token_ids, ids, read_cache=False)
    )
    if response.status_code in _UNSUPPORTED:
        return problem_of(response)
    if handshake.document(response).get(MATRIX) is None:
        return f"{MATRIX} not found in the response"
    return None


def scored_ids(completion_ids: IntArray, candidate_ids: Sequence[IntArray]) -> NDArray[np.int32]:
    """Return the ids of a request, [rows, 1 + k]: the completion's token and its candidates.

    Rows are padded with -1 to the longest list of candidates.
    """
    ids = np.full((len(completion_ids), 1 + max(map(len, candidate_ids))), ABSENT_ID, np.int32)
    ids[:, 0] = completion_ids
    for row, candidates in zip(ids, candidate_ids, strict=True):
        row[1 : 1 + len(candidates)] = candidates
    return ids


def candidates_request(
    model: str, token_ids: Sequence[int], ids: NDArray[np.int32], *, read_cache: bool
) -> dict[str, Any]:
    """Return the body that scores ``ids`` at the last ``len(ids)`` tokens.

    Args:
        read_cache: skip positions of the server's prefix cache, such as those of a prompt that
            other completions have. If it has positions to score, the response has no matrix.
    """
    return {
        "model": model,
        "token_ids": token_ids,
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            "prompt_logprob_token_ids": ids.tolist(),
            "prompt_logprob_start": len(token_ids) - 1 - len(ids),
            "skip_reading_prefix_cache": not read_cache,
        },
    }


def topk_of_matrix(matrix: str, ids: NDArray[np.int32], *, all_ids: int) -> TopKLogprobs:
    """Return the rows of a response, sorted, without entries of no probability.

    Args:
        matrix: of the response.
        ids: those of ``scored_ids``.
        all_ids: number of ids with a token.

    Raises:
        DataError: on another array or invalid numbers.
    """
    values = _decode(matrix, ids.shape)
    order = np.argsort(-values[:, 1:], axis=1, kind="stable")
    logprobs = np.take_along_axis(values[:, 1:], order, axis=1)
    entries = np.take_along_axis(ids[:, 1:], order, axis=1)
    return TopKLogprobs(
        np.where(np.isneginf(logprobs), ABSENT_ID, entries),
        logprobs,
        values[:, 0],
        tail_logprobs(logprobs.astype(np.float64), all_ids=all_ids).astype(np.float32),
    )


def _decode(matrix: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    try:
        file = BytesIO(base64.b64decode(matrix, validate=True))
        read_magic(file)
        header = read_array_header_1_0(file)
        if header != (shape, False, np.dtype(np.float32)):
            raise ValueError(f"found {header[0]} of {header[2]}, expected {shape} of float32")
        return np.frombuffer(file.read(), np.float32).reshape(shape)
    except (TypeError, ValueError) as error:
        raise DataError(f"{MATRIX} is invalid: {error}", key=MATRIX) from error
