"""vLLM's flat lists of prompt log-probabilities -> ``TopKLogprobs``, a whole sequence at a time.

vLLM gives, for every position of what it read, the log-probabilities of the token that stands
there and of the k most likely ones. Here is the one place where its positions become our rows: the
entries at position ``prompt length + r`` are the distribution that predicts completion token ``r``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


class FlatLogprobs(Protocol):
    """The lists of ``vllm.logprobs.FlatLogprobs`` that are read.

    Position ``i`` owns the entries from ``start_indices[i]`` to ``end_indices[i]``. Position 0,
    which nothing predicts, owns none. Every other one owns its own token first; then the k most
    likely, with or without that token: k + 1 entries. Where vLLM drops the repetition of a token
    that is among the k, there are k.
    """

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def topk_of_flat(
    flat: FlatLogprobs, completion_ids: NDArray[np.int32], *, top_k: int, real_ids: int
) -> TopKLogprobs:
    """The rows of the last ``len(completion_ids)`` positions of ``flat``.

    Args:
        flat: of a whole sequence, prompt and completion.
        completion_ids: ``[rows]``, at least one: the tokens that stand at those positions.
        top_k: as it was asked of vLLM.
        real_ids: ids that can hold probability at all; with that many entries there is no tail.

    Raises:
        ValueError: when the lists do not have the form above, or hold NaN.
    """
    rows = len(completion_ids)
    starts = np.array(flat.start_indices[-rows:], dtype=np.int64)
    counts = np.array(flat.end_indices[-rows:], dtype=np.int64) - starts
    if len(starts) < rows or not np.isin(counts, (max(top_k, 1), top_k + 1)).all():
        raise ValueError(
            f"vLLM gave {sorted(set(counts.tolist()))} entries for {len(starts)} positions; "
            f"expected {top_k} or {top_k + 1} for {rows}"
        )
    first = int(starts[0])
    ids = np.array(flat.token_ids[first:], dtype=np.int64)
    logprobs = np.array(flat.logprobs[first:], dtype=np.float32)
    if not np.array_equal(ids[starts - first], completion_ids):
        raise ValueError("vLLM's first entries are not the tokens that it was given to read")
    top = (starts - first + counts - top_k)[:, None] + np.arange(top_k)
    return truncated(
        ids[top], logprobs[top], completion_ids, logprobs[starts - first], real_ids=real_ids
    )


@dataclass(frozen=True, eq=False)
class PromptArrays:
    """What vLLM's engine sends for positions 1, 2, …, before vLLM makes lists of it.

    Raises:
        ValueError: when the shapes are not one.
    """

    token_ids: NDArray[np.integer]  # [positions - 1, 1 + k]: a position's own token, then the top k
    logprobs: Float32  # [positions - 1, 1 + k], nats

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise ValueError(
                f"vLLM gave ids of shape {self.token_ids.shape} and log-probabilities of shape "
                f"{self.logprobs.shape}; expected one shape [positions, 1 + k]"
            )


def topk_of_arrays(
    arrays: PromptArrays, completion_ids: NDArray[np.int32], *, top_k: int, real_ids: int
) -> TopKLogprobs:
    """As ``topk_of_flat``, which it equals, without an object for each candidate.

    Raises:
        ValueError: when the arrays do not have the form above, or hold NaN.
    """
    rows = len(completion_ids)
    ids, logprobs = arrays.token_ids[-rows:], arrays.logprobs[-rows:]
    if ids.shape != (rows, top_k + 1):
        raise ValueError(
            f"vLLM gave {ids.shape[1]} entries for {len(ids)} positions; expected {top_k + 1} for "
            f"{rows}"
        )
    if not np.array_equal(ids[:, 0], completion_ids):
        raise ValueError("vLLM's first entries are not the tokens that it was given to read")
    return truncated(ids[:, 1:], logprobs[:, 1:], completion_ids, logprobs[:, 0], real_ids=real_ids)


def truncated(
    ids: NDArray[np.integer],
    logprobs: Float32,
    tokens: NDArray[np.integer],
    token_logprobs: Float32,
    *,
    real_ids: int,
) -> TopKLogprobs:
    """Sorted rows with their tails, from entries in any order.

    Args:
        ids: ``[rows, k]``; ``-1`` where a row has fewer entries.
        logprobs: ``[rows, k]`` nats; ``-inf`` there, and where a token is impossible.
        tokens: ``[rows]``, the tokens that are really there.
        token_logprobs: ``[rows]``, their nats.
        real_ids: ids that can hold probability at all.

    Raises:
        ValueError: on NaN.
    """
    if np.isnan(logprobs).any() or np.isnan(token_logprobs).any():
        raise ValueError(
            "the engine computed NaN; are the weights sound, and the precision enough?"
        )
    complete = (ids >= 0).sum(axis=1) >= real_ids
    order = np.argsort(-logprobs, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    logprobs = np.take_along_axis(logprobs, order, axis=1)
    ids = np.where(np.isneginf(logprobs), ABSENT_ID, ids)
    elsewhere = np.where((ids == tokens[:, None]).any(axis=1), -np.inf, token_logprobs)
    return TopKLogprobs(
        ids=ids.astype(np.int32),
        logprobs=logprobs,
        token_logprobs=token_logprobs,
        tail_logprobs=np.where(complete, -np.inf, _tails(logprobs, elsewhere)),
    )


def _tails(logprobs: Float32, elsewhere: NDArray[np.floating]) -> NDArray[np.float64]:
    """``log(1 - sum of p)`` of each row, in float64, and never less than what is known to be there.

    What float32 entries leave of one is known to about 1e-7. ``elsewhere`` ``[rows]`` is the
    log-probability of a token that is not among the entries, so the tail holds at least that.
    """
    kept = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):  # log(0): nothing is left
        tails = np.log1p(-np.minimum(kept, 1.0))
    return np.maximum(tails, elsewhere)


def padded_rows(rows: Sequence[NDArray[np.integer]], width: int) -> Int32:
    """``[rows, width]``, ``-1`` where a row has fewer ids."""
    padded = np.full((len(rows), width), ABSENT_ID, dtype=np.int32)
    for position, row in enumerate(rows):
        padded[position, : len(row)] = row
    return padded
