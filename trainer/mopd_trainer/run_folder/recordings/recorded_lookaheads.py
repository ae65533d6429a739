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
    rows = [each.following for each in lookaheads]
    places = [(each.student_row, each.teacher_row) for each in lookaheads]

    def column(name: str, *width: int) -> _Array:
        dtype = np.int32 if name == "ids" else np.float32
        values = [getattr(row, name)[0] for row in rows]
        return np.array(values, dtype=dtype).reshape(len(rows), *width)

    return {
        f"{key}.lookahead_places": np.array(places, dtype=np.int32).reshape(-1, 2),
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
    return tuple(
        Lookahead(student_row, teacher_row, topk.rows(at, at + 1))
        for at, (student_row, teacher_row) in enumerate(arrays[f"{key}.lookahead_places"].tolist())
    )
