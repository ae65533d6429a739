"""``Rows``: distributions of a teacher, each with as many candidates as matter."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mopd_protocol.topk_logprobs import TopKLogprobs

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

#: Candidates of less are part of the rest: they matter to no token.
_LEAST_NATS = np.log(3e-5)


class Rows:
    """Candidates of rows, one row after another.

    Args:
        scores: rows, and the realised token of each, which is added if the top-k omits it; None
            if they have none.
        size: of the vocabulary; stands for ids of a padded head.
    """

    def __init__(
        self, scores: Sequence[tuple[TopKLogprobs, NDArray[np.int32] | None]], size: int
    ) -> None:
        parts = [_candidates(*score) for score in scores]
        parts.append((np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0)))
        ids, probabilities, counts, tails = map(np.concatenate, zip(*parts, strict=True))
        self.tokens: Integers = np.minimum(ids, size)  # of all rows in succession
        self.probabilities: Floats = probabilities
        self.tails: Floats = tails  # [rows]
        self._starts: Integers = np.cumsum(counts) - counts
        self._counts: Integers = counts

    def candidates(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the candidates of some rows: which of the rows, and which candidate of all."""
        return expanded(self._starts[rows], self._counts[rows])


def expanded(starts: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Return the members of ranges: which of the ranges, and the member."""
    which = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(len(which)) - before[which] + starts[which]


def _candidates(
    topk: TopKLogprobs, realised: NDArray[np.int32] | None
) -> tuple[Integers, Floats, Integers, Floats]:
    """Return ids and probabilities of all rows in succession, their numbers, and the rests."""
    ids: Integers = topk.ids.astype(np.int64)
    logprobs: Floats = topk.logprobs.astype(np.float64)
    kept = (ids >= 0) & (topk.logprobs >= _LEAST_NATS)
    if realised is not None:
        omitted = ~(kept & (ids == realised[:, None])).any(axis=1)
        ids = np.column_stack([ids, realised.astype(np.int64)])
        logprobs = np.column_stack([logprobs, topk.token_logprobs.astype(np.float64)])
        kept = np.column_stack([kept, omitted])
    probabilities = np.where(kept, np.exp(logprobs), 0.0)
    tails = np.clip(1.0 - probabilities.sum(axis=1), 0.0, None)
    return ids[kept], probabilities[kept], kept.sum(axis=1), tails
