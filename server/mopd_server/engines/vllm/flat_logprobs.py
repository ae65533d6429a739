"""Log-probabilities from vLLM -> ``TopKLogprobs``, one sequence per call.

Of an unknown version of vLLM, these are lists. For every position of the prompt, they contain the
log-probabilities of its token and of the k most likely ids. The entries at position ``prompt
length + r`` are the distribution that predicts completion token ``r``.
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
    """The lists of ``vllm.logprobs.FlatLogprobs``.

    Position ``i`` has the entries from ``start_indices[i]`` to ``end_indices[i]``: none at position
    0, which nothing predicts; else its own token, followed by the k most likely ids. vLLM may drop
    the repetition of a token that is among the k, so that there are k entries instead of k + 1.
    """

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def topk_from_lists(
    flat: FlatLogprobs, completion_ids: NDArray[np.int32], *, top_k: int, real_ids: int
) -> TopKLogprobs:
    """Convert the last ``len(completion_ids)`` positions of ``flat``.

    Args:
        flat: entries of a full sequence, prompt and completion.
        completion_ids: ``[rows]``, at least one: the tokens at those positions.
        top_k: as requested from vLLM.
        real_ids: number of ids with a token; a row with that many entries has no tail.

    Raises:
        ValueError: if the lists do not have the form above, or contain NaN.
    """
    rows = len(completion_ids)
    starts = np.array(flat.start_indices[-rows:], dtype=np.int64)
    counts = np.array(flat.end_indices[-rows:], dtype=np.int64) - starts
    if len(starts) < rows or not np.isin(counts, (max(top_k, 1), top_k + 1)).all():
        raise ValueError(
            f"vLLM returned log-probabilities of the wrong size (found "
            f"{sorted(set(counts.tolist()))} entries for {len(starts)} positions, expected {top_k} "
            f"or {top_k + 1} for {rows})"
        )
    first = int(starts[0])
    ids = np.array(flat.token_ids[first:], dtype=np.int64)
    logprobs = np.array(flat.logprobs[first:], dtype=np.float32)
    _require_tokens(ids[starts - first], completion_ids)
    top = (starts - first + counts - top_k)[:, None] + np.arange(top_k)
    return truncate(
        ids[top], logprobs[top], completion_ids, logprobs[starts - first], real_ids=real_ids
    )


@dataclass(frozen=True, eq=False)
class CompletionArrays:
    """Arrays of ``CompletionRows``, as a worker returns them."""

    ids: Int32  # [rows, k]
    logprobs: Float32  # [rows, k + 2], nats: completion token, ids, tail
    ranks: Int32  # [rows]: of the completion token; 0 with candidates

    def scores(self, rows: int) -> TopKLogprobs | None:
        """Return the scores of ``rows`` completion tokens, None if some were not computed.

        Raises:
            ValueError: if the arrays do not have the form above, or contain NaN.
        """
        if len(self.ids) < rows:
            return None
        expected = (rows, self.ids.shape[1] + 2)
        if len(self.ids) != rows or self.logprobs.shape != expected:
            raise ValueError(
                f"vLLM's worker returned arrays of the wrong form (found ids {self.ids.shape} and "
                f"log-probabilities {self.logprobs.shape}, expected {expected})"
            )
        _require_numbers(self.logprobs)
        return TopKLogprobs(
            ids=self.ids,
            logprobs=self.logprobs[:, 1:-1],
            token_logprobs=self.logprobs[:, 0],
            tail_logprobs=self.logprobs[:, -1],
            token_ranks=self.ranks if self.ranks.all() else None,
        )


def truncate(
    ids: NDArray[np.integer],
    logprobs: Float32,
    tokens: NDArray[np.integer],
    token_logprobs: Float32,
    *,
    real_ids: int,
) -> TopKLogprobs:
    """Sort entries in any order, and compute their tails.

    Args:
        ids: ``[rows, k]``; ``-1`` where missing.
        logprobs: ``[rows, k]`` nats; ``-inf`` where missing or impossible.
        tokens: ``[rows]``, the completion tokens.
        token_logprobs: ``[rows]``, nats.
        real_ids: number of ids with a token.

    Raises:
        ValueError: on NaN.
    """
    _require_numbers(logprobs)
    _require_numbers(token_logprobs)
    complete = (ids >= 0).sum(axis=1) >= real_ids
    order = np.argsort(-logprobs, axis=1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=1)
    logprobs = np.take_along_axis(logprobs, order, axis=1)
    ids = np.where(np.isneginf(logprobs), ABSENT_ID, ids)
    lower_bounds = np.where((ids == tokens[:, None]).any(axis=1), -np.inf, token_logprobs)
    tails = np.where(complete, -np.inf, _tails(logprobs, lower_bounds)).astype(np.float32)
    return TopKLogprobs(
        ids=ids.astype(np.int32),
        logprobs=logprobs,
        token_logprobs=token_logprobs,
        tail_logprobs=tails,
    )


def _require_tokens(ids: NDArray[np.integer], completion_ids: NDArray[np.int32]) -> None:
    if not np.array_equal(ids, completion_ids):
        raise ValueError("vLLM's first entries are not the tokens of its prompt")


def _tails(logprobs: Float32, lower_bounds: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return ``log(1 - sum of p)`` of each row in float64, at least ``lower_bounds``.

    One minus float32 entries is known to about 1e-7. ``lower_bounds`` ``[rows]`` is the
    log-probability of a token outside the entries, which is a part of the tail.
    """
    kept = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    with np.errstate(divide="ignore"):  # log(0)
        tails = np.log1p(-np.minimum(kept, 1.0))
    return np.maximum(tails, lower_bounds)


def pad_rows(rows: Sequence[NDArray[np.integer]]) -> Int32:
    """Return ``[rows, longest]``, padded with ``-1``."""
    padded = np.full((len(rows), max(map(len, rows))), ABSENT_ID, dtype=np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _require_numbers(logprobs: Float32) -> None:
    if np.isnan(logprobs).any():
        raise ValueError("the engine computed NaN. Check the weights and the dtype.")
