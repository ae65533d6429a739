"""The response of ``POST /generate``, in SGLang's form."""

import json
from collections.abc import Sequence

import numpy as np

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
from mopd_server.service_error import invalid_field


def require_start(start: int, prompts: Sequence[IntArray]) -> None:
    """Raise ServiceError 400 if a prompt has no token at the first position to return."""
    shortest = min(map(len, prompts))
    if start >= shortest:
        raise invalid_field(
            "logprob_start_len",
            f"found {start}, expected less than the number of tokens of each prompt ({shortest})",
        )


def encode_generate(
    request_id: str,
    prompts: Sequence[IntArray],
    scores: PromptScores,
    *,
    start: int,
    top_k: int,
    batch: bool,
) -> bytearray:
    """Encode the log-probabilities of prompts as JSON.

    Args:
        request_id: id of the request.
        prompts: ids of each prompt, [n].
        scores: of the prompts. In a translation, a realised token of unknown probability has that
            of the tail, an upper bound: clients expect a number.
        start: first position to return. Its token has no log-probability.
        top_k: entries of ``input_top_logprobs``; 0 for none.
        batch: encode a list, else the object of the only prompt.
    """
    body = bytearray(b"[" if batch else b"")
    for index, (prompt, topk) in enumerate(zip(prompts, scores.topk, strict=True)):
        meta: dict[str, object] = {
            "id": f"{request_id}-{index}" if batch else request_id,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(prompt),
            "completion_tokens": 0,
            "cached_tokens": 0,
            "output_token_logprobs": [],
        }
        if top_k:
            meta["output_top_logprobs"] = []
        if scores.fields is not None:
            meta.update(scores.fields[index])
        body += b"," if index else b""
        body += b'{"text":"","output_ids":[],"meta_info":' + json.dumps(meta)[:-1].encode()
        body += b',"input_token_logprobs":[[null,%d,null]' % prompt[start]
        rows = topk.rows(start, len(topk))
        logprobs = rows.token_logprobs
        if scores.unknown is not None:
            logprobs = np.where(np.isneginf(logprobs), rows.tail_logprobs, logprobs)
        body += _entries(b",[", logprobs, prompt[start + 1 :]).tobytes() + b"]"
        if top_k:
            body += b',"input_top_logprobs":[null' + _top_rows(rows).tobytes() + b"]"
        body += b"}}"
    return body + (b"]" if batch else b"")


def _entries(before: Texts | bytes, logprobs: np.ndarray, ids: IntArray) -> Texts:
    columns = [before, *logprob_texts(logprobs), number_texts(ids, b",", b",null]")]
    return join_columns(ids.shape, columns)


def _top_rows(topk: TopKLogprobs) -> Texts:
    """Return the list of each row, [rows, 1], after a comma."""
    separators = np.array([b" ["] + [b",["] * (topk.k - 1))
    entries = _entries(separators, topk.logprobs, topk.ids)
    blank(entries, topk.ids < 0)
    return join_columns((len(topk), 1), [b",[", join_rows(entries), b"]"])
