"""Lookaheads as arrays of a recorded step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mopd_losses.core.loss import Lookahead
from mopd_protocol.topk_logprobs import TopKLogprobs

_Array = np.ndarray[Any, Any]


def lookahead_arrays(key: str, lookaheads: Sequence[Lookahead], k: int) -> dict[str, _Array]:
    """Return the arrays of a score's lookaheads, with names that begin with ``key``.

    Args:
        k: entries per row.
    """
    places = [(each.student_row, each.teacher_row, len(each.following)) for each in lookaheads]
    tokens = [token for each in lookaheads for token in each.token_ids]

    def column(name: str, *width: int) -> _Array:
        dtype = np.int32 if name == "ids" else np.float32
        parts = [getattr(each.following, name) for each in lookaheads]
        return np.concatenate([np.empty((0, *width), dtype), *parts], dtype=dtype)

    return {
        f"{key}.lookahead_places": np.array(places, dtype=np.int32).reshape(-1, 3),
        f"{key}.lookahead_tokens": np.array(tokens, dtype=np.int32),
        f"{key}.lookahead_ids": column("ids", k),
        f"{key}.lookahead_logprobs": column("logprobs", k),
        f"{key}.lookahead_token_logprobs": column("token_logprobs"),
        f"{key}.lookahead_tail_logprobs": column("tail_logprobs"),
    }


def load_lookaheads(key: str, arrays: Mapping[str, _Array]) -> tuple[Lookahead, ...] | None:
    """Return the lookaheads of a score; None if none were requested."""
    if f"{key}.lookahead_places" not in arrays:
        return None
    names = "ids", "logprobs", "token_logprobs", "tail_logprobs"
    topk = TopKLogprobs(*(arrays[f"{key}.lookahead_{name}"] for name in names))
    places = arrays[f"{key}.lookahead_places"]
    if places.shape[1] == 2:  # of version 0.1: one row each
        places = np.pad(places, ((0, 0), (0, 1)), constant_values=1)
    tokens = arrays.get(f"{key}.lookahead_tokens", np.zeros(0, dtype=np.int32)).tolist()
    lookaheads: list[Lookahead] = []
    row = token = 0
    for student_row, teacher_row, rows in places.tolist():
        ids = tuple(tokens[token : token + rows - 1])
        following = topk.rows(row, row + rows)
        lookaheads.append(Lookahead(student_row, teacher_row, following, ids))
        row, token = row + rows, token + rows - 1
    return tuple(lookaheads)
