"""The response of ``POST /v1/completions``, in vLLM's form."""

import json
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.arrays import IntArray
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.compatible.json_entries import (
    Texts,
    blank,
    join_columns,
    join_rows,
    logprob_texts,
    number_texts,
)
from mopd_server.compatible.prompt_scorer import PromptScores


def encode_completions(
    name: str,
    request_id: str,
    prompts: Sequence[IntArray],
    scores: PromptScores,
    *,
    token_ids: bool,
) -> bytearray:
    """Encode the distributions of prompts as JSON.

    Args:
        name: of the teacher.
        request_id: id of the request.
        prompts: ids of each prompt, [n].
        scores: of the prompts. Without ranks, that of a token outside the k entries is written as
            k + 1, the lowest possible.
        token_ids: add the ids of the prompts.
    """
    total = sum(map(len, prompts))
    body = bytearray()
    header = {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": name,
        "usage": {"prompt_tokens": total, "completion_tokens": 0, "total_tokens": total},
    }
    body += json.dumps(header)[:-1].encode() + b',"choices":['
    for index, (prompt, topk) in enumerate(zip(prompts, scores.topk, strict=True)):
        choice: dict[str, object] = {
            "index": index,
            "text": "",
            "finish_reason": "length",
            "logprobs": None,
        }
        if token_ids:
            choice["prompt_token_ids"] = prompt.tolist()
        if scores.fields is not None:
            choice.update(scores.fields[index])
        unknown = None if scores.unknown is None else scores.unknown[index]
        body += b"," if index else b""
        body += json.dumps(choice)[:-1].encode() + b',"prompt_logprobs":[null'
        body += _rows(prompt[1:], topk, unknown).tobytes()
        body += b"]}"
    body += b"]}"
    return body


def _rows(tokens: IntArray, topk: TopKLogprobs, unknown: NDArray[np.bool_] | None) -> Texts:
    """Return the object of each row, [rows, 1], after a comma: k entries and the realised token.

    Args:
        unknown: rows that are null, of a translation. Its other rows have at least one entry, and
            none for a realised token of unknown probability.
    """
    ids = np.concatenate([topk.ids, tokens[:, None]], axis=1)
    logprobs = np.concatenate([topk.logprobs, topk.token_logprobs[:, None]], axis=1)
    columns = ids.shape[1]
    ranks = np.broadcast_to(np.arange(1, columns + 1), ids.shape).copy()
    if topk.token_ranks is not None:  # equal ones are in order
        ranks[:, -1] = np.maximum(topk.token_ranks, columns)
    entries = join_columns(
        ids.shape,
        [
            np.array([b" "] + [b","] * (columns - 1)),
            number_texts(ids, b'"', b'":{"logprob":'),
            *logprob_texts(logprobs),
            number_texts(ranks, b',"rank":', b"}"),
        ],
    )
    missing = ids < 0
    missing[:, -1] = (topk.ids == tokens[:, None]).any(axis=1)
    if unknown is not None:
        missing[:, -1] |= np.isneginf(topk.token_logprobs)
    blank(entries, missing)
    rows = join_columns((len(tokens), 1), [b",{", join_rows(entries), b"}"])
    if unknown is not None:
        rows[unknown] = b",null".ljust(rows.dtype.itemsize)
    return rows
